"""python -m evaluation flags: the best values of an engine's settings, by replaying its own rule (law 4.10).

The engine does not run: a trace has what its rule looks at, and the times are given, read from its log, or measured (of
transformers in its own loop, else in ours). Settings are chosen on dev and judged on test, beside the engine's default,
the best fixed length, no speculation, and what the engine lacks: our policies and heads at the same times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from json import dumps as to_json
from operator import itemgetter
from pathlib import Path
from typing import Any

from configs.schema import Config
from decode.experiment import Experiment
from decode.policies import FixedLength
from decode.policies.batch import BatchCosts
from evaluation.batches.curves import BatchTimes
from evaluation.batches.load import load_at
from evaluation.competitor import Competitor, competitors_of, label_of, make_competitor
from evaluation.contest import Arm, Result, fastest_on_dev, replay_arms
from evaluation.families import BASELINE, BOUNDS, GROUPS, HEADS, TRAINING_FREE
from evaluation.flag_types import EngineName, Milliseconds, Sizes, sizes_of
from evaluation.flags.counters import read_counters, speeds
from evaluation.flags.engines import ENGINES, Drafting, Engine
from evaluation.flags.times import Given, given_times, times_for
from evaluation.gain import Gain, Splits
from evaluation.table import Table, printing, say, shown
from evaluation.times import Times
from evaluation.traces.recording import TraceFolder, trace_folder
from evaluation.traces.replay import replay_rounds
from evaluation.traces.trace import Trace, join_traces
from evaluation.tuning.calibration import calibrated_on
from heads.model.head import AcceptanceHead
from store.progress import Bar

Traces = Mapping[Drafting, Splits[Trace]]
"""By how an engine drafts, its default first."""
NONE, DEFAULT, FIXED, FLAGS = "no speculation", "the engine's default", "best fixed length", "these flags"
OURS = {TRAINING_FREE: "our best policy without training", HEADS: "our best head"}
_BASES = {NONE: NONE, DEFAULT: "the default", FIXED: f"the {FIXED}"}
"""Choices that gains are measured from, as sentences name them."""
_BATCH_COLUMNS = {
    "batch": ("size", ""),
    "number": ("number", ""),
    "tokens/s": ("tokens_per_s", ".1f"),
    "over no speculation": ("over_none", "+.1%"),
    "over one number for all": ("over_one", "+.1%"),
}


def flags(
    config: Config,
    *,
    for_: EngineName,
    t_draft_ms: Milliseconds | None = None,
    t_target_ms: Milliseconds | None = None,
    log: str | None = None,
    batch: Sizes | None = None,
    from_: str | None = None,
    block: bool = False,
    json: bool = False,
) -> None:
    """Find an engine's best settings by replaying its rule on a trace, and print the line to paste.

    Args:
        config: the experiment; its trace is recorded first if it does not exist.
        for_: the engine (--for).
        t_draft_ms: milliseconds of a draft forward in that engine, with t_target_ms, instead of measured times; or by
            sequences in a batch, 1:4,8:5.
        t_target_ms: milliseconds of a target forward of one token (what a token takes without speculation); or by
            tokens that it verifies, 1:30,5:33,17:50.
        log: instead of the times, logs of a llama.cpp server with this draft at -lv 4 and without one (more improve the
            fit): spec.log,alone.log.
        batch: sizes of batches to choose a number of tokens for as well, for engines with one per size: 1,4,16.
        from_: the engine's own counters of accepted tokens by position, instead of a trace, for any kind of draft
            (written --from): files, or the shares themselves, 0.84,0.60,0.39.
        block: with --from, a draft is one forward however many tokens it has (DFlash, DSpark, P-EAGLE).
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    engine, given, sizes = ENGINES[for_], given_times(t_draft_ms, t_target_ms, log), sizes_of(batch) or ()
    if sizes and not engine.has_batches:
        able = ", ".join(name for name, other in ENGINES.items() if other.has_batches)
        raise ValueError(f"--batch needs an engine whose sequences draft in lockstep ({able}); leave it out for {for_}")
    with printing(aside=json):
        if from_ is None:
            document = _from_traces(engine, Experiment(config), given, sizes)
        else:
            document = _from_counters(engine, read_counters(from_), given, sizes, is_block=block)
    if json:
        print(to_json({"engine": engine.name, "version": engine.version} | document))


def _from_traces(engine: Engine, experiment: Experiment, given: Given | None, sizes: Sequence[int]) -> dict[str, Any]:
    engine.check(experiment.sampling)
    times = times_for(experiment, engine.name, given)
    answer = Answer(engine, traces_for(experiment, engine), times)
    answer.add_ours(experiment.heads, drawn=_complete(experiment, trace_folder(experiment)))
    answer.table().print()
    say("\n".join(answer.sentences()))
    print(f"\n  {answer.line}\n")
    curves = given[0] if given else BatchTimes(times).curves("")
    batches = print_batches(engine, answer.in_batches(sizes, curves), times.title)
    return answer.as_dict() | {"costs": asdict(times)} | batches


def _from_counters(
    engine: Engine, counters: Sequence[Any], given: Given | None, sizes: Sequence[int], *, is_block: bool
) -> dict[str, Any]:
    """The best number of drafted tokens by counters alone."""
    if given is None:
        raise ValueError("--from needs times: give --t_draft_ms and --t_target_ms, or --log")
    curves, _ = given
    speed, low, high = speeds(counters, curves, 1, is_block=is_block)
    best, counted = int(speed.argmax()), len(counters[-1])
    rows = [{"k": k, "tokens/s": speed[k], "from": low[k], "to": high[k]} for k in range(len(speed))]
    note = f"from, to: the bracket of two assumptions (docs/flags.md); k > {counted}: extrapolated"
    columns = {"k": ("k", "")} | {name: (name, ".1f") for name in ("tokens/s", "from", "to")}
    counts = ", ".join(str(len(entries)) for entries in counters)
    Table(f"{engine.name}, predicted from counters at k = {counts}", shown(rows, columns), note).print()
    over = [f"{estimate[best] / speed[0] - 1:+.0%}" for estimate in (speed, low, high)]
    beyond = f" Your counters end at {counted}: measure k={best} too." if best > counted else ""
    gain = f"k={best}, predicted {over[0]} ({over[1]}, {over[2]}) over no speculation.{beyond}"
    say(gain if best else "Do not speculate.")
    line = engine.number.format(k=best, all=best + 1) if best else engine.off
    print(f"\n  {line}\n")
    of_sizes = {size: 2 * [speeds(counters, curves, size, is_block=is_block)[0].tolist()] for size in sizes}
    return {"line": line, "k": best, "speeds": rows} | print_batches(engine, of_sizes, "predicted from counters")


def traces_for(experiment: Experiment, engine: Engine) -> Traces:
    """The trace of each way in which the engine drafts; recorded if it does not exist."""
    ways: dict[Path, tuple[Drafting, TraceFolder]] = {}
    for drafting in engine.draftings:  # at temperature 0, drawing and taking the likeliest are the same
        folder = trace_folder(experiment, draft_sampling=drafting.sampling_of(experiment.sampling))
        ways.setdefault(folder.directory, (drafting, folder))
    return {drafting: _complete(experiment, folder) for drafting, folder in ways.values()}


def _complete(experiment: Experiment, folder: TraceFolder) -> Splits[Trace]:
    """A trace of all datasets together, recorded if it does not exist."""
    folder.refuse_other()
    folder.complete()
    parts = map(folder.load, experiment.datasets)
    return Splits(*(join_traces(split) for split in zip(*parts, strict=True)))


class Answer:
    """One engine at one set of times.

    Attributes:
        alone: times without speculation.
        speculating: times with it: what each round pays beyond its draft is part of t_target(k).
        choices: name -> result; a competitor's name says how the engine drafts, or names our policy.
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
        rules = [make_competitor(FIXED, "fixed_length", {"k": range(1, longest + 1)})]
        if engine.default is not None:
            rules.insert(0, engine.competitor(DEFAULT, longest, engine.default))
        alone = replay_arms([Competitor(NONE, "", FixedLength(0), ({},))], self._default)
        self.choices = fastest_on_dev(alone, times)
        self.choices |= fastest_on_dev((self.arm(rule, default) for rule in rules), self.speculating)
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
        """Add the best of our policies without training, and of our heads.

        Our loop draws its drafts. If the engine takes the likeliest tokens, ours compete on both kinds of drafts.

        Args:
            heads: by name; one that was trained on other drafts is calibrated to these.
            drawn: the trace of drafts that are drawn as the target's tokens are.
        """
        best: dict[str, Result] = {}
        is_drawn = self._default.dev.draft_sampling is None
        for label, traces in {"": self._default, **({} if is_drawn else {" on drawn drafts": drawn})}.items():
            fitted = {**heads, **calibrated_on(traces.dev, heads)}
            rivals = [
                replace(competitor, family=name, name=f"{competitor.family}{label}")
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
            gains = {f"over {base}": gain.text * (base != name) for base, gain in self.gains(choice).items()}
            setting = "; ".join(filter(None, (label_of("", choice.setting), choice.competitor.name)))
            rows.append({"what": name, "setting": setting, "tokens/s": f"{choice.tokens_per_s:.1f}", **gains})
        note = (
            "gain: predicted from counts and times (law 4.9) on test, with its 95 % interval (paired bootstrap of test "
            f"prompts). Rows of ours need our loop or plugin. The rule is that of {self.engine.name} "
            f"{self.engine.version}. These flags are {self.short_of_hindsight:.1%} slower than the best setting on test"
        )
        return Table(f"{self.engine.name}: settings chosen on dev; {self.alone.title}", rows, note, names=2)

    def sentences(self) -> Iterator[str]:
        """The answer in sentences."""
        flags, where, name = self.flags, self.alone.where, self.engine.name
        if self.drafting is None:
            yield f"{where}: do not speculate. No setting of {name} is predicted to be faster than the target on dev."
        else:
            listed = ", ".join(f"{gain.words} over {_BASES[base]}" for base, gain in self.gains(flags).items())
            is_sure = flags.over(self.choices[NONE]).low > 0
            doubt = "" if is_sure else " This could be chance; raise decode.num_test to settle it."
            yield f"{where}: {label_of('', flags.setting)}, predicted {listed}.{doubt}"
        default = self.choices.get(DEFAULT)
        if default is not None and (gain := default.over(self.choices[NONE])).value < 0:
            yield f"{name}'s default is predicted to be slower: {gain.words} over no speculation."
        for ours, choice in self.choices.items():
            if ours in OURS.values():
                yield f"{ours.capitalize()} ({choice.competitor.name}) would add {choice.over(flags).words}."
        if self.engine.remark:
            yield self.engine.remark

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


def print_batches(engine: Engine, speeds: Mapping[int, Sequence[Sequence[float]]], title: str) -> dict[str, Any]:
    """Print the number of drafted tokens that is fastest on dev at each size of batch; the same for JSON.

    Args:
        engine: whose setting it is.
        speeds: size -> tokens per second on dev and on test by number of drafted tokens; may be empty.
        title: what the speeds are.
    """
    rows: list[dict[str, Any]] = []
    for size, (dev, test) in sorted(speeds.items()):
        best = max(range(len(dev)), key=dev.__getitem__)
        first = rows[0]["number"] if rows else best
        row = {"size": size, "number": best, "tokens_per_s": test[best]}
        rows.append(row | {"over_none": test[best] / test[0] - 1, "over_one": test[best] / test[first] - 1})
    if not rows:
        return {"batches": [], "batch_line": None}
    note = (
        "number: drafted tokens (0: do not speculate); tokens/s of the whole batch on test, predicted (law 4.13). One "
        "number for all: that of the smallest size. No interval: a batch mixes prompts"
    )
    Table(f"by sequences in a batch; {title}", shown(rows, _BATCH_COLUMNS), note).print()
    line = batch_line(engine, rows)
    print(f"\n  {line}\n")
    return {"batches": rows, "batch_line": line}


def batch_line(engine: Engine, rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers as the engine takes them: vLLM for all sizes in one setting, others one server for each."""
    if engine.name != "vllm":
        return "; ".join(f"{row['size']} sequences: {row['number']}" for row in rows)
    ranges: list[list[int]] = []
    for number, of_number in groupby(rows, key=itemgetter("number")):
        *_, last = of_number
        ranges.append([ranges[-1][1] + 1 if ranges else 1, last["size"], number])
    most = max(row["number"] for row in rows)
    return f'"num_speculative_tokens": {most}, "num_speculative_tokens_per_batch_size": {ranges}'
