"""t_draft and t_target(k) of this machine, measured inside the real loop.

Generations with drafts of several fixed lengths take turns; each round reports the seconds of its draft and of its
verification. A line through the first quartiles at each k is fitted to either, so that one noisy k cannot bend it:

    draft of k forwards        begin + t_draft k
    verification of k tokens   start + slope k

What a draft takes whatever its length is paid once a round, so t_target(k) = start + begin + slope k for k > 0. A block
of which k tokens are drawn takes begin + each k: t_draft = begin + each, and each (k - 1) is part of t_target(k).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float

from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.loop.decoder import Generation, SpeculativeDecoder
from decode.policies import FixedLength, Policy
from evaluation.times import TimeErrors, Times
from evaluation.traces.trace import Array
from evaluation.turns import in_turns, turns_within
from lm import Pair, Sampling

TIMED_LENGTHS = (0, 1, 2, 4, 7, 11, 16, 20)
TOKENS = 24
"""Tokens of a generation that is timed."""
BUDGET_S = 9.0
"""Seconds that generations are timed for; longer where `FEWEST_TURNS` take longer."""
FEWEST_TURNS = 3
"""Generations of each length at the least."""
_RESAMPLES = 100

AnyLoop = TypeVar("AnyLoop", bound="Loop")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop that is timed, and on what: models, sampling, prompts."""

    pair: Pair
    sampling: Sampling
    max_draft_length: int
    prompts: Sequence[list[int]] = ()
    max_new_tokens: int = 0
    ends_at_eos: bool = False
    """Generations end at the target's EOS; else at no token."""

    @classmethod
    def of(cls: type[AnyLoop], experiment: Experiment, **changes: Any) -> AnyLoop:
        """The loop that a config describes, but for these changes."""
        settings: dict[str, Any] = {
            "sampling": experiment.sampling,
            "max_draft_length": experiment.decode.max_draft_length,
        }
        return cls(pair=experiment.pair, **settings | changes)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return self.pair.eos_ids if self.ends_at_eos else frozenset()

    def decoder(self, policy: Policy) -> SpeculativeDecoder:
        """The loop with that policy; all decoders share their models."""
        settings: dict[str, Any] = {"sampling": self.sampling, "eos_ids": self.eos_ids}
        return self.models.decoder(self.models.drafter(policy), max_draft_length=self.max_draft_length, **settings)

    @cached_property
    def models(self) -> PairModels:
        """Target and draft, shared by all decoders."""
        return PairModels(self.pair)


def time_generations(loop: Loop) -> list[Generation]:
    """Real generations with the fixed draft lengths up to the longest draft, in turns, after a warm-up."""
    lengths = {min(k, loop.max_draft_length) for k in TIMED_LENGTHS}
    decoders = [loop.decoder(FixedLength(k)) for k in sorted(lengths)]
    num_tokens, generator = min(TOKENS, loop.max_new_tokens), torch.Generator().manual_seed(0)
    decoders[-1].generate(loop.prompts[0], num_tokens, generator=generator)
    turns = turns_within(BUDGET_S, FEWEST_TURNS, desc="costs: t_draft and t_target", unit="turns")
    return [
        decoder.generate(prompt, num_tokens, generator=generator)
        for prompt, order in in_turns(decoders, (loop.prompts[turn % len(loop.prompts)] for turn in turns))
        for decoder in order
    ]


def costs_of(generations: Sequence[Generation], max_draft_length: int) -> Times:
    """Times from rounds of real generations with drafts of several lengths, 0 among them; the first round of each,
    which reads the prompt, is left out, and ValueError if there is no other. `max_draft_length` is the last k of
    t_target(k). Errors: bootstrap of the generations of each length, since the machine's speed changes from one to the
    next.
    """
    of_length: dict[int, list[Array]] = {}
    for generation in generations:
        rows = [
            (round_.counts.num_draft_forwards, len(round_.drafted), round_.draft_s, round_.target_s)
            for round_ in generation.rounds[1:]
        ]
        longest = max(len(round_.drafted) for round_ in generation.rounds)
        of_length.setdefault(longest, []).append(np.array(rows, dtype=np.float64).reshape(-1, 4))
    groups, generator = list(of_length.values()), np.random.default_rng(0)
    drawn = (
        [members[index] for members in groups for index in generator.integers(len(members), size=len(members))]
        for _ in range(_RESAMPLES)
    )
    measured, *resampled = (_times_of(sample, max_draft_length) for sample in (list(chain(*groups)), *drawn))
    draft_s, target_s = (np.array(times) for times in zip(*resampled, strict=True))
    errors = TimeErrors(float(draft_s.std() / draft_s.mean()), float((target_s / target_s.mean(0)).mean(1).std()))
    return Times(*measured, "measured", errors=errors)


def _times_of(generations: Sequence[Float[Array, "_ 4"]], max_draft_length: int) -> tuple[float, tuple[float, ...]]:
    """(t_draft, t_target(k) for k = 0, 1, …), from rows of (forwards, tokens, seconds of draft and of verification)."""
    forwards, drafted, draft_s, target_s = np.concatenate(generations).T
    is_drafting = forwards > 0
    if not is_drafting.any() or is_drafting.all():
        raise ValueError(
            "costs need generations of several rounds, some without drafts; give longer max_new_tokens, or decode.t_*_s"
        )
    alone_s = typical(target_s[~is_drafting]) + typical(draft_s[~is_drafting])
    forwards, drafted, draft_s, target_s = (column[is_drafting] for column in (forwards, drafted, draft_s, target_s))
    has_blocks, each_s = bool((drafted > forwards).any()), 0.0
    begin_s, t_draft_s = _line(drafted if has_blocks else forwards, draft_s)
    if has_blocks:
        begin_s, t_draft_s, each_s = 0.0, begin_s + t_draft_s, t_draft_s
    elif begin_s <= 0 or t_draft_s <= 0:  # one length only, or noise
        begin_s, t_draft_s = 0.0, typical(draft_s / forwards)
    start_s, slope_s = _line(drafted, target_s)
    lengths = np.arange(1, max_draft_length + 1)
    longer_s = start_s + slope_s * lengths + begin_s + each_s * (lengths - 1)
    # verifying drafted tokens never costs less than verifying none
    return t_draft_s, (alone_s, *np.maximum(alone_s, longer_s).tolist())


def _line(lengths: Float[Array, " round"], seconds: Float[Array, " round"]) -> tuple[float, float]:
    """(a, b) of a + b k through the typical seconds at each k, weighted by its number of rounds; b is never below 0."""
    distinct, counts = np.unique(lengths, return_counts=True)
    if len(distinct) > 1:
        typicals = [typical(seconds[lengths == length]) for length in distinct]
        slope, offset = np.polyfit(distinct, typicals, 1, w=np.sqrt(counts))
        if slope > 0:
            return float(offset), float(slope)
    return typical(seconds), 0.0  # one length only, or noise


def typical(values: Sequence[float] | Float[Array, " value"]) -> float:
    """The first quartile: other work on the machine lengthens a time, and nothing shortens it."""
    return float(np.quantile(values, 0.25))
