"""Where every family stands over all datasets of a race, and on average abroad: on the sets other than the first."""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

from evaluation.bench.schedules import DEFAULT
from evaluation.bench.standings import SAMPLING_NAMES, best_of, name_of
from evaluation.competitors import Standing
from evaluation.contest.families import ALONE, BASELINE, PRODUCT
from evaluation.intervals import Gain
from evaluation.sheet import Sheet

Judged = tuple[Mapping[str, Any], Sequence[Standing]]
"""A cell and its standings."""
_RIVALS = (BASELINE, PRODUCT, DEFAULT, ALONE)
_NORMAL = 1.96
"""Standard errors to either side of a mean that hold 95 % of it."""


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """The mean of gains on different sets, whose prompts are drawn independently: its standard error is that of a sum
    of independent numbers, its interval the normal one.
    """
    value = sum(gain.value for gain in gains) / len(gains)
    error = sqrt(sum(gain.standard_error**2 for gain in gains)) / len(gains)
    return Gain(value, value - _NORMAL * error, value + _NORMAL * error, error)


def abroad_sheets(cells: Sequence[Judged]) -> Iterator[Sheet]:
    """One table per rival: families down, datasets and their mean abroad across."""
    for rival in _RIVALS:
        rows = [
            {"policy": name_of(family)}
            | {f"{place}, {SAMPLING_NAMES[sampling]}": gain.text for (sampling, place), gain in gains.items()}
            for family, gains in gains_over(cells, rival).items()
        ]
        if rows:
            note = (
                "gain on a clock, with its 95 % interval over prompts; each family at its fastest arm. abroad: the "
                "mean over the sets but the first, on which trained heads were chosen"
            )
            yield Sheet(f"over {name_of(rival)}", rows, note)


def gains_over(cells: Sequence[Judged], rival: str) -> dict[str, dict[tuple[str, str], Gain]]:
    """Family -> (sampling, dataset or "abroad") -> its gain over a rival; the rival itself is left out."""
    home = cells[0][0]["dataset"]
    samplings = list(dict.fromkeys(cell["sampling"] for cell, _ in cells))
    families = dict.fromkeys(standing.family for _, standings in cells for standing in standings)
    found: dict[str, dict[tuple[str, str], Gain]] = {}
    for family in families:
        gains: dict[tuple[str, str], Gain] = {}
        for sampling in samplings:
            of_sampling = {}
            for cell, standings in cells:
                best = best_of(standings, family)
                if cell["sampling"] == sampling and best and rival in best.over:
                    of_sampling[cell["dataset"]] = best.over[rival]
            gains |= {(sampling, dataset): gain for dataset, gain in of_sampling.items()}
            away = [gain for dataset, gain in of_sampling.items() if dataset != home]
            if away:
                gains[sampling, "abroad"] = mean_gain(away)
        if any(gain.value or gain.standard_error for gain in gains.values()):  # a rival has none over itself
            found[family] = gains
    return found
