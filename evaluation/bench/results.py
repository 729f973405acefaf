"""The results of a race, in tables and a sentence: gains over our best fixed length and each schedule.

    gain      tokens per second over all prompts / of the other arm - 1, with the 95 % interval of the paired bootstrap
              over prompts
    median    of the ratios prompt by prompt, which one disturbed prompt cannot change

Each rival is the fastest of its kind on the timed prompts: of the fixed lengths that ran, the training-free policies,
transformers' constant schedules, and the target's two ways to run without a draft. This favours the rival, so that a
remaining lead is not due to a badly chosen one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot
from typing import Any

import numpy as np

from decode.policies.registry import POLICIES
from evaluation.bench.arms import DEFAULT, SCHEDULES, UNASSISTED
from evaluation.families import ALONE, BASELINE, PRODUCT, TRAINING_FREE
from evaluation.families import family as family_named
from evaluation.gain import MIN_PROMPTS, Gain, Throughput, gain_over, median_ratio, shortage
from evaluation.table import Table, crossed

Arm = Mapping[str, Any]
Cell = Mapping[str, Any]
SAMPLING_NAMES = {"greedy": "greedy", "sampled": "T=1", "nucleus": "T=0.7, top-p 0.9", "own": "as in the config"}
MEAN = "mean of transfer sets"
_RIVALS = {rival: (rival,) for rival in (BASELINE, *SCHEDULES, PRODUCT)} | {
    ALONE: (ALONE, UNASSISTED),
    TRAINING_FREE: tuple(POLICIES.keys() - {"head"}),
}
"""Rival -> the families of which the fastest is it."""


def cell_of(stored: Mapping[str, Any]) -> Cell:
    """A stored cell with its `rivals`, by name; every arm has its throughput, and gains and medians over each rival."""
    arms = [dict(arm) for arm in stored["arms"]]
    for arm in arms:
        arm["throughput"] = Throughput(np.array(arm["tokens"]), np.array(arm["seconds"]))
        arm["tokens_per_s"] = float(arm["throughput"].tokens_per_s)
    rivals = {rival: best for rival, families in _RIVALS.items() if (best := fastest_of(arms, families))}
    of_rivals = {name: rival["throughput"] for name, rival in rivals.items()}
    for arm in arms:
        own = arm["throughput"]
        arm["over"] = {name: gain_over(rival, own) for name, rival in of_rivals.items()}
        arm["median_over"] = {name: median_ratio(rival.seconds, own.seconds) - 1 for name, rival in of_rivals.items()}
    return {**stored, "arms": arms, "rivals": rivals}


def in_json(cell: Cell) -> dict[str, Any]:
    """A cell as the JSON document has it."""
    names, arms = ("family", "setting", "of_other_sampling", "tokens_per_s", "over", "median_over"), []
    for arm in cell["arms"]:
        over = {rival: gain._asdict() for rival, gain in arm["over"].items()}
        arms.append({name: over if name == "over" else arm[name] for name in names})
    return {name: value for name, value in cell.items() if name != "rivals"} | {"arms": arms}


def fastest_of(arms: Iterable[Arm], families: Sequence[str]) -> Arm | None:
    """The fastest arm of these families on the timed prompts; None where none of them ran."""
    members = (arm for arm in arms if arm["family"] in families)
    return max(members, key=lambda arm: arm["tokens_per_s"], default=None)


def cell_table(cell: Cell) -> Table:
    """The table of one cell."""
    rows, rivals = [], [name for name in (BASELINE, TRAINING_FREE, *SCHEDULES) if name in cell["rivals"]]
    for arm in cell["arms"]:
        is_slower = arm["family"] == BASELINE and arm is not cell["rivals"][BASELINE]  # only the fastest is the best
        name = "fixed length" if is_slower else name_of(arm["family"])
        row = {"policy": name + " (head of another sampling)" * arm["of_other_sampling"], "setting": arm["setting"]}
        row |= {"tokens/s": f"{arm['tokens_per_s']:.1f}", "alone": f"x{1 + arm['over'][ALONE].value:.2f}"}
        rows.append(row | {f"over {name_of(rival)}": _over(arm, rival) for rival in rivals})
    times = f"t_draft {1e3 * cell['times']['t_draft_s']:.2f} ms, t_target/t_draft {_ratio(cell):.2f}"
    texts = f"{len(arm['tokens'])} prompts of {cell['dataset']}, at most {cell['num_tokens']} tokens"
    note = (
        f"gain in per cent, its 95 % interval over prompts (from {MIN_PROMPTS} on), and the median of the ratios of "
        "prompts; each rival is the fastest of its kind on these prompts, the best fixed length and the target alone "
        "included"
    )
    sampling, schedule = SAMPLING_NAMES[cell["sampling"]], cell["default_schedule"]
    return Table(f"{sampling}: {times}; {texts}; default schedule: {schedule}", rows, note, names=2)


def gain_tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """One table per rival: families down; datasets and samplings across, and means over transfer sets: all sets but the
    first, on which trained heads were chosen.
    """
    note = "gain on a clock, with its 95 % interval over prompts; each family at its fastest arm"
    names, first = dict.fromkeys(arm["family"] for cell in cells for arm in cell["arms"]), cells[0]["dataset"]
    for rival in (BASELINE, PRODUCT, DEFAULT, ALONE):
        entries: list[tuple[str, str, str]] = []
        for family in (name for name in names if name != rival):
            of_transfer: dict[str, list[Gain]] = defaultdict(list)
            for cell in cells:
                if rival in cell["rivals"] and (arm := fastest_of(cell["arms"], [family])):
                    gain, sampling = arm["over"][rival], SAMPLING_NAMES[cell["sampling"]]
                    entries.append((name_of(family), f"{cell['dataset']}, {sampling}", gain.text))
                    of_transfer[sampling] += [gain] * (cell["dataset"] != first)
            means = ((sampling, mean_gain(gains)) for sampling, gains in of_transfer.items() if gains)
            entries += [(name_of(family), f"{MEAN}, {sampling}", gain.text) for sampling, gain in means]
        if entries:
            yield Table(f"over {name_of(rival)}", crossed("policy", entries), note)


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """The mean of gains on different sets with independent prompts, and its interval if all of them have one. Each end
    is as far from it as the root of the sum of their squared distances, over their number (Zou and Donner 2008).
    """
    value = sum(gain.value for gain in gains) / len(gains)
    errors = [gain.standard_error for gain in gains if gain.standard_error is not None]
    below = [gain.value - gain.low for gain in gains if gain.low is not None]
    above = [gain.high - gain.value for gain in gains if gain.high is not None]
    error = hypot(*errors) / len(gains) if len(errors) == len(gains) else None
    if len(below) < len(gains):
        return Gain(value, None, None, error)
    return Gain(value, value - hypot(*below) / len(gains), value + hypot(*above) / len(gains), error)


def verdict_of(cell: Cell) -> str:
    """Lead of our arm that dev chose over each schedule; of policies that were named, which have no figures of dev, the
    fastest on the timed prompts. Too few prompts for an interval are reported.
    """
    ours = [arm for arm in cell["arms"] if arm["family"] not in (*SCHEDULES, ALONE, UNASSISTED)]
    how, best = "dev chose", max(ours, key=lambda arm: arm["on_dev"] or 0.0)
    if best["on_dev"] is None:
        how = "fastest of the named policies on these prompts:"
        best = max(ours, key=lambda arm: arm["tokens_per_s"])
    subject = f"{cell['dataset']}, {SAMPLING_NAMES[cell['sampling']]} at ratio {_ratio(cell):.2f}: {how} "
    subject += name_of(best["family"])
    schedules = [name for name in SCHEDULES if name in cell["rivals"]]
    rival = schedules[0] if schedules else BASELINE
    doubt = _doubt(best["over"][rival], len(best["tokens"]))
    if not schedules:
        lead = f", {_short(best['over'][BASELINE])} % over the best fixed length" * (best["family"] != BASELINE)
        return f"{subject}{lead}; without --race.assistant no schedule of transformers runs beside it.{doubt}"
    leads = ", ".join(f"{_over(best, name)} % over {name_of(name)}" for name in schedules)
    return f"{subject}: {leads}.{doubt}"


def _doubt(gain: Gain, num_prompts: int) -> str:
    """What a gain of too few prompts does not show, in a sentence."""
    return f" {shortage(gain, num_prompts, remedy='raise --num_prompts')}." if gain.low is None else ""


def name_of(family: str) -> str:
    """Name of a family or a rival in tables."""
    return f"best {family}" if family == TRAINING_FREE else family_named(family).label


def _ratio(cell: Cell) -> float:
    return float(cell["times"]["t_target_s"][0] / cell["times"]["t_draft_s"])


def _over(arm: Arm, rival: str) -> str:
    """Gain, interval and median in per cent; empty over itself."""
    gain, median = arm["over"][rival], 100 * arm["median_over"][rival]
    is_itself = gain.value == 0 and not gain.standard_error
    return "" if is_itself else f"{_short(gain)} {median:+.1f}"


def _short(gain: Gain) -> str:
    if gain.low is None or gain.high is None:
        return f"{100 * gain.value:+.1f}"
    return f"{100 * gain.value:+.1f} ({100 * gain.low:+.1f}, {100 * gain.high:+.1f})"
