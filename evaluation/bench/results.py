"""The results of a race, in tables, a plot and a sentence: gains over our best fixed length and each schedule.

    gain      tokens per second over all prompts / of the other arm - 1, with the 95 % interval of the paired bootstrap
              over prompts
    median    of the ratios prompt by prompt, which one disturbed prompt cannot change

Each rival is the fastest of its kind on the timed prompts: of the fixed lengths that ran, the training-free policies,
transformers' constant schedules, and the target's two ways to run without a draft. This favours the rival, so that a
remaining lead is not due to a badly chosen one. Cycles of a prompt count as one sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np

from decode.policies.registry import POLICIES
from evaluation.bench.arms import DEFAULT, SCHEDULES, UNASSISTED
from evaluation.families import ALONE, BASELINE, PRODUCT, TRAINING_FREE
from evaluation.families import family as family_named
from evaluation.figure import GREY, Plot, panels_of, plot_of
from evaluation.gain import Gain, Spent, gain_over, median_ratio
from evaluation.table import Table

SAMPLING_NAMES = {"greedy": "greedy", "sampled": "T=1", "nucleus": "T=0.7, top-p 0.9", "own": "as in the config"}
MEAN = "mean of transfer sets"
_NORMAL = 1.96
"""Standard errors on either side of a mean that hold 95 % of it."""
_RIVALS = {rival: (rival,) for rival in (BASELINE, *SCHEDULES, PRODUCT)} | {
    ALONE: (ALONE, UNASSISTED),
    TRAINING_FREE: tuple(POLICIES.keys() - {"head"}),
}
"""Rival -> the families of which the fastest is it."""


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """One arm of a cell, on the clock beside its rivals."""

    family: str
    setting: str
    is_foreign: bool
    """Whether one of its heads was trained under another sampling."""
    on_dev: float | None
    """Tokens per second that were predicted when dev chose the setting; None for a policy that was named."""
    spent: Spent
    rivals: Mapping[str, Spent]

    @cached_property
    def over(self) -> dict[str, Gain]:
        """Gain over each rival."""
        return {name: gain_over(rival, self.spent) for name, rival in self.rivals.items()}

    @property
    def median_over(self) -> dict[str, float]:
        """The median of ratios prompt by prompt, minus 1, over each rival; for texts of one length."""
        return {name: median_ratio(rival.seconds, self.spent.seconds) - 1 for name, rival in self.rivals.items()}

    def as_dict(self) -> dict[str, Any]:
        """The arm in JSON."""
        named = {"family": self.family, "setting": self.setting, "is_foreign": self.is_foreign}
        gains = {name: gain._asdict() for name, gain in self.over.items()}
        return named | {"tokens_per_s": self.spent.tokens_per_s, "over": gains, "median_over": self.median_over}


Cell = tuple[dict[str, Any], Sequence[RaceResult]]
"""A cell of a race as it is stored, and the results of its arms."""


def results_of(cell: Mapping[str, Any]) -> list[RaceResult]:
    """Every arm of a cell.

    Raises:
        ValueError: no fixed length among the arms.
    """
    arms = [(arm, Spent(np.array(arm["tokens"]), np.array(arm["seconds"]))) for arm in cell["arms"]]
    members = {name: [spent for arm, spent in arms if arm["family"] in of] for name, of in _RIVALS.items()}
    if not members[BASELINE]:
        raise ValueError(
            "no policy is a fixed length, which gains are measured from; name at least one, as fixed_length:k=5"
        )
    rivals = {name: max(of, key=lambda spent: spent.tokens_per_s) for name, of in members.items() if of}
    names = ("family", "setting", "is_foreign", "on_dev")
    return [RaceResult(**{name: arm[name] for name in names}, spent=spent, rivals=rivals) for arm, spent in arms]


def cell_table(cell: Mapping[str, Any], results: Sequence[RaceResult]) -> Table:
    """The table of one cell."""
    rivals = [name for name in (BASELINE, *SCHEDULES) if name in results[0].rivals]
    rows = []
    for one in results:
        is_slower = one.family == BASELINE and one.spent is not one.rivals[BASELINE]  # only the fastest is the best
        name = "fixed length" if is_slower else name_of(one.family)
        rows.append(
            {
                "policy": name + " (head of another sampling)" * one.is_foreign,
                "setting": one.setting,
                "tokens/s": f"{one.spent.tokens_per_s:.1f}",
                "alone": f"x{1 + one.over[ALONE].value:.2f}",
                **{f"over {name_of(rival)}": _with_median(one, rival) for rival in rivals},
            }
        )
    times = f"t_draft {1e3 * cell['times']['t_draft_s']:.2f} ms, t_target/t_draft {ratio_of(cell):.2f}"
    texts = f"{len(results[0].spent.tokens)} prompts of {cell['dataset']}, at most {cell['num_tokens']} tokens"
    title = f"{SAMPLING_NAMES[cell['sampling']]}: {times}; {texts}, {cell['cycles']} times"
    note = (
        "gain in per cent, its 95 % interval over prompts, and the median of the ratios of prompts; each rival is the "
        "fastest of its kind on these prompts, the best fixed length and the target alone included"
    )
    return Table(f"{title}; default schedule: {cell['default_schedule']}", rows, note, names=2)


def summary_table(cells: Sequence[Cell]) -> Table:
    """One row per cell and family of trained heads."""
    known = {rival for _, results in cells for rival in results[0].rivals}
    rivals = {rival: f"over {name_of(rival)}" for rival in (BASELINE, TRAINING_FREE, *SCHEDULES) if rival in known}
    rows = [
        {
            "ratio": f"{ratio_of(cell):.2f}",
            "dataset": cell["dataset"],
            "sampling": SAMPLING_NAMES[cell["sampling"]],
            "policy": name_of(one.family),
            "setting": one.setting,
            **{heading: _short(one.over[rival]) for rival, heading in rivals.items() if rival in one.over},
        }
        for cell, results in cells
        for one in results
        if family_named(one.family).needs_training
    ]
    headings = ("ratio", "dataset", "sampling", "policy", "setting", *rivals.values())
    note = "gain in per cent over each rival, and its 95 % interval over prompts"
    return Table("trained heads", rows, note, names=5, headings=headings)


def transfer_tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """One table per rival: families down; across datasets, and their mean over the transfer sets: all sets but the
    first, on which trained heads were chosen.
    """
    note = "gain on a clock, with its 95 % interval over prompts; each family at its fastest arm"
    for rival in (BASELINE, PRODUCT, DEFAULT, ALONE):
        rows = [
            {"policy": name_of(family)}
            | {f"{dataset}, {SAMPLING_NAMES[sampling]}": gain.text for (sampling, dataset), gain in gains.items()}
            for family, gains in gains_over(cells, rival).items()
        ]
        if rows:
            yield Table(f"over {name_of(rival)}", rows, note)


def gains_over(cells: Sequence[Cell], rival: str) -> dict[str, dict[tuple[str, str], Gain]]:
    """Family -> (sampling, dataset or MEAN) -> its gain over a rival; the rival itself is left out."""
    first_set, gains = cells[0][0]["dataset"], {}
    for family in dict.fromkeys(one.family for _, results in cells for one in results):
        of_family: dict[tuple[str, str], Gain] = {}
        for sampling in dict.fromkeys(cell["sampling"] for cell, _ in cells):
            of_cells = {cell["dataset"]: best_of(of, family) for cell, of in cells if cell["sampling"] == sampling}
            of_sets = {name: arm.over[rival] for name, arm in of_cells.items() if arm and rival in arm.over}
            of_family |= {(sampling, name): gain for name, gain in of_sets.items()}
            if transfer := [gain for name, gain in of_sets.items() if name != first_set]:
                of_family[sampling, MEAN] = mean_gain(transfer)
        if any(gain.value or gain.standard_error for gain in of_family.values()):  # the rival's over itself are 0
            gains[family] = of_family
    return gains


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """The mean of gains on different sets with independent prompts, and its normal interval."""
    value = sum(gain.value for gain in gains) / len(gains)
    error = sqrt(sum(gain.standard_error**2 for gain in gains)) / len(gains)
    return Gain(value, value - _NORMAL * error, value + _NORMAL * error, error)


def verdict_of(cell: Mapping[str, Any], results: Sequence[RaceResult]) -> str:
    """Lead of our arm that dev chose over each schedule, and our arms that are slower than one.

    Policies that were named have no figures of dev: the fastest of them on the timed prompts is reported.
    """
    ours = [one for one in results if one.family not in (*SCHEDULES, ALONE, UNASSISTED)]
    if any(one.on_dev is not None for one in ours):
        how, best = "dev chose", max(ours, key=lambda one: one.on_dev or 0.0)
    else:
        how = "fastest of the named policies on these prompts:"
        best = max(ours, key=lambda one: one.spent.tokens_per_s)
    where = f"{cell['dataset']}, {SAMPLING_NAMES[cell['sampling']]} at ratio {ratio_of(cell):.2f}"
    against = [f"{_with_median(best, name)} % over {name_of(name)}" for name in SCHEDULES if name in best.over]
    if not against:
        lead = "" if best.family == BASELINE else f", {_short(best.over[BASELINE])} % over the best fixed length"
        alone = "without --race.assistant no schedule of transformers runs beside it"
        return f"{where}: {how} {name_of(best.family)}{lead}; {alone}."
    slower = [
        f"{name_of(one.family)} than {name_of(name)}"
        for one in ours
        for name in SCHEDULES
        if name in one.over and one.over[name].value < 0
    ]
    rest = f"Slower: {'; '.join(slower)}" if slower else "None of ours is slower than a schedule"
    return f"{where}: {how} {name_of(best.family)}: {', '.join(against)}. {rest}."


def race_plot(cells: Sequence[Cell]) -> Plot:
    """Gain over the best fixed length: one panel per dataset and sampling, one row per family.

    Speed without a draft would hide all other differences, so it is shown only where nothing else is.
    """
    ran = dict.fromkeys(one.family for _, results in cells for one in results)
    families = [family for family in ran if family not in (BASELINE, ALONE, UNASSISTED)] or [ALONE]
    figure, panels = panels_of(len(cells), width=2.2 + 2.6 * len(cells), height=0.34 * len(families) + 1.4)
    for axes, (cell, results) in zip(panels, cells, strict=True):
        for row, family in enumerate(families):
            if best := best_of(results, family):
                gain, shape = best.over[BASELINE], "s" if family in SCHEDULES else "o"
                errors = 100 * np.array([[gain.value - gain.low], [gain.high - gain.value]])
                axes.errorbar(100 * gain.value, row, xerr=errors.clip(min=0), fmt=shape, markersize=4, capsize=2)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_title(f"{cell['dataset']}\n{SAMPLING_NAMES[cell['sampling']]}", fontsize=9)
        axes.set_yticks(range(len(families)), [])
        axes.set_ylim(len(families) - 0.5, -0.5)
    panels[0].set_yticks(range(len(families)), [name_of(family) for family in families], fontsize=8)
    figure.supxlabel("gain over the best fixed length, %", fontsize=9)
    caption = "Gain over the best fixed length on a clock; whiskers: 95 %; squares: transformers."
    return plot_of("bench", caption, figure)


def best_of(results: Sequence[RaceResult], family: str) -> RaceResult | None:
    """The fastest arm of a family; None where it did not run."""
    of_family = [one for one in results if one.family == family]
    return max(of_family, key=lambda one: one.spent.tokens_per_s, default=None)


def ratio_of(cell: Mapping[str, Any]) -> float:
    """The cell's t_target(0) / t_draft."""
    return float(cell["times"]["t_target_s"][0] / cell["times"]["t_draft_s"])


def name_of(family: str) -> str:
    """Name of a family or a rival in tables and plots."""
    return f"best {family}" if family == TRAINING_FREE else family_named(family).label


def _with_median(one: RaceResult, rival: str) -> str:
    gain = one.over[rival]
    return "" if gain.standard_error == 0 else f"{_short(gain)} {100 * one.median_over[rival]:+.1f}"


def _short(gain: Gain) -> str:
    return f"{100 * gain.value:+.1f} ({100 * gain.low:+.0f}, {100 * gain.high:+.0f})"
