"""python -m evaluation flags: the best setting of an engine's own knobs, by replaying its own rule (law 4.10).

Nothing of the engine runs: a trace has what its rule looks at, and the times are those given, or read from its log, or
measured (of transformers in its own loop, else in ours). Settings are chosen on dev and judged on test.
"""

from collections.abc import Mapping
from dataclasses import asdict
from json import dumps as to_json
from pathlib import Path
from typing import Any

from configs.schema import Config
from decode.experiment import Experiment
from evaluation.contest.in_batches import sizes_of
from evaluation.costs.machine import NUM_PROMPTS, costs_for, kept_costs, key_of
from evaluation.costs.model import CostModel, TimeErrors
from evaluation.flag_types import EngineName, Milliseconds, Sizes
from evaluation.flags.answer import Answer, answer_sheet, batch_line, batch_sheet, sentences_of
from evaluation.flags.assisted import times_of_assisted
from evaluation.flags.choice import Contest, Times, Traces
from evaluation.flags.engines import ENGINES, Drafting, Engine
from evaluation.flags.in_batches import BatchChoice, choose_in_batches
from evaluation.flags.ours import ours
from evaluation.flags.times import Given, given_times
from evaluation.intervals import Splits
from evaluation.sheet import printing, say
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
    engine, given = ENGINES[for_], given_times(t_draft_ms, t_target_ms, log)
    sizes = sizes_of(batch)
    check_batches(engine, for_, sizes)
    with printing(aside=json):
        experiment, contest = contest_for(config, for_, given)
        answer = Answer.of(for_, contest, ours(contest, experiment.heads, drawn=traces_of(experiment, None)))
        answer_sheet(answer).print()
        for sentence in sentences_of(answer):
            say(sentence)
        print(f"\n  {answer.line}\n")
        chosen = choose_in_batches(contest, sizes, given, answer.flags.option.drafting) if sizes else []
        if chosen:
            batch_sheet(chosen, contest.times.alone).print()
            print(f"\n  {batch_line(for_, chosen)}\n")
    if json:
        print(to_json(document(answer, chosen)))


def contest_for(config: Config, name: EngineName, given: Given | None) -> tuple[Experiment, Contest]:
    """The experiment, and what competes in it for an engine.

    Raises:
        ValueError: a sampling under which no trace has the engine's drafts; a trace of other settings.
    """
    experiment, engine = Experiment(config if given is None else given.put_into(config)), ENGINES[name]
    engine.check(experiment.sampling)
    times = Times.of(cost_for(experiment, name, given), engine)
    return experiment, Contest(engine, traces_for(experiment, engine), times)


def check_batches(engine: Engine, name: str, sizes: tuple[int, ...] | None) -> None:
    """Raise ValueError where an engine drafts for one sequence at a time, and batches are asked for."""
    if sizes is not None and not engine.has_batches:
        able = ", ".join(other for other, known in ENGINES.items() if known.has_batches)
        raise ValueError(f"--batch is for engines whose sequences draft in lockstep ({able}); leave it out for {name}")


def traces_for(experiment: Experiment, engine: Engine) -> Traces:
    """The trace of each way in which the engine drafts, all datasets together; recorded where there is none."""
    found: dict[Drafting, tuple[Path, Splits[Trace]]] = {}
    for drafting in engine.draftings:
        law = drafting.law(experiment.sampling)
        directory = trace_folder(experiment, draft_sampling=law).directory
        # at temperature 0 drawing and taking the likeliest are one
        if directory not in (known for known, _ in found.values()):
            found[drafting] = directory, traces_of(experiment, law)
    return {drafting: traces for drafting, (_, traces) in found.items()}


def traces_of(experiment: Experiment, draft_sampling: Sampling | None) -> Splits[Trace]:
    """The trace whose drafts are drawn so, all datasets together; recorded where there is none."""
    folder = trace_folder(experiment, draft_sampling=draft_sampling)
    folder.refuse_other()
    folder.complete()
    parts = map(folder.load, experiment.datasets)
    return Splits(*(join_traces(split) for split in zip(*parts, strict=True)))


def cost_for(experiment: Experiment, name: EngineName, given: Given | None) -> CostModel:
    """The costs of one sequence: given, or measured in the engine's loop where that is here, or in ours."""
    if given is not None:
        return given.model(costs_for(experiment), experiment.decode.max_draft_length)
    if name == "transformers" and experiment.decode.t_draft_s is None:
        return _of_transformers(experiment)
    return costs_for(experiment)


def _of_transformers(experiment: Experiment) -> CostModel:
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
    return CostModel(
        times["t_draft_s"],
        tuple(times["t_target_s"]),
        times["origin"],
        ours_.t_stop_s,
        ours_.stop_origin,
        ours_.elsewhere,
        errors,
    )


def document(answer: Answer, chosen: list[BatchChoice]) -> Mapping[str, Any]:
    """Everything as JSON has it."""
    return {
        **answer.as_dict(),
        "costs": asdict(answer.cost),
        "batches": [choice.as_dict() for choice in chosen],
        "batch_line": batch_line(answer.name, chosen) if chosen else None,
    }
