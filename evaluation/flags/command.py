"""python -m evaluation flags: the best values of an engine's settings, by replaying its own rule (law 4.10).

The engine does not run: a trace has what its rule looks at, and the times are given, read from its log, or measured (of
transformers in its own loop, else in ours). Settings are chosen on dev and judged on test.
"""

from dataclasses import asdict, replace
from json import dumps as to_json
from pathlib import Path

from configs.schema import Config
from decode.experiment import Experiment
from evaluation.costs.machine import NUM_PROMPTS, costs_for, kept_costs, key_of
from evaluation.flag_types import EngineName, Milliseconds, Sizes, sizes_of
from evaluation.flags.answer import Answer, Traces, batch_line, batch_table
from evaluation.flags.assisted import times_of_assisted
from evaluation.flags.engines import ENGINES, Drafting, Engine
from evaluation.flags.times import Given, given_times
from evaluation.gain import Splits
from evaluation.table import printing, say
from evaluation.times import TimeErrors, Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.trace import Trace, join_traces
from lm import Sampling

_TOKENS = 64


def flags(
    config: Config,
    *,
    for_: EngineName,
    t_draft_ms: Milliseconds | None = None,
    t_target_ms: Milliseconds | None = None,
    log: str | None = None,
    batch: Sizes | None = None,
    json: bool = False,
) -> None:
    """The best settings of an engine, by replaying its own rule on a trace; prints the line to paste.

    Args:
        config: the experiment; its trace is recorded first if it does not exist.
        for_: the engine, written --for.
        t_draft_ms: milliseconds of a draft forward in that engine, with t_target_ms, instead of measured times; or by
            sequences in a batch, 1:4,8:5.
        t_target_ms: milliseconds of a target forward of one token (what a token takes without speculation); or by
            tokens that it verifies, 1:30,5:33,17:50.
        log: instead of the two times, logs of a llama.cpp server with this draft at -lv 4 and without a draft:
            spec.log,alone.log; more logs, with other numbers of drafted tokens, improve the fit.
        batch: sizes of batches to choose a number of tokens for as well, for engines with one per size: 1,4,16.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    engine, given, sizes = ENGINES[for_], given_times(t_draft_ms, t_target_ms, log), sizes_of(batch)
    if sizes is not None and not engine.has_batches:
        able = ", ".join(name for name, other in ENGINES.items() if other.has_batches)
        raise ValueError(f"--batch needs an engine whose sequences draft in lockstep ({able}); leave it out for {for_}")
    with printing(aside=json):
        experiment = Experiment(config if given is None else given.put_into(config))
        engine.check(experiment.sampling)
        answer = Answer(engine, traces_for(experiment, engine), times_for(experiment, engine, given))
        answer.add_ours(experiment.heads, drawn=traces_of(experiment, None))
        answer.table().print()
        for sentence in answer.sentences():
            say(sentence)
        print(f"\n  {answer.line}\n")
        batches = answer.in_batches(sizes, given) if sizes else []
        line = batch_line(engine, batches) if batches else None
        if batches:
            batch_table(batches, answer.alone).print()
            print(f"\n  {line}\n")
    if json:
        print(to_json({**answer.as_dict(), "costs": asdict(answer.alone), "batches": batches, "batch_line": line}))


def traces_for(experiment: Experiment, engine: Engine) -> Traces:
    """The trace of each way in which the engine drafts; recorded if it does not exist."""
    folders: set[Path] = set()
    traces: dict[Drafting, Splits[Trace]] = {}
    for drafting in engine.draftings:
        sampling = drafting.sampling_of(experiment.sampling)
        directory = trace_folder(experiment, draft_sampling=sampling).directory
        # at temperature 0, drawing and taking the likeliest are the same
        if directory not in folders:
            folders.add(directory)
            traces[drafting] = traces_of(experiment, sampling)
    return traces


def traces_of(experiment: Experiment, draft_sampling: Sampling | None) -> Splits[Trace]:
    """The trace of drafts under this sampling, all datasets together; recorded if it does not exist."""
    folder = trace_folder(experiment, draft_sampling=draft_sampling)
    folder.refuse_other()
    folder.complete()
    parts = map(folder.load, experiment.datasets)
    return Splits(*(join_traces(split) for split in zip(*parts, strict=True)))


def times_for(experiment: Experiment, engine: Engine, given: Given | None) -> Times:
    """The times of one sequence: given, or measured, of transformers in its own loop, else in ours."""
    ours = costs_for(experiment)
    if given is not None:
        return given.times(ours, experiment.decode.max_draft_length)
    if engine.name != "transformers" or experiment.decode.t_draft_s is not None:
        return ours
    # kept in DIR/costs.jsonl beside the times of our loop
    store, key = kept_costs(experiment.directory), key_of(experiment) | {"loop": "transformers"}
    kept = store.get(key)
    if kept is None:
        prompts = experiment.prompt_ids(next(iter(experiment.datasets)), "dev", num=NUM_PROMPTS)
        num_tokens = min(_TOKENS, experiment.decode.max_new_tokens)
        measured = times_of_assisted(experiment.pair, prompts, experiment.sampling, num_tokens=num_tokens)
        kept = {name: getattr(measured, name) for name in ("t_draft_s", "t_target_s", "origin")}
        kept |= {"errors": measured.errors._asdict(), "stops": {}}
        store.keep([(key, kept)])
    errors = TimeErrors(**kept["errors"])
    errors = errors._replace(stopping={**ours.errors.stopping, **errors.stopping})
    own = {"t_draft_s": kept["t_draft_s"], "t_target_s": tuple(kept["t_target_s"]), "origin": kept["origin"]}
    return replace(ours, **own, errors=errors)
