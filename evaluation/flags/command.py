"""python -m evaluation flags: the best values of an engine's settings, by replaying its own rule (law 4.10).

The engine does not run: a trace has what its rule looks at, and the times are given, read from its log, or measured (of
transformers in its own loop, else in ours). Settings are chosen on dev and judged on test, beside the engine's default,
the best fixed length, no speculation, and what the engine lacks: our policies and heads at the same times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from configs.flag_types import EngineName, Milliseconds, Sizes, sizes_of
from configs.load import accepts_yaml
from configs.schema import Config
from decode.experiment import Experiment
from evaluation.flags.answer import Traces, answer_of
from evaluation.flags.counters import Array, read_counters, speeds
from evaluation.flags.engines import ENGINES, Drafting, Engine
from evaluation.flags.times import given_times, times_for
from evaluation.gain import Splits
from evaluation.table import Table, printing, say, shown
from evaluation.times import Times
from evaluation.traces.recording import TraceFolder, join_splits, trace_folder
from evaluation.traces.trace import Trace

_BATCH_COLUMNS = {
    "batch": ("size", ""),
    "number": ("number", ""),
    "tokens/s": ("tokens_per_s", ".1f"),
    "over no speculation": ("over_none", "+.1%"),
    "over one number for all": ("over_one", "+.1%"),
}


@accepts_yaml
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
    drawn: bool = False,
    json: bool = False,
) -> None:
    """Run `acceptance-heads flags`; `configs.measuring` documents its flags."""
    engine = ENGINES[for_]
    given = given_times(t_draft_ms, t_target_ms, log)
    sizes = sizes_of(batch) or ()
    if sizes and not engine.has_batches:
        able = ", ".join(name for name, other in ENGINES.items() if other.has_batches)
        raise ValueError(f"--batch needs an engine whose sequences draft in lockstep ({able}); leave it out for {for_}")
    with printing(json) as publish:
        if from_ is None:
            document = _from_traces(engine, Experiment(config), given, sizes, has_drawn=drawn)
        else:
            document = _from_counters(engine, read_counters(from_), given, sizes, is_block=block)
        publish({"engine": engine.name, "version": engine.version} | document)


def _from_traces(
    engine: Engine, experiment: Experiment, given: Times | None, sizes: Sequence[int], *, has_drawn: bool
) -> dict[str, object]:
    engine.check(experiment.sampling)
    times = times_for(experiment, engine.name, given)
    answer = answer_of(engine, traces_for(experiment, engine), times)
    folder = trace_folder(experiment)
    drawn = _complete(experiment, folder) if has_drawn or folder.is_complete else None
    answer = answer.with_ours(experiment.heads, drawn=drawn)
    answer.table().print()
    say("\n".join(answer.sentences()))
    print(f"\n  {answer.line}\n")
    batches = print_batches(engine, answer.in_batches(sizes, times.costs("")), times.title)
    return answer.as_dict() | {"costs": asdict(times)} | batches


def _from_counters(
    engine: Engine, counters: Sequence[Array], given: Times | None, sizes: Sequence[int], *, is_block: bool
) -> dict[str, object]:
    if given is None:
        raise ValueError("--from needs times: give --t_draft_ms and --t_target_ms, or --log")
    speed, low, high = speeds(counters, given, 1, is_block=is_block)
    best = int(speed.argmax())
    counted = len(counters[-1])
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
    of_sizes = {size: 2 * [speeds(counters, given, size, is_block=is_block)[0].tolist()] for size in sizes}
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
    folder.complete()
    return join_splits(map(folder.load, experiment.datasets))


def print_batches(engine: Engine, speeds: Mapping[int, Sequence[Sequence[float]]], title: str) -> dict[str, Any]:
    """Print the number of drafted tokens that is fastest on dev at each size of batch; the same for JSON. `speeds`:
    size -> tokens per second on dev and on test by number of drafted tokens; `title` says what they are.
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
