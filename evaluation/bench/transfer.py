"""Gains of every family on all datasets of a race, with their mean over the transfer sets: all sets but the first, on
which trained heads were chosen.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

from evaluation.bench.schedules import DEFAULT
from evaluation.bench.standings import SAMPLING_NAMES, best_of, name_of
from evaluation.families import ALONE, BASELINE, PRODUCT
from evaluation.gain import Gain
from evaluation.hierarchies.built import Standing
from evaluation.table import Table

CellStandings = tuple[Mapping[str, Any], Sequence[Standing]]
MEAN = "mean of transfer sets"
_NORMAL = 1.96
"""Standard errors on either side of a mean that hold 95 % of it."""


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """The mean of gains on different sets with independent prompts, and its normal interval."""
    value = sum(gain.value for gain in gains) / len(gains)
    error = sqrt(sum(gain.standard_error**2 for gain in gains)) / len(gains)
    return Gain(value, value - _NORMAL * error, value + _NORMAL * error, error)


def transfer_sheets(cells: Sequence[CellStandings]) -> Iterator[Table]:
    """One table per rival: families down, datasets and their mean across."""
    note = "gain on a clock, with its 95 % interval over prompts; each family at its fastest arm"
    for rival in (BASELINE, PRODUCT, DEFAULT, ALONE):
        rows = [
            {"policy": name_of(family)}
            | {f"{dataset}, {SAMPLING_NAMES[sampling]}": gain.text for (sampling, dataset), gain in gains.items()}
            for family, gains in gains_over(cells, rival).items()
        ]
        if rows:
            yield Table(f"over {name_of(rival)}", rows, note)


def gains_over(cells: Sequence[CellStandings], rival: str) -> dict[str, dict[tuple[str, str], Gain]]:
    """Family -> (sampling, dataset or MEAN) -> its gain over a rival; the rival itself is left out."""
    first_set = cells[0][0]["dataset"]
    gains: dict[str, dict[tuple[str, str], Gain]] = {}
    for family in dict.fromkeys(standing.family for _, standings in cells for standing in standings):
        of_family: dict[tuple[str, str], Gain] = {}
        for sampling in dict.fromkeys(cell["sampling"] for cell, _ in cells):
            best_arms = {
                cell["dataset"]: best_of(standings, family) for cell, standings in cells if cell["sampling"] == sampling
            }
            of_sets = {name: arm.over[rival] for name, arm in best_arms.items() if arm and rival in arm.over}
            of_family |= {(sampling, name): gain for name, gain in of_sets.items()}
            if transfer := [gain for name, gain in of_sets.items() if name != first_set]:
                of_family[sampling, MEAN] = mean_gain(transfer)
        if any(gain.value or gain.standard_error for gain in of_family.values()):  # the rival's over itself are 0
            gains[family] = of_family
    return gains
