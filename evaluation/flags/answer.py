"""Which settings of an engine are fastest at given times, and by how much: what `flags` prints of its traces."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from decode.policies import FixedLength
from decode.policies.batch import BatchCosts
from evaluation.batches.load import load_at
from evaluation.competitor import Competitor, competitors_of, label_of, make_competitor
from evaluation.contest import Arm, Result, fastest_on_dev, replay_arms
from evaluation.families import BASELINE, BOUNDS, GROUPS, HEADS, TRAINING_FREE, family
from evaluation.flags.engines import Drafting, Engine
from evaluation.gain import MIN_PROMPTS, Gain, Splits, doubt, leads
from evaluation.table import Table
from evaluation.times import Times
from evaluation.traces.replay import replay_rounds
from evaluation.traces.trace import Trace
from evaluation.tuning.calibration import calibrated_on
from heads.model.head import AcceptanceHead
from store.progress import Bar

Traces = Mapping[Drafting, Splits[Trace]]
"""By how an engine drafts, its default first."""
NONE = "no speculation"
DEFAULT = "the engine's default"
FIXED = "best fixed length"
FLAGS = "these flags"
OURS = {TRAINING_FREE: "our best policy without training", HEADS: "our best head"}
_BASES = {NONE: NONE, DEFAULT: "the default", FIXED: f"the {FIXED}"}
"""Choices that gains are measured from, as sentences name them."""


def is_same(one: Result, other: Result) -> bool:
    """Whether two choices draft alike with the same setting."""
    return (one.competitor.name, one.setting) == (other.competitor.name, other.setting)


@dataclass(frozen=True)
class Answer:
    """One engine at one set of times."""

    engine: Engine
    traces: Traces
    alone: Times
    """Without speculation."""
    speculating: Times
    """With it: what each round pays beyond its draft is part of t_target(k)."""
    choices: Mapping[str, Result]
    """By name; a competitor's name says how the engine drafts, or names our policy."""
    short_of_hindsight: float
    """How much slower the flags are than the best setting on test, as a fraction of its speed."""

    @property
    def flags(self) -> Result:
        """The engine at its best setting, or without speculation where that is faster on dev."""
        return self.choices[FLAGS]

    @property
    def drafting(self) -> Drafting | None:
        """How the engine drafts at its best setting; None where no speculation is faster."""
        return next((way for way in self.traces if way.label == self.flags.competitor.name), None)

    @property
    def line(self) -> str:
        """The engine's flags at its best setting, as its command line takes them."""
        if self.drafting is None:
            return self.engine.off
        return self.engine.line(self.flags.setting, self.drafting)

    @property
    def by_default(self) -> Splits[Trace]:
        """The trace of the engine's default way of drafting."""
        return next(iter(self.traces.values()))

    def with_ours(self, heads: Mapping[str, AcceptanceHead], *, drawn: Splits[Trace] | None = None) -> "Answer":
        """This answer with the best of our policies without training, and of our heads: on the engine's drafts, and on
        those that our loop draws, if their trace is given. A head that was trained on other drafts is calibrated to
        these.
        """
        every = {"": self.by_default}
        if drawn is not None and self.by_default.dev.draft_sampling is not None:
            every[" on drawn drafts"] = drawn
        best: dict[str, Result] = {}
        for label, traces in every.items():
            rivals = _ours(heads, traces, label)
            arms = replay_arms(Bar(rivals, desc="replay: our policies", unit="policies"), traces)
            best = fastest_on_dev(arms, self.speculating, best)
        ours = {name: best[name] for name in OURS.values() if name in best}
        return replace(self, choices={**self.choices, **ours})

    def gains(self, choice: Result) -> dict[str, Gain]:
        """Gains over no speculation, the default and the best fixed length, as far as there are any."""
        return {base: choice.over(self.choices[base]) for base in _BASES if base in self.choices}

    def as_dict(self) -> dict[str, object]:
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
        flags = self.flags
        where = self.alone.where
        name = self.engine.name
        if self.drafting is None:
            yield f"{where}: do not speculate. No setting of {name} is predicted to be faster than the target on dev."
        else:
            gains = {
                _BASES[base]: gain for base, gain in self.gains(flags).items() if not is_same(flags, self.choices[base])
            }
            sentence = f"{where}: {label_of('', flags.setting)}, predicted {leads(gains)}."
            clause = doubt(flags.over(self.choices[NONE]), self.by_default.test.num_prompts)
            if clause:
                sentence += f" {clause[0].upper()}{clause[1:]}."
            yield sentence
        default = self.choices.get(DEFAULT)
        if default is not None and (gain := default.over(self.choices[NONE])).value < 0:
            yield f"{name}'s default is predicted to be slower: {leads({NONE: gain})}."
        for ours, choice in self.choices.items():
            if ours in OURS.values():
                yield f"{ours.capitalize()} ({choice.competitor.name}) would add {choice.over(flags).words}."
        if self.engine.remark:
            yield self.engine.remark

    def in_batches(self, sizes: Sequence[int], curves: BatchCosts) -> dict[int, list[list[float]]]:
        """Size of batch -> tokens per second on dev and on test by number of tokens, which all sequences draft in
        lockstep (law 4.13).
        """
        traces = self.traces[self.drafting] if self.drafting else self.by_default
        numbers = range(traces.dev.max_draft_length + 1)
        policy = make_competitor(FLAGS, "fixed_length", {"k": numbers}).policy
        speeds: dict[int, list[list[float]]] = {size: [] for size in sizes}
        for trace in traces:
            num_rows = len(trace.rows)
            rounds = self.engine.rounds(replay_rounds(trace, policy), num_rows)
            for size in sizes:
                loads = (load_at(rounds, k, num_rows, size) for k in numbers)
                speeds[size].append([load.throughput(curves).tokens_per_s for load in loads])
        return speeds


def answer_of(engine: Engine, traces: Traces, times: Times) -> "Answer":
    """Replay every setting of an engine, and choose on dev: no speculation, the engine's default, the best fixed length
    and the best setting, each of all ways of drafting.
    """
    speculating = replace(times, target=times.target.plus(engine.extra_forwards * times.t_draft_s))
    way, default_traces = next(iter(traces.items()))
    longest = default_traces.dev.max_draft_length
    choices = fastest_on_dev(replay_arms([Competitor(NONE, "", FixedLength(0), ({},))], default_traces), times)
    if engine.default is not None:
        default = arm_of(engine, engine.competitor(DEFAULT, longest, engine.default), way, default_traces)
        choices |= fastest_on_dev([default], speculating)
    lengths = make_competitor(FIXED, "fixed_length", {"k": range(1, longest + 1)})
    fixed = [arm_of(engine, lengths, drafting, splits) for drafting, splits in traces.items()]
    choices |= fastest_on_dev(fixed, speculating)
    rule = engine.competitor(FLAGS, longest)
    arms = [arm_of(engine, rule, drafting, splits) for drafting, splits in traces.items()]
    choices |= fastest_on_dev(arms, speculating, {FLAGS: choices[NONE]})
    on_test = [float(speculating.tokens_per_s(arm.test).max()) for arm in arms]
    short_of_hindsight = 1 - choices[FLAGS].tokens_per_s / max(choices[NONE].tokens_per_s, *on_test)
    return Answer(engine, traces, times, speculating, choices, short_of_hindsight)


def arm_of(engine: Engine, rule: Competitor, drafting: Drafting, traces: Splits[Trace]) -> Arm:
    """What the engine does at every setting of a rule, drafting in this way."""
    [arm] = replay_arms([replace(rule, name=drafting.label)], traces)
    dev, test = (engine.played(trace, rule.settings) for trace in (arm.dev, arm.test))
    return replace(arm, dev=dev, test=test)


def _ours(heads: Mapping[str, AcceptanceHead], traces: Splits[Trace], label: str) -> list[Competitor]:
    """Our policies on a trace, in the families of `OURS`; their names end with the label."""
    fitted = {**heads, **calibrated_on(traces.dev, heads)}
    rivals = []
    for competitor in competitors_of({}, fitted, max_draft_length=traces.dev.max_draft_length):
        for group, name in OURS.items():
            if GROUPS[group](competitor.family) and competitor.family not in (*BOUNDS, BASELINE):
                rivals.append(replace(competitor, family=name, name=f"{family(competitor.family).label}{label}"))
    return rivals
