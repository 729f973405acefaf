"""python -m evaluation flags: the best setting of an engine's own knobs, by replaying its own rule (law 4.10).

Nothing of the engine runs: a trace has what its rule looks at, and the times are those given, or read from its log, or
measured (of transformers in its own loop, else in ours). Settings are chosen on dev and judged on test.
"""

from dataclasses import asdict, replace
from json import dumps as to_json
from pathlib import Path

from configs.schema import Config
from decode.experiment import Experiment
from evaluation.contest.in_batches import sizes_of
from evaluation.costs.machine import NUM_PROMPTS, costs_for, kept_costs, key_of
from evaluation.flag_types import EngineName, Milliseconds, Sizes
from evaluation.flags.answer import Answer
from evaluation.flags.assisted import times_of_assisted
from evaluation.flags.choice import Contest, Traces
from evaluation.flags.engines import ENGINES, Drafting, Engine
from evaluation.flags.in_batches import batch_line, batch_sheet, choose_in_batches
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
    """The best flags for an engine that people have: its own rule replayed on the trace; the line to paste.

    Args:
        config: the experiment, whose trace is recorded first if need be.
        for_: the engine, written --for.
        t_draft_ms: milliseconds of a draft forward in that engine, with t_target_ms, in place of measured times; or by
            sequences in a batch, 1:4,8:5.
        t_target_ms: milliseconds of a target forward of one token (what a token takes without speculation); or by
            tokens that it verifies, 1:30,5:33,17:50.
        log: of a llama.cpp server that ran with this draft at -lv 4, and of the same without a draft, in place of the
            two times: spec.log,alone.log; more logs, with other numbers of drafted tokens, make them surer.
        batch: also choose a number for batches of so many sequences, of an engine that takes one for each: 1,4,16.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    engine, given, sizes = ENGINES[for_], given_times(t_draft_ms, t_target_ms, log), sizes_of(batch)
    if sizes is not None and not engine.has_batches:
        able = ", ".join(name for name, other in ENGINES.items() if other.has_batches)
        raise ValueError(f"--batch needs an engine whose sequences draft in lockstep ({able}); leave it out for {for_}")
    with printing(aside=json):
        experiment = Experiment(config if given is None else given.put_into(config))
        engine.check(experiment.sampling)
        cost = cost_for(experiment, for_, given)
        contest = Contest(engine, traces_for(experiment, engine), cost)
        ours = contest.ours(experiment.heads, drawn=traces_of(experiment, None))
        answer = Answer(for_, contest, contest.choices() | ours)
        answer.sheet().print()
        for sentence in answer.sentences():
            say(sentence)
        print(f"\n  {answer.line}\n")
        choices = choose_in_batches(contest, sizes, given, answer.flags.drafting) if sizes else []
        line = batch_line(for_, choices) if choices else None
        if choices:
            batch_sheet(choices, cost).print()
            print(f"\n  {line}\n")
    if json:
        batches = [choice._asdict() for choice in choices]
        print(to_json({**answer.as_dict(), "costs": asdict(cost), "batches": batches, "batch_line": line}))


def traces_for(experiment: Experiment, engine: Engine) -> Traces:
    """The trace of each way in which the engine drafts; recorded if it does not exist."""
    folders: set[Path] = set()
    traces: dict[Drafting, Splits[Trace]] = {}
    for drafting in engine.draftings:
        sampling = drafting.law(experiment.sampling)
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


def cost_for(experiment: Experiment, name: EngineName, given: Given | None) -> Times:
    """The costs of one sequence: given, or measured, of transformers in its own loop, else in ours."""
    if given is not None:
        return given.model(costs_for(experiment), experiment.decode.max_draft_length)
    if name == "transformers" and experiment.decode.t_draft_s is None:
        return _of_transformers(experiment)
    return costs_for(experiment)


def _of_transformers(experiment: Experiment) -> Times:
    """The times of transformers' own loop, kept in DIR/costs.jsonl beside those of ours; our stops as in ours."""
    store, key = kept_costs(experiment.directory), key_of(experiment) | {"loop": "transformers"}
    times = store.get(key)
    if times is None:
        prompts = experiment.prompt_ids(next(iter(experiment.datasets)), "dev", num=NUM_PROMPTS)
        num_tokens = min(_TOKENS, experiment.decode.max_new_tokens)
        cost = times_of_assisted(experiment.pair, prompts, experiment.sampling, num_tokens=num_tokens)
        times = {name: getattr(cost, name) for name in ("t_draft_s", "t_target_s", "origin")}
        times |= {"errors": cost.errors._asdict(), "fit": {}, "stops": {}}
        store.keep([(key, times)])
    ours_ = costs_for(experiment)
    of_loop = TimeErrors(**times["errors"])
    errors = of_loop._replace(stopping={**ours_.errors.stopping, **of_loop.stopping})
    target_s, origin = tuple(times["t_target_s"]), times["origin"]
    return replace(ours_, t_draft_s=times["t_draft_s"], t_target_s=target_s, origin=origin, errors=errors)
