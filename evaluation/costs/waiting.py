"""How long the timing of a machine takes, said before it begins: what is timed, about how long, and how to skip it.

Timing has a budget of seconds (`evaluation.costs.budget`), which models whose fewest turns take longer exceed; the
seconds of a few generations tell which it is.
"""

from collections.abc import Mapping
from statistics import fmean
from time import perf_counter
from typing import NamedTuple

import torch

from data_gen.pipeline.plan import duration
from decode.policies import FixedLength, Policy
from evaluation.costs import measure, stops
from evaluation.costs.budget import num_turns
from evaluation.costs.measure import TOKENS, Loop

SKIP = "--decode.t_draft_s SECONDS --decode.t_target_s SECONDS --decode.stop_share size"


class Timing(NamedTuple):
    """The timing that is to come."""

    policies: Mapping[str, Policy]
    """One policy for each kind of stop that is asked for, by its kind."""
    has_forwards: bool = True
    """Whether t_draft and t_target are timed too; False where they are known."""

    @property
    def what(self) -> str:
        """The words of it: "t_draft, t_target and 8 kinds of stop"."""
        parts = ["t_draft, t_target"] if self.has_forwards else []
        if self.policies:
            num_timed = len(stops.timed_kinds(self.policies))
            parts.append(f"{num_timed} kind{'s'[: num_timed != 1]} of stop")
            if others := len(self.policies) - num_timed:
                parts[-1] += f" ({others} more lie between them)"
        return " and ".join(parts)

    @property
    def budget_s(self) -> float:
        """Seconds of models whose turns are short."""
        return self.has_forwards * measure.BUDGET_S + bool(self.policies) * stops.BUDGET_S

    def expected_s(self, loop: Loop) -> float:
        """Seconds that the timing will take, about: from generations that are timed here, one without drafts, the
        slowest, and one with the drafts that stops are timed on, each after a warm-up.
        """
        num_tokens, seconds, num_rounds = min(TOKENS, loop.max_new_tokens), [], 1
        length = stops.drafted_length(loop)
        for drafted in (0, length):
            decoder = loop.decoder(FixedLength(drafted))
            for _ in range(2):
                started_s = perf_counter()
                played = decoder.generate(loop.prompts[0], num_tokens, generator=torch.Generator().manual_seed(0))
            seconds.append(perf_counter() - started_s)
            num_rounds = len(played.rounds)
        parts_s = []
        if self.has_forwards:
            turn_s = fmean(seconds) * len(measure.lengths_within(loop.max_draft_length, measure.TIMED_LENGTHS))
            num = num_turns(turn_s, measure.BUDGET_S, measure.FEWEST_TURNS)
            parts_s.append((num + 1 / len(measure.TIMED_LENGTHS)) * turn_s)
        if self.policies:
            cycle_s = seconds[-1] / num_rounds * (len(stops.timed_kinds(self.policies)) + stops.NUM_FIXED)
            parts_s.append((num_turns(cycle_s, stops.BUDGET_S, stops.FEWEST_CYCLES) + 1) * cycle_s)
        return sum(parts_s)

    def warning(self, loop: Loop, *, kept_in: str) -> str:
        """The three lines that a user reads before the timing of a loop begins, which is then kept in this file."""
        compiled = "; each kind is compiled before it, which takes as long as it takes" if loop.compile is True else ""
        return (
            f"costs: timing this machine, about {duration(self.expected_s(loop))}: {self.what}{compiled}\n"
            f"costs: done once, kept in {kept_in}; other work on the machine meanwhile bends the times\n"
            f"costs: to skip it, give the times: {SKIP}"
        )
