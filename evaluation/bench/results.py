"""The results of a race, in tables, a plot and a sentence: gains over our best fixed length and each schedule.

    gain      tokens per second over all prompts / of the other arm - 1, with the 95 % interval of the paired bootstrap
              over prompts
    median    of the ratios prompt by prompt, which one disturbed prompt cannot change

Each rival is the fastest of its kind on the timed prompts: of the fixed lengths that ran, the training-free policies,
transformers' constant schedules, and the target's two ways to run without a draft. This favours the rival, so that a
remaining lead is not due to a badly chosen one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from decode.policies import FixedLength
from decode.policies.registry import POLICIES
from evaluation.bench.arms import DEFAULT, SCHEDULES, UNASSISTED
from evaluation.competitor import Competitor
from evaluation.contest import Result, fastest
from evaluation.families import ALONE, BASELINE, PRODUCT, TRAINING_FREE
from evaluation.families import family as family_named
from evaluation.figure import GREY, Plot, panels_of, plot_of
from evaluation.gain import Gain, Throughput, median_ratio
from evaluation.table import Table, crossed

SAMPLING_NAMES = {"greedy": "greedy", "sampled": "T=1", "nucleus": "T=0.7, top-p 0.9", "own": "as in the config"}
MEAN = "mean of transfer sets"
_NORMAL = 1.96
"""Standard errors on either side of a mean that hold 95 % of it."""
_RIVALS = {rival: (rival,) for rival in (BASELINE, *SCHEDULES, PRODUCT)} | {
    ALONE: (ALONE, UNASSISTED),
    TRAINING_FREE: tuple(POLICIES.keys() - {"head"}),
}
"""Rival -> the families of which the fastest is it."""


class Cell(NamedTuple):
    """A cell of a race as it is stored, and its arms on the clock."""

    stored: Mapping[str, Any]
    arms: list[Result]
    """In the order in which they are stored; a competitor's name is its setting."""
    rivals: dict[str, Result]

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Cell":
        """The arms of a stored cell, a fixed length among them."""
        arms = [
            Result(
                competitor=Competitor(arm["family"], arm["setting"], FixedLength(0), ({},)),
                number=0,
                on_dev=arm["on_dev"],
                throughput=Throughput(np.array(arm["tokens"]), np.array(arm["seconds"])),
            )
            for arm in stored["arms"]
        ]
        rivals = {rival: fastest_of(arms, families) for rival, families in _RIVALS.items()}
        return cls(stored, arms, {rival: arm for rival, arm in rivals.items() if arm})

    @property
    def ratio(self) -> float:
        """t_target(0) / t_draft."""
        return float(self.stored["times"]["t_target_s"][0] / self.stored["times"]["t_draft_s"])

    @property
    def sampling(self) -> str:
        """Name of the sampling, in words."""
        return SAMPLING_NAMES[self.stored["sampling"]]

    def over(self, arm: Result, rival: str) -> Gain:
        """The gain of an arm over a rival."""
        return arm.over(self.rivals[rival])

    def median_over(self, arm: Result, rival: str) -> float:
        """The median of ratios prompt by prompt, minus 1, over a rival; for texts of one length."""
        return median_ratio(self.rivals[rival].throughput.seconds, arm.throughput.seconds) - 1

    def cell_of(self, arm: Result, rival: str) -> str:
        """Gain, interval and median in per cent; empty over itself."""
        gain = self.over(arm, rival)
        return "" if gain.standard_error == 0 else f"{_short(gain)} {100 * self.median_over(arm, rival):+.1f}"

    def as_dict(self) -> dict[str, Any]:
        """The cell in JSON."""
        arms = []
        for stored, arm in zip(self.stored["arms"], self.arms, strict=True):
            named = {name: stored[name] for name in ("family", "setting", "of_other_sampling")}
            over = {name: self.over(arm, name)._asdict() for name in self.rivals}
            medians = {name: self.median_over(arm, name) for name in self.rivals}
            arms.append(named | {"tokens_per_s": arm.tokens_per_s, "over": over, "median_over": medians})
        return {**self.stored, "arms": arms}


def fastest_of(arms: Iterable[Result], families: Sequence[str]) -> Result | None:
    """The fastest arm of these families on the timed prompts; None where none of them ran."""
    members = (arm for arm in arms if arm.family in families)
    return max(members, key=lambda arm: arm.tokens_per_s, default=None)


def cell_table(cell: Cell) -> Table:
    """The table of one cell."""
    stored, rows = cell.stored, []
    rivals = [name for name in (BASELINE, TRAINING_FREE, *SCHEDULES) if name in cell.rivals]
    for arm, of in zip(cell.arms, stored["arms"], strict=True):
        is_slower = arm.family == BASELINE and arm is not cell.rivals[BASELINE]  # only the fastest is the best
        name = "fixed length" if is_slower else name_of(arm.family)
        row = {"policy": name + " (head of another sampling)" * of["of_other_sampling"], "setting": of["setting"]}
        row |= {"tokens/s": f"{arm.tokens_per_s:.1f}", "alone": f"x{1 + cell.over(arm, ALONE).value:.2f}"}
        rows.append(row | {f"over {name_of(rival)}": cell.cell_of(arm, rival) for rival in rivals})
    times = f"t_draft {1e3 * stored['times']['t_draft_s']:.2f} ms, t_target/t_draft {cell.ratio:.2f}"
    num_prompts = len(cell.arms[0].throughput.tokens)
    texts = f"{num_prompts} prompts of {stored['dataset']}, at most {stored['num_tokens']} tokens"
    note = (
        "gain in per cent, its 95 % interval over prompts, and the median of the ratios of prompts; each rival is the "
        "fastest of its kind on these prompts, the best fixed length and the target alone included"
    )
    title = f"{cell.sampling}: {times}; {texts}; default schedule: {stored['default_schedule']}"
    return Table(title, rows, note, names=2)


def gain_tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """One table per rival: families down; datasets and samplings across, and means over transfer sets."""
    note = "gain on a clock, with its 95 % interval over prompts; each family at its fastest arm"
    for rival in (BASELINE, PRODUCT, DEFAULT, ALONE):
        gains = gains_over(cells, rival)
        if rows := crossed("policy", ((name_of(family), column, gain.text) for family, column, gain in gains)):
            yield Table(f"over {name_of(rival)}", rows, note)


def gains_over(cells: Sequence[Cell], rival: str) -> Iterator[tuple[str, str, Gain]]:
    """(family, dataset and sampling, gain) of all families but the rival's; and with MEAN the mean over transfer sets:
    all sets but the first, on which trained heads were chosen.
    """
    for family in dict.fromkeys(arm.family for cell in cells for arm in cell.arms if arm.family != rival):
        of_transfer: dict[str, list[Gain]] = defaultdict(list)
        for cell in cells:
            if rival in cell.rivals and (arm := fastest_of(cell.arms, [family])):
                gain = cell.over(arm, rival)
                yield family, f"{cell.stored['dataset']}, {cell.sampling}", gain
                if cell.stored["dataset"] != cells[0].stored["dataset"]:
                    of_transfer[cell.sampling].append(gain)
        for sampling, gains in of_transfer.items():
            yield family, f"{MEAN}, {sampling}", mean_gain(gains)


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """The mean of gains on different sets with independent prompts, and its normal interval."""
    value = sum(gain.value for gain in gains) / len(gains)
    error = sqrt(sum(gain.standard_error**2 for gain in gains)) / len(gains)
    return Gain(value, value - _NORMAL * error, value + _NORMAL * error, error)


def verdict_of(cell: Cell) -> str:
    """Lead of our arm that dev chose over each schedule, and our arms that are slower than one.

    Policies that were named have no figures of dev: the fastest of them on the timed prompts is reported.
    """
    ours = [arm for arm in cell.arms if arm.family not in (*SCHEDULES, ALONE, UNASSISTED)]
    how, best = "dev chose", fastest(ours)
    if best.on_dev is None:
        how = "fastest of the named policies on these prompts:"
        best = max(ours, key=lambda arm: arm.tokens_per_s)
    subject = f"{cell.stored['dataset']}, {cell.sampling} at ratio {cell.ratio:.2f}: {how} {name_of(best.family)}"
    schedules = [name for name in SCHEDULES if name in cell.rivals]
    if not schedules:
        lead = f", {_short(cell.over(best, BASELINE))} % over the best fixed length" * (best.family != BASELINE)
        return f"{subject}{lead}; without --race.assistant no schedule of transformers runs beside it."
    against = ", ".join(f"{cell.cell_of(best, name)} % over {name_of(name)}" for name in schedules)
    slower = [
        f"{name_of(arm.family)} than {name_of(name)}"
        for arm in ours
        for name in schedules
        if cell.over(arm, name).value < 0
    ]
    rest = f"Slower: {'; '.join(slower)}" if slower else "None of ours is slower than a schedule"
    return f"{subject}: {against}. {rest}."


def race_plot(cells: Sequence[Cell]) -> Plot:
    """Gain over the best fixed length: one panel per dataset and sampling, one row per family.

    Speed without a draft would hide all other differences, so it is shown only where nothing else is.
    """
    ran = dict.fromkeys(arm.family for cell in cells for arm in cell.arms)
    families = [family for family in ran if family not in (BASELINE, ALONE, UNASSISTED)] or [ALONE]
    figure, panels = panels_of(len(cells), width=2.2 + 2.6 * len(cells), height=0.34 * len(families) + 1.4)
    for axes, cell in zip(panels, cells, strict=True):
        for row, family in enumerate(families):
            if best := fastest_of(cell.arms, [family]):
                gain, shape = cell.over(best, BASELINE), "s" if family in SCHEDULES else "o"
                errors = 100 * np.array([[gain.value - gain.low], [gain.high - gain.value]])
                axes.errorbar(100 * gain.value, row, xerr=errors.clip(min=0), fmt=shape, markersize=4, capsize=2)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_title(f"{cell.stored['dataset']}\n{cell.sampling}", fontsize=9)
        axes.set_yticks(range(len(families)), [])
        axes.set_ylim(len(families) - 0.5, -0.5)
    panels[0].set_yticks(range(len(families)), [name_of(family) for family in families], fontsize=8)
    figure.supxlabel("gain over the best fixed length, %", fontsize=9)
    caption = "Gain over the best fixed length on a clock; whiskers: 95 %; squares: transformers."
    return plot_of("bench", caption, figure)


def name_of(family: str) -> str:
    """Name of a family or a rival in tables and plots."""
    return f"best {family}" if family == TRAINING_FREE else family_named(family).label


def _short(gain: Gain) -> str:
    return f"{100 * gain.value:+.1f} ({100 * gain.low:+.0f}, {100 * gain.high:+.0f})"
