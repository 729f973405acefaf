"""Times that need no loop of ours: numbers that anyone can measure, or the engine's own log.

--t_draft_ms 4 --t_target_ms 30                     a forward of either, whatever it is fed
--t_target_ms 1:30,5:33,17:50                       of so many tokens: straight between, and on beyond the last
                                                    (t_draft_ms likewise, by sequences that draft together)
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from configs.paths import local_path
from configs.schema import Config
from decode.policies.batch import BatchCosts, Curve
from evaluation.costs.model import CostModel
from evaluation.flag_types import Milliseconds


class Given(NamedTuple):
    """Times of forwards that were not measured here."""

    curves: BatchCosts
    origin: str

    def put_into(self, config: Config) -> Config:
        """The experiment with these times of single tokens for its own."""
        draft_s, target_s = (float(curve(1)) for curve in self.curves)
        return replace(config, decode=replace(config.decode, t_draft_s=draft_s, t_target_s=target_s))

    def model(self, cost: CostModel, max_draft_length: int) -> CostModel:
        """The costs of one sequence, of those with these times of single tokens."""
        target_s = tuple(float(self.curves.target(1 + k)) for k in range(max_draft_length + 1))
        return replace(cost, t_target_s=target_s, origin=self.origin)


def given_times(t_draft_ms: Milliseconds | None, t_target_ms: Milliseconds | None, log: str | None) -> Given | None:
    """The times that a command line gives; None where it gives none.

    Raises:
        ValueError: one of the two numbers without the other, or beside a log; what is no time; a log without times.
        FileNotFoundError: no such log.
    """
    if log is not None and (t_draft_ms is not None or t_target_ms is not None):
        raise ValueError("--log and --t_draft_ms or --t_target_ms both say what forwards take; give one of them")
    if log is not None:
        return read_log(local_path(log, "--log"))
    if t_draft_ms is None and t_target_ms is None:
        return None
    if t_draft_ms is None or t_target_ms is None:
        raise ValueError("--t_draft_ms and --t_target_ms go together: give both, or neither to measure them")
    curves = BatchCosts(curve_of("t_draft_ms", t_draft_ms), curve_of("t_target_ms", t_target_ms))
    return Given(curves, "given")


def curve_of(name: str, given: Milliseconds) -> Curve:
    """Seconds by number of tokens, of a flag in milliseconds.

    Raises:
        ValueError: anything but positive numbers, or pairs of them.
    """
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


_EVAL = re.compile(r"(?<!prompt )eval time = +([\d.]+) ms")
_STATISTICS = re.compile(
    r"statistics +draft-simple: #calls\(b,g,a\) = *\d+[, ]+(\d+)[, ]+\d+,.*?#gen tokens = *(\d+),.*"
    r"dur\(b,g,a\) = *[\d.]+, *([\d.]+), *[\d.]+ ms"
)


def read_log(path: Path) -> Given:
    """Times from the log of a llama.cpp server that ran with a draft at `-lv 4` and p-min 0.

    With g rounds, M drafted tokens and Y ms of drafting, as its last statistics have them, and E ms of all `eval time`:
    t_draft = Y / M, and since each round's draft also reads what was verified, t_target = (E - Y) / g - t_draft.

    Raises:
        ValueError: the log has no such lines, or too little time is left for the target.
        FileNotFoundError: no such file.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    found = _STATISTICS.findall(text)
    eval_ms = sum(float(ms) for ms in _EVAL.findall(text))
    if not found or not eval_ms or not int(found[-1][1]):
        raise ValueError(
            f"{path} has no `eval time` or no `statistics draft-simple` of llama.cpp; run llama-server with -md, -lv 4 "
            "and --spec-draft-p-min 0, answer a few requests, and give its log; or give --t_draft_ms and --t_target_ms"
        )
    rounds, tokens, draft_ms = int(found[-1][0]), int(found[-1][1]), float(found[-1][2])
    step_ms = draft_ms / tokens
    verify_ms = (eval_ms - draft_ms) / rounds - step_ms
    if verify_ms <= 0:
        raise ValueError(
            f"{path} leaves {verify_ms:.3f} ms for a verification ({eval_ms} ms of {rounds} rounds, {draft_ms} ms of "
            "drafting); give --t_draft_ms and --t_target_ms"
        )
    return Given(BatchCosts(Curve.line(step_ms / 1e3), Curve.line(verify_ms / 1e3)), f"read from {path.name}")
