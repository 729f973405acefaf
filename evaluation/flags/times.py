"""Times that were not measured in our loop: numbers that anyone can measure, or the engine's own log.

--t_draft_ms 4 --t_target_ms 30     a forward of either model, however many tokens it reads
--t_target_ms 1:30,5:33,17:50       by number of tokens, linear in between and beyond the last (t_draft_ms likewise,
                                    by sequences that draft together)
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from configs.paths import local_path
from configs.schema import Config
from decode.experiment import Experiment
from decode.policies.batch import BatchCosts, Curve
from evaluation.costs.machine import costs_for
from evaluation.flag_types import Milliseconds
from evaluation.times import Times


class Given(NamedTuple):
    """Times of forwards that were not measured here."""

    curves: BatchCosts
    origin: str

    def put_into(self, config: Config) -> Config:
        """The experiment with these times of single tokens."""
        draft_s, target_s = (float(curve(1)) for curve in self.curves)
        return replace(config, decode=replace(config.decode, t_draft_s=draft_s, t_target_s=target_s))

    def target_s(self, longest: int) -> tuple[float, ...]:
        """t_target(k) of one sequence for k up to the longest draft."""
        return tuple(float(self.curves.target(1 + k)) for k in range(longest + 1))

    def times(self, experiment: Experiment) -> Times:
        """The times of one sequence in an experiment that they were `put_into`, with those of stops."""
        target_s = self.target_s(experiment.decode.max_draft_length)
        return replace(costs_for(experiment), t_target_s=target_s, origin=self.origin)


def given_times(t_draft_ms: Milliseconds | None, t_target_ms: Milliseconds | None, log: str | None) -> Given | None:
    """The times that a command line gives; None where it gives none.

    Raises:
        ValueError: one of the two numbers without the other, or beside a log; what is no time; a log without times.
        FileNotFoundError: no such log.
    """
    if log is not None and (t_draft_ms is not None or t_target_ms is not None):
        raise ValueError("--log and --t_draft_ms or --t_target_ms both say what forwards take; give one of them")
    if log is not None:
        return read_logs([local_path(part, "--log") for part in log.split(",")])
    if t_draft_ms is None and t_target_ms is None:
        return None
    if t_draft_ms is None or t_target_ms is None:
        raise ValueError("--t_draft_ms and --t_target_ms go together: give both, or neither to measure them")
    return Given(BatchCosts(curve_of("t_draft_ms", t_draft_ms), curve_of("t_target_ms", t_target_ms)), "given")


def curve_of(name: str, given: Milliseconds) -> Curve:
    """Seconds by number of tokens, of a flag in milliseconds; ValueError for anything but positive numbers or pairs."""
    points = [part.partition(":") for part in str(given).split(",")]
    try:
        if len(points) == 1 and not points[0][1]:
            return Curve.line(float(points[0][0]) / 1e3)
        return Curve(*zip(*((int(number), float(ms) / 1e3) for number, _, ms in points), strict=True))
    except ValueError as error:
        raise ValueError(
            f"--{name} is {given}: {error}; give milliseconds of a forward, such as 4.5, or of so many tokens, such as "
            "1:30,5:33"
        ) from error


_EVAL = re.compile(r"(?<!prompt )eval time = +([\d.]+) ms / +(\d+) ")
_STATISTICS = re.compile(
    r"statistics +draft-simple: #calls\(b,g,a\) = *\d+[, ]+(\d+)[, ]+\d+,.*?#gen tokens = *(\d+),.*"
    r"dur\(b,g,a\) = *[\d.]+, *([\d.]+), *[\d.]+ ms"
)
_REMEDY = (
    "run llama-server with -md, -lv 4 and --spec-draft-p-min 0, and once more without -md, answer a few requests with "
    "each, and give both logs, spec.log,alone.log; or give --t_draft_ms and --t_target_ms"
)


def read_logs(paths: Sequence[Path]) -> Given:
    """Times from logs of a llama.cpp server: without a draft, and with it (one or more), at `-lv 4` and p-min 0.

    Each log is a point of t_target: without a draft that of one token, with drafts of K tokens that of 1 + K. One
    cannot be used for the other: verifying 4 tokens took a CPU four times as long as one.

    Raises:
        ValueError: a log without times; none with a draft, or none without; two of the same number of tokens.
        FileNotFoundError: no such file.
    """
    logs = sorted(map(read_log, paths))
    steps_ms = [draft_ms for _, _, draft_ms in logs if draft_ms is not None]
    names = ", ".join(path.name for path in paths)
    if not steps_ms or len(steps_ms) == len(logs):
        lacking = "without a draft" if steps_ms else "with a draft"
        raise ValueError(f"--log is {names}: the log of a server {lacking} is missing; {_REMEDY}")
    target = Curve(*zip(*((tokens, target_ms / 1e3) for tokens, target_ms, _ in logs), strict=True))
    return Given(BatchCosts(Curve.line(sum(steps_ms) / len(steps_ms) / 1e3), target), f"read from {names}")


def read_log(path: Path) -> tuple[float, float, float | None]:
    """(mean number of tokens that a target forward read, its milliseconds, those of a draft forward) from one log; None
    for a server without a draft.

    With g rounds, M drafted tokens and Y ms of drafting, as its last statistics have them, and E ms of all `eval time`:
    t_draft = Y / M, and since each round's draft also reads what was verified, t_target(M / g) = (E - Y) / g - t_draft.
    Without a draft t_target(0) is E over the tokens but the first of each answer, which reading its prompt gives.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    statistics, answers = _STATISTICS.findall(text), _EVAL.findall(text)
    eval_ms, forwards = sum(float(ms) for ms, _ in answers), sum(int(tokens) - 1 for _, tokens in answers)
    if not forwards or (statistics and not int(statistics[-1][1])):
        raise ValueError(f"{path} has no `eval time` or no drafts of llama.cpp; {_REMEDY}")
    if not statistics:
        return 1.0, eval_ms / forwards, None
    rounds, tokens, draft_ms = (float(number) for number in statistics[-1])
    step_ms = draft_ms / tokens
    verify_ms = (eval_ms - draft_ms) / rounds - step_ms
    if verify_ms <= 0:
        raise ValueError(
            f"{path} leaves {verify_ms:.3f} ms for a verification ({eval_ms} ms of {rounds} rounds, {draft_ms} ms of "
            "drafting); give --t_draft_ms and --t_target_ms"
        )
    return 1.0 + tokens / rounds, verify_ms, step_ms
