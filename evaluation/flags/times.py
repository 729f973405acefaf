"""Times of an engine's forwards: numbers that anyone can measure, the engine's own log, or the loop of transformers,
which takes longer around a forward than ours.

Generations with several constant numbers of tokens, and without an assistant, take turns on the clock of
`evaluation.sources.clock`; forwards are counted by hooks on both models, and the seconds are

    T = t_start + t_draft * (draft forwards) + t_target(1) * (verifications of a draft) + t_target(0) * (plain steps)

fitted by least absolute deviations, which large residuals hardly move, each with its standard error. A threshold too
low to end any draft is set, so that t_draft includes the comparison. The time of verifying one more token is part of
t_draft.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from torch import nn

from configs.flag_types import Milliseconds
from configs.paths import local_path
from decode.experiment import Experiment
from decode.policies.batch import Curve
from evaluation.bench.arms import assisted, constant
from evaluation.costs.machine import costs_for, entry_of, errors_of, kept_costs, key_of, largest_errors, loop_of
from evaluation.costs.measure import Loop
from evaluation.costs.stability import stable
from evaluation.costs.stops import policies_by_kind, shares_of
from evaluation.regression import least_absolute
from evaluation.sources.clock import Arm, Clocked, Request, clock_within
from evaluation.times import TimeErrors, Times, curve_of
from lm import Pair

LENGTHS = (None, 1, 2, 4, 8, 16)
"""Constant numbers of tokens that are timed in transformers; None: no assistant."""
BUDGET_S = 40.0
FEWEST_TURNS = 12
_TOKENS = 64
_FAR = 4096
"""Tokens, more than any draft has."""
_NEVER_STOPS = {"assistant_confidence_threshold": 1e-9}


def given_times(t_draft_ms: Milliseconds | None, t_target_ms: Milliseconds | None, log: str | None) -> Times | None:
    """The times that a command line gives, stops free; None where it gives none. ValueError for one of the two numbers
    without the other or beside a log, for what is no time, and for a log without times; FileNotFoundError for no such
    log.
    """
    if log is not None and (t_draft_ms is not None or t_target_ms is not None):
        raise ValueError("--log and --t_draft_ms or --t_target_ms both say what forwards take; give one of them")
    if (t_draft_ms is None) != (t_target_ms is None):
        raise ValueError("--t_draft_ms and --t_target_ms go together: give both, or neither to measure them")
    if log is not None:
        return read_logs([local_path(part, "--log") for part in log.split(",")])
    if t_draft_ms is None or t_target_ms is None:
        return None
    return Times(curve_of("--t_draft_ms", t_draft_ms), curve_of("--t_target_ms", t_target_ms))


_EVAL = re.compile(r"(?<!prompt )eval time = +([\d.]+) ms / +(\d+) ")
_STATISTICS = re.compile(
    r"statistics +draft-simple: #calls\(b,g,a\) = *\d+[, ]+(\d+)[, ]+\d+,.*?#gen tokens = *(\d+),.*"
    r"dur\(b,g,a\) = *[\d.]+, *([\d.]+), *[\d.]+ ms"
)
_REMEDY = (
    "run llama-server with -md, -lv 4 and --spec-draft-p-min 0, and once more without -md, answer a few requests with "
    "each, and give both logs, spec.log,alone.log; or give --t_draft_ms and --t_target_ms"
)


def read_logs(paths: Sequence[Path]) -> Times:
    """Times from logs of a llama.cpp server: without a draft, and with it (one or more), at `-lv 4` and p-min 0.

    With g rounds, M drafted tokens and Y ms of drafting, as a log's last statistics have them, and E ms of all `eval
    time`: t_draft = Y / M, and since each round's draft also reads what was verified, t_target of 1 + M / g tokens is
    (E - Y) / g - t_draft. Without a draft E over the tokens but the first of each answer, which reading its prompt
    gives, is t_target of one token. It cannot be read from the other logs: verifying 4 tokens took a CPU four times as
    long as one. ValueError for a log without times, none with a draft or none without, two of one number of tokens.
    """
    forwards_s: list[tuple[float, float]] = []
    steps_ms: list[float] = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        statistics = _STATISTICS.findall(text)
        answers = _EVAL.findall(text)
        eval_ms = sum(float(ms) for ms, _ in answers)
        forwards = sum(int(tokens) - 1 for _, tokens in answers)
        if not forwards or (statistics and not int(statistics[-1][1])):
            raise ValueError(f"{path} has no `eval time` or no drafts of llama.cpp; {_REMEDY}")
        num_tokens = 1.0
        target_ms = eval_ms / forwards
        if statistics:
            rounds, tokens, draft_ms = (float(number) for number in statistics[-1])
            steps_ms.append(draft_ms / tokens)
            num_tokens = 1.0 + tokens / rounds
            target_ms = (eval_ms - draft_ms) / rounds - steps_ms[-1]
        if target_ms <= 0:
            raise ValueError(
                f"{path} leaves {target_ms:.3f} ms for a target forward of its {eval_ms} ms; give --t_draft_ms and "
                "--t_target_ms"
            )
        forwards_s.append((num_tokens, target_ms / 1e3))
    names = ", ".join(path.name for path in paths)
    if not 0 < len(steps_ms) < len(paths):
        lacking = "without" if steps_ms else "with"
        raise ValueError(f"--log is {names}: the log of a server {lacking} a draft is missing; {_REMEDY}")
    draft = Curve.line(sum(steps_ms) / len(steps_ms) / 1e3)
    return Times(draft, Curve(*zip(*sorted(forwards_s), strict=True)), f"read from {names}")


def times_for(experiment: Experiment, engine: str, given: Times | None) -> Times:
    """The given times, with the stops of this experiment; else those of transformers' loop for that engine, which
    DIR/costs.jsonl keeps beside ours; else those of our loop.
    """
    if given is not None:
        shares = shares_of(experiment, policies_by_kind(experiment.heads.values()), {})
        return Times.with_shares(given.draft, given.target, given.origin, shares)
    ours = costs_for(experiment)
    if engine != "transformers" or experiment.decode.t_draft_s is not None:
        return ours
    store = kept_costs(experiment.directory)
    key = key_of(experiment) | {"loop": "transformers"}
    if (entry := store.get(key)) is None:
        timed = stable(
            lambda: fitted(timed_generations(loop_of(experiment))),
            largest_errors,
            on_cpu=experiment.pair.target.device.type == "cpu",
        )
        entry = entry_of(timed)
        store.keep([(key, entry)])
    errors = errors_of(entry)._replace(stopping=ours.errors.stopping)
    plain_s, verify_s = entry["t_target_s"][:2]
    return replace(
        ours,
        draft=Curve.line(entry["t_draft_s"]),
        target=_of_drafts(plain_s, verify_s),
        origin=entry["origin"],
        errors=errors,
    )


def _of_drafts(plain_s: float, verify_s: float) -> Curve:
    """One token takes `plain_s`, and any draft `verify_s`: what each of its tokens takes is part of t_draft."""
    return Curve((1, 2, _FAR), (plain_s, verify_s, verify_s))


def timed_generations(loop: Loop) -> list[Clocked]:
    """Generations of transformers with every constant number of tokens, and without an assistant, their forwards
    counted.
    """
    prompts = loop.prompts
    num_tokens = min(_TOKENS, loop.max_new_tokens)
    arms = {}
    for k in LENGTHS:
        changes = None if k is None else constant(k) | _NEVER_STOPS
        arms[str(k)] = _counted(loop.pair, assisted(loop.pair, loop.sampling, changes))
    runs = clock_within(
        BUDGET_S,
        arms,
        lambda turn: (prompts[turn % len(prompts)], num_tokens, turn),
        fewest=FEWEST_TURNS,
        desc="costs: transformers' own",
    )
    return list(chain(*runs.values()))


def _counted(pair: Pair, arm: Arm) -> Arm:
    def decode(request: Request) -> Clocked:
        calls: Counter[nn.Module] = Counter()

        def count(model: nn.Module, _: object) -> None:
            calls[model] += 1

        with pair.target.register_forward_pre_hook(count), pair.draft.register_forward_pre_hook(count):
            run = arm(request)
        counts = replace(run.counts, num_draft_forwards=calls[pair.draft], num_target=calls[pair.target])
        return replace(run, counts=counts)

    return decode


def fitted(runs: Sequence[Clocked]) -> Times:
    """The times that fit these generations best; one without draft forwards has plain steps alone."""
    ones = np.ones(len(runs))
    drafts = np.array([run.counts.num_draft_forwards for run in runs])
    targets = np.array([run.counts.num_target for run in runs])
    seconds = np.array([run.whole_s for run in runs])
    is_plain = drafts == 0
    # relative to each run's seconds: a slow moment of the machine stretches all of it
    columns = np.column_stack([drafts, targets * ~is_plain, targets * is_plain, ones]) / seconds[:, None]
    times = least_absolute(columns, ones)
    deviation = 1.48 * np.median(np.abs(columns @ times - ones))  # that of normal residuals of this median size
    errors = deviation * np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)))
    draft_s, verify_s, plain_s, _ = times.tolist()
    draft_error, verify_error, plain_error, _ = (errors / times).tolist()
    return Times(
        Curve.line(draft_s),
        _of_drafts(plain_s, verify_s),
        "measured in transformers",
        errors=TimeErrors(draft_error, (plain_error, verify_error, verify_error)),
    )
