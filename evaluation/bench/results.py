"""The results of a race, in tables and a sentence: gains over our best fixed length and each schedule.

    gain      tokens per second over all prompts / of the other arm - 1, with the 95 % interval of the paired bootstrap
              over prompts
    median    of the ratios prompt by prompt, which one disturbed prompt cannot change

Each rival is the fastest of its kind on the timed prompts: of the fixed lengths that ran, the training-free policies,
transformers' constant schedules, and the target's two ways to run without a draft. This favours the rival, so that a
remaining lead is not due to a badly chosen one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import hypot

from decode.policies import FixedLength
from decode.policies.registry import POLICIES
from evaluation.bench.arms import DEFAULT, SCHEDULES, UNASSISTED
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Result
from evaluation.families import ALONE, BASELINE, PRODUCT, TRAINING_FREE, family
from evaluation.gain import MIN_PROMPTS, Gain, doubt, leads, median_ratio
from evaluation.played import latency_of
from evaluation.sources.clock import Clocked, played_of
from evaluation.table import Table, crossed
from evaluation.times import Times

SAMPLING_NAMES = {"greedy": "greedy", "sampled": "T=1", "nucleus": "T=0.7, top-p 0.9", "own": "as in the config"}
MEAN = "mean of transfer sets"
_RIVALS = {rival: (rival,) for rival in (BASELINE, *SCHEDULES, PRODUCT)} | {
    ALONE: (ALONE, UNASSISTED),
    TRAINING_FREE: tuple(POLICIES.keys() - {"head"}),
}
"""Rival -> the families of which the fastest is it."""


OTHER_SAMPLING = "head of another sampling"
"""Version of a competitor one of whose heads was trained under another sampling than that of the cell."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Every arm of a race on one dataset under one sampling, on the clock."""

    contest: Contest
    """Results by the name of the arm; a family may have several arms."""
    sampling: str
    num_tokens: int
    run: int
    default_schedule: str

    @cached_property
    def rivals(self) -> dict[str, str]:
        """Rival -> the fastest arm of its families on the timed prompts; rivals that did not run are left out."""
        fastest = {rival: self.fastest_of(families) for rival, families in _RIVALS.items()}
        return {rival: arm for rival, arm in fastest.items() if arm is not None}

    def fastest_of(self, families: Sequence[str]) -> str | None:
        """The fastest arm of these families on the timed prompts; None where none of them ran."""
        members = {name: result for name, result in self.contest.results.items() if result.family in families}
        return max(members, key=lambda name: members[name].tokens_per_s, default=None)

    def over(self, arm: str, rival: str) -> Gain:
        """The gain of an arm over a rival."""
        return self.contest.gain(arm, self.rivals[rival])

    def median_over(self, arm: str, rival: str) -> float:
        """The median gain of prompts, which one disturbed prompt cannot change."""
        base, result = (self.contest.results[name] for name in (self.rivals[rival], arm))
        return median_ratio(base.throughput.seconds, result.throughput.seconds) - 1


def competitor(of_family: str, setting: str, *, version: str = "") -> Competitor:
    """What a race clocks, which may be no policy of ours; the setting in words is its name."""
    return Competitor(of_family, setting, FixedLength(0), ({},), version=version)


def contest_of(
    dataset: str,
    times: Times,
    competitors: Mapping[str, Competitor],
    runs: Mapping[str, Sequence[Clocked]],
    *,
    on_dev: Mapping[str, float | None],
) -> Contest:
    """The contest of arms on the clock, by name, from their generations on the same prompts; `on_dev`: predicted tokens
    per second on dev, of those whose setting was chosen there.
    """
    results = {
        name: Result(competitor=entry, number=0, on_dev=on_dev.get(name), played=played_of([runs[name]]))
        for name, entry in competitors.items()
    }
    return Contest(dataset, times, results)


def in_json(cell: Cell) -> dict[str, object]:
    """A cell as the JSON document has it."""
    times = cell.contest.times
    arms = []
    for name, result in cell.contest.results.items():
        arms.append(
            {
                "family": result.family,
                "setting": result.competitor.name,
                "of_other_sampling": result.competitor.version == OTHER_SAMPLING,
                "tokens_per_s": result.tokens_per_s,
                **latency_of(result.played),
                "over": {rival: cell.over(name, rival)._asdict() for rival in cell.rivals},
                "median_over": {rival: cell.median_over(name, rival) for rival in cell.rivals},
            }
        )
    return {
        "dataset": cell.contest.dataset,
        "sampling": cell.sampling,
        "times": {"t_draft_s": times.t_draft_s, "t_target_s": times.alone_s, "origin": times.origin},
        "num_tokens": cell.num_tokens,
        "run": cell.run,
        "default_schedule": cell.default_schedule,
        "arms": arms,
    }


def cell_table(cell: Cell) -> Table:
    """The table of one cell."""
    rivals = [name for name in (BASELINE, TRAINING_FREE, *SCHEDULES) if name in cell.rivals]
    rows = [_row_of(cell, name, rivals) for name in cell.contest.results]
    times = cell.contest.times
    texts = f"{_num_prompts(cell)} prompts of {cell.contest.dataset}, at most {cell.num_tokens} tokens"
    note = (
        f"gain in per cent, its 95 % interval over prompts (from {MIN_PROMPTS} on), and the median of the ratios of "
        "prompts; each rival is the fastest of its kind on these prompts, the best fixed length and the target alone "
        "included; seconds of a request and to its first token, the prompt included, as 50th and 95th percentiles of "
        "prompts"
    )
    title = (
        f"{SAMPLING_NAMES[cell.sampling]}: t_draft {1e3 * times.t_draft_s:.2f} ms, t_target/t_draft {times.ratio:.2f}; "
        f"{texts}; default schedule: {cell.default_schedule}"
    )
    return Table(title, rows, note, names=2)


def _row_of(cell: Cell, name: str, rivals: Sequence[str]) -> dict[str, str]:
    result = cell.contest.results[name]
    latency = latency_of(result.played)
    is_slower = result.family == BASELINE and name != cell.rivals[BASELINE]  # only the fastest is the best
    policy = "fixed length" if is_slower else name_of(result.family)
    if result.competitor.version:
        policy += f" ({result.competitor.version})"
    row = {
        "policy": policy,
        "setting": result.competitor.name,
        "tokens/s": f"{result.tokens_per_s:.1f}",
        "request s": f"{latency['request_p50_s']:.3g}, {latency['request_p95_s']:.3g}",
        "first token s": f"{latency['first_token_p50_s']:.2g}, {latency['first_token_p95_s']:.2g}",
        "alone": f"x{1 + cell.over(name, ALONE).value:.2f}",
    }
    return row | {f"over {name_of(rival)}": _over(cell, name, rival) for rival in rivals}


def gain_tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """One table per rival: families down; datasets and samplings across, and means over transfer sets: all sets but the
    first, on which trained heads were chosen.
    """
    note = "gain on a clock, with its 95 % interval over prompts; each family at its fastest arm"
    names = dict.fromkeys(result.family for cell in cells for result in cell.contest.results.values())
    first = cells[0].contest.dataset
    for rival in (BASELINE, PRODUCT, DEFAULT, ALONE):
        entries: list[tuple[str, str, str]] = []
        for name in (name for name in names if name != rival):
            of_transfer: dict[str, list[Gain]] = defaultdict(list)
            for cell in cells:
                arm = cell.fastest_of([name])
                if arm is None or rival not in cell.rivals:
                    continue
                gain = cell.over(arm, rival)
                sampling = SAMPLING_NAMES[cell.sampling]
                entries.append((name_of(name), f"{cell.contest.dataset}, {sampling}", gain.text))
                if cell.contest.dataset != first:
                    of_transfer[sampling].append(gain)
            means = ((sampling, mean_gain(gains)) for sampling, gains in of_transfer.items())
            entries += [(name_of(name), f"{MEAN}, {sampling}", gain.text) for sampling, gain in means]
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


def race_sentence(cell: Cell) -> str:
    """Lead of our arm that dev chose over each schedule, or over the best fixed length where none ran, and what would
    settle the first lead; of policies that were named, which have no figures of dev, the fastest on the timed prompts.
    """
    results = cell.contest.results
    ours = [name for name, result in results.items() if result.family not in (*SCHEDULES, ALONE, UNASSISTED)]
    how = "dev chose"
    best = max(ours, key=lambda name: results[name].on_dev or 0.0)
    if results[best].on_dev is None:
        how = "fastest of the named policies on these prompts:"
        best = max(ours, key=lambda name: results[name].tokens_per_s)
    schedules = [name for name in SCHEDULES if name in cell.rivals]
    gains = {name_of(name): cell.over(best, name) for name in schedules or [BASELINE] if best != cell.rivals[name]}
    sentence = (
        f"{cell.contest.dataset}, {SAMPLING_NAMES[cell.sampling]} at ratio {cell.contest.times.ratio:.2f}: {how} "
        f"{name_of(results[best].family)}"
    )
    if gains:
        sentence += f": {leads(gains)}"
    if not schedules:
        sentence += "; no schedule of transformers runs beside it (no --race.assistant, or by --race.transformers)"
    remedy = "raise --num_prompts"
    doubts = [
        doubt(gain, _num_prompts(cell), lead=f"the lead over {rival}", remedy=remedy) for rival, gain in gains.items()
    ]
    return ". ".join([sentence, *list(filter(None, doubts))[:1]]) + "."


def _num_prompts(cell: Cell) -> int:
    return len(cell.contest.results[cell.rivals[ALONE]].throughput.tokens)


def name_of(name: str) -> str:
    """How tables name a family or a rival."""
    return f"best {name}" if name == TRAINING_FREE else family(name).label


def _over(cell: Cell, arm: str, rival: str) -> str:
    """Gain, interval and median in per cent; empty over itself."""
    if arm == cell.rivals[rival]:
        return ""
    return f"{cell.over(arm, rival).text.replace('%', '')} {100 * cell.median_over(arm, rival):+.1f}"
