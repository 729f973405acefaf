"""Which settings of an engine are fastest at given times, and by how much: what `flags` prints of its traces."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from decode.policies import FixedLength
from decode.policies.batch import BatchCosts
from evaluation.batches.load import load_at
from evaluation.competitor import Competitor, competitors_of, label_of, make_competitor
from evaluation.contest import Arm, Result, fastest_on_dev, replay_arms
from evaluation.families import BASELINE, BOUNDS, GROUPS, HEADS, TRAINING_FREE, family
from evaluation.flags.engines import Drafting, Engine
from evaluation.gain import MIN_PROMPTS, Gain, Splits, shortage
from evaluation.table import Table
from evaluation.times import Times
from evaluation.traces.replay import replay_rounds
from evaluation.traces.trace import Trace
from evaluation.tuning.calibration import calibrated_on
from heads.model.head import AcceptanceHead
from store.progress import Bar

Traces = Mapping[Drafting, Splits[Trace]]
"""By how an engine drafts, its default first."""
NONE, DEFAULT, FIXED, FLAGS = "no speculation", "the engine's default", "best fixed length", "these flags"
OURS = {TRAINING_FREE: "our best policy without training", HEADS: "our best head"}
_BASES = {NONE: NONE, DEFAULT: "the default", FIXED: f"the {FIXED}"}
"""Choices that gains are measured from, as sentences name them."""


def is_same(one: Result, other: Result) -> bool:
    """Whether two choices draft alike with the same setting."""
    return (one.competitor.name, one.setting) == (other.competitor.name, other.setting)


class Answer:
    """One engine at one set of times.

    Attributes:
        alone: times without speculation.
        speculating: times with it: what each round pays beyond its draft is part of t_target(k).
        choices: name -> result; a competitor's name says how the engine drafts, or names our policy. The best fixed
            length is that of all ways of drafting.
        flags: the engine at its best setting, or without speculation where that is faster.
        drafting: how it drafts at its best setting; None where no speculation is faster.
        line: to paste.
        short_of_hindsight: how much slower the flags are than the best setting on test, as a fraction of its speed.
    """

    def __init__(self, engine: Engine, traces: Traces, times: Times) -> None:
        extra_s = engine.extra_forwards * times.t_draft_s
        self.engine, self.traces, self.alone = engine, traces, times
        self.speculating = replace(times, t_target_s=tuple(seconds + extra_s for seconds in times.t_target_s))
        default, self._default = next(iter(traces.items()))
        longest = self._default.dev.max_draft_length
        alone = replay_arms([Competitor(NONE, "", FixedLength(0), ({},))], self._default)
        self.choices = fastest_on_dev(alone, times)
        if engine.default is not None:
            rule = engine.competitor(DEFAULT, longest, engine.default)
            self.choices |= fastest_on_dev([self.arm(rule, default)], self.speculating)
        lengths = make_competitor(FIXED, "fixed_length", {"k": range(1, longest + 1)})
        self.choices |= fastest_on_dev((self.arm(lengths, drafting) for drafting in traces), self.speculating)
        arms = [self.arm(engine.competitor(FLAGS, longest), drafting) for drafting in traces]
        self.choices |= fastest_on_dev(arms, self.speculating, {FLAGS: self.choices[NONE]})
        self.flags = self.choices[FLAGS]
        self.drafting = next((way for way in traces if way.label == self.flags.competitor.name), None)
        self.line = engine.line(self.flags.setting, self.drafting) if self.drafting else engine.off
        on_test = [self.choices[NONE].tokens_per_s, *(self.speculating.tokens_per_s(arm.test).max() for arm in arms)]
        self.short_of_hindsight = 1 - self.flags.tokens_per_s / float(max(on_test))

    def arm(self, rule: Competitor, drafting: Drafting) -> Arm:
        """What the engine does at every setting of a rule, drafting in this way."""
        [arm] = replay_arms([replace(rule, name=drafting.label)], self.traces[drafting])
        dev, test = (self.engine.played(trace, rule.settings) for trace in (arm.dev, arm.test))
        return replace(arm, dev=dev, test=test)

    def add_ours(self, heads: Mapping[str, AcceptanceHead], *, drawn: Splits[Trace]) -> None:
        """Add the best of our policies without training, and of our heads, on drafts that our loop draws (the trace
        `drawn`) and, if the engine takes the likeliest tokens, on those too. A head that was trained on other drafts is
        calibrated to these.
        """
        best: dict[str, Result] = {}
        is_drawn = self._default.dev.draft_sampling is None
        for label, traces in {"": self._default, **({} if is_drawn else {" on drawn drafts": drawn})}.items():
            fitted = {**heads, **calibrated_on(traces.dev, heads)}
            rivals = [
                replace(competitor, family=name, name=f"{family(competitor.family).label}{label}")
                for competitor in competitors_of({}, fitted, max_draft_length=traces.dev.max_draft_length)
                for group, name in OURS.items()
                if GROUPS[group](competitor.family) and competitor.family not in (*BOUNDS, BASELINE)
            ]
            arms = replay_arms(Bar(rivals, desc="replay: our policies", unit="policies"), traces)
            best = fastest_on_dev(arms, self.speculating, best)
        self.choices |= {name: best[name] for name in OURS.values() if name in best}

    def gains(self, choice: Result) -> dict[str, Gain]:
        """Gains over no speculation, the default and the best fixed length, as far as there are any."""
        return {base: choice.over(self.choices[base]) for base in _BASES if base in self.choices}

    def as_dict(self) -> dict[str, Any]:
        """The answer in JSON."""
        choices = [
            {
                "what": name,
                "drafts": choice.competitor.name,
                "setting": dict(choice.setting),
                "tokens_per_s": choice.tokens_per_s,
                "gains": {base: gain._asdict() for base, gain in self.gains(choice).items()},
            }
            for name, choice in self.choices.items()
        ]
        facts = {"line": self.line, "speculates": self.drafting is not None}
        return {**facts, "short_of_hindsight": self.short_of_hindsight, "choices": choices}

    def table(self) -> Table:
        """A row per choice, with its predicted gains."""
        rows = []
        for name, choice in self.choices.items():
            gains = {
                f"over {base}": "" if is_same(choice, self.choices[base]) else gain.text
                for base, gain in self.gains(choice).items()
            }
            setting = "; ".join(filter(None, (label_of("", choice.setting), choice.competitor.name)))
            rows.append({"what": name, "setting": setting, "tokens/s": f"{choice.tokens_per_s:.1f}", **gains})
        note = (
            "gain: predicted from counts and times (law 4.9) on test, with its 95 % interval (paired bootstrap of test "
            f"prompts, from {MIN_PROMPTS} on). Rows of ours need our loop or plugin. The rule is that of "
            f"{self.engine.name} {self.engine.version}. These flags are {self.short_of_hindsight:.1%} slower than the "
            "best setting on test"
        )
        return Table(f"{self.engine.name}: settings chosen on dev; {self.alone.title}", rows, note, names=2)

    def sentences(self) -> Iterator[str]:
        """The answer in sentences."""
        flags, where, name = self.flags, self.alone.where, self.engine.name
        if self.drafting is None:
            yield f"{where}: do not speculate. No setting of {name} is predicted to be faster than the target on dev."
        else:
            listed = ", ".join(
                f"{gain.words} over {_BASES[base]}"
                for base, gain in self.gains(flags).items()
                if not is_same(flags, self.choices[base])
            )
            yield f"{where}: {label_of('', flags.setting)}, predicted {listed}.{self._doubt()}"
        default = self.choices.get(DEFAULT)
        if default is not None and (gain := default.over(self.choices[NONE])).value < 0:
            yield f"{name}'s default is predicted to be slower: {gain.words} over no speculation."
        for ours, choice in self.choices.items():
            if ours in OURS.values():
                yield f"{ours.capitalize()} ({choice.competitor.name}) would add {choice.over(flags).words}."
        if self.engine.remark:
            yield self.engine.remark

    def _doubt(self) -> str:
        """What the interval of the gain over no speculation does not show, in a sentence."""
        gain = self.flags.over(self.choices[NONE])
        if gain.low is None:
            return f" {shortage(gain, self._default.test.num_prompts)}."
        return "" if gain.is_above_noise else " This may be noise; raise decode.num_test to settle it."

    def in_batches(self, sizes: Sequence[int], curves: BatchCosts) -> dict[int, list[list[float]]]:
        """Size of batch -> tokens per second on dev and on test by number of tokens, which all sequences draft in
        lockstep (law 4.13).
        """
        traces = self.traces[self.drafting] if self.drafting else self._default
        numbers = range(traces.dev.max_draft_length + 1)
        policy = make_competitor(FLAGS, "fixed_length", {"k": numbers}).policy
        splits = [(replay_rounds(trace, policy), len(trace.rows)) for trace in traces]
        return {
            size: [
                [load_at(rounds, k, num_rows, size).throughput(curves).tokens_per_s for k in numbers]
                for rounds, num_rows in splits
            ]
            for size in sizes
        }
