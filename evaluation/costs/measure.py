"""t_draft and t_target(k) of this machine, measured inside the real loop.

Generations with drafts of several fixed lengths take turns; each round reports the seconds of its draft and of its
verification. t_draft is the slope of the first over the draft's forwards; what a draft takes whatever its length is
paid once a round, in t_target(k): a line through those at each k, so that one noisy k cannot bend it, or steps where
widths are compiled. `fit_costs` gets both times from totals of whole generations by regression, with its R² (the
paper's Table 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.loop.decoder import Generation, Round, SpeculativeDecoder
from decode.policies import FixedLength, Policy
from evaluation.times import TimeErrors, Times
from evaluation.traces.trace import Array
from evaluation.turns import in_turns, turns_within
from lm import Compile, Pair, Sampling

TIMED_LENGTHS = (0, 1, 2, 4, 7, 11, 16, 20)
TOKENS = 24
"""Tokens of a generation that is timed."""
BUDGET_S = 9.0
"""Seconds that generations are timed for; longer where `FEWEST_TURNS` take longer."""
FEWEST_TURNS = 3
"""Generations of each length at the least."""
_RESAMPLES = 100


AnyLoop = TypeVar("AnyLoop", bound="Loop")


class Fit(NamedTuple):
    """T = t_draft * num_draft_forwards + t_target * N_target over generations."""

    t_draft_s: float
    t_target_s: float
    r2: float
    num_generations: int


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop that is timed, and on what: models, sampling, prompts."""

    pair: Pair
    sampling: Sampling
    max_draft_length: int
    prompts: Sequence[list[int]] = ()
    max_new_tokens: int = 0
    compile: Compile = False
    ends_at_eos: bool = False
    """Generations end at the target's EOS; else at no token."""

    @classmethod
    def of(cls: type[AnyLoop], experiment: Experiment, *, pair: Pair | None = None, **changes: Any) -> AnyLoop:
        """The loop that a config describes, but for these changes."""
        settings: dict[str, Any] = {
            "pair": experiment.pair if pair is None else pair,
            "sampling": experiment.sampling,
            "max_draft_length": experiment.decode.max_draft_length,
            "compile": experiment.decode.compile,
        }
        return cls(**settings | changes)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return self.pair.eos_ids if self.ends_at_eos else frozenset()

    def decoder(self, policy: Policy, *, max_draft_length: int | None = None) -> SpeculativeDecoder:
        """The loop with that policy; all decoders share their models."""
        return self.models.decoder(
            self.models.drafter(policy),
            sampling=self.sampling,
            max_draft_length=self.max_draft_length if max_draft_length is None else max_draft_length,
            eos_ids=self.eos_ids,
        )

    @cached_property
    def models(self) -> PairModels:
        """Target and draft, shared by all decoders."""
        return PairModels(self.pair, self.compile)


def time_generations(loop: Loop, *, lengths: Sequence[int] = TIMED_LENGTHS) -> list[Generation]:
    """Real generations with several fixed draft lengths, in turns; the first, a warm-up, is left out.

    Args:
        loop: what is timed, on its prompts.
        lengths: the draft lengths; those beyond the longest draft count as that.
    """
    decoders = [loop.decoder(FixedLength(length)) for length in lengths_within(loop.max_draft_length, lengths)]
    num_tokens, generator = min(TOKENS, loop.max_new_tokens), torch.Generator().manual_seed(0)
    decoders[-1].generate(loop.prompts[0], num_tokens, generator=generator)
    turns = turns_within(BUDGET_S, FEWEST_TURNS, desc="costs: t_draft and t_target", unit="turns")
    return [
        decoder.generate(prompt, num_tokens, generator=generator)
        for prompt, order in in_turns(decoders, (loop.prompts[turn % len(loop.prompts)] for turn in turns))
        for decoder in order
    ]


def lengths_within(max_draft_length: int, lengths: Sequence[int]) -> list[int]:
    """The lengths in order, those beyond the longest draft as that: within 4, 0 1 2 4 7 become 0 1 2 4."""
    return sorted({min(length, max_draft_length) for length in lengths})


def costs_of(generations: Sequence[Generation], max_draft_length: int) -> Times:
    """Costs from rounds; the first of each generation, which reads the prompt, is left out.

    A draft of k forwards takes begin + t_draft * k. What it takes whatever its length is paid once a round, and so is
    part of t_target(k). A block of which k tokens are drawn takes t_draft + each * (k - 1), and what each takes is part
    of t_target(k) too.

    Args:
        generations: real ones with drafts of several lengths, 0 among them.
        max_draft_length: the last k of t_target(k).

    Raises:
        ValueError: generations of one round only.
    """
    t_draft_s, t_target_s = _times_of(generations, max_draft_length)
    return Times(t_draft_s, t_target_s, "measured", errors=_errors(generations, max_draft_length))


def _times_of(generations: Sequence[Generation], max_draft_length: int) -> tuple[float, tuple[float, ...]]:
    """(t_draft, t_target(k) for k = 0 … max_draft_length), with the arguments of `costs_of`."""
    rounds = [round_ for generation in generations for round_ in generation.rounds[1:]]
    drafting = [round_ for round_ in rounds if round_.counts.num_draft_forwards]
    drafts: dict[int, list[float]] = {}
    by_length: dict[int, list[float]] = {}
    has_blocks = any(len(round_.drafted) > round_.counts.num_draft_forwards for round_ in drafting)
    for round_ in rounds:
        drawn = len(round_.drafted) if has_blocks else round_.counts.num_draft_forwards
        drafts.setdefault(drawn, []).append(round_.draft_s)
        by_length.setdefault(len(round_.drafted), []).append(round_.target_s)
    if not drafting or 0 not in by_length:
        raise ValueError(
            "costs need generations of several rounds, some without drafts; give longer max_new_tokens, or decode.t_*_s"
        )
    t_draft_s = typical([round_.draft_s / round_.counts.num_draft_forwards for round_ in drafting])
    begin_s, step_s, each_s = *_line(drafts), 0.0
    if has_blocks:
        t_draft_s, each_s = _of_blocks(drafts)
        begin_s = 0.0
    elif begin_s > 0 and step_s > 0:
        t_draft_s = step_s
    else:  # one length only, or noise
        begin_s = 0.0
    alone_s = typical(by_length[0]) + typical(drafts[0])
    longer = {length: seconds for length, seconds in by_length.items() if length}
    longer_s = _straight(longer, max_draft_length)
    # verifying drafted tokens never costs less than verifying none
    longer_s = longer_s + begin_s + each_s * np.arange(max_draft_length)
    return t_draft_s, (alone_s, *np.maximum(alone_s, longer_s).tolist())


def _of_blocks(drafts: dict[int, list[float]]) -> tuple[float, float]:
    """(seconds of a block and its first token, of each further token): from the shortest drafts and the longest, since
    a line's offset would be mostly noise.
    """
    lengths = sorted(length for length in drafts if length)
    first_s, last_s = (typical(drafts[lengths[index]]) for index in (0, -1))
    num_further = lengths[-1] - lengths[0]
    each_s = max(0.0, last_s - first_s) / num_further if num_further else 0.0
    return first_s, each_s


def _typical(by_length: dict[int, list[float]]) -> tuple[Array, Array, Array]:
    """(lengths, typical seconds at each, how often each was seen)."""
    lengths = sorted(by_length)
    return (
        np.array(lengths),
        np.array([typical(by_length[k]) for k in lengths]),
        np.array([len(by_length[k]) for k in lengths]),
    )


def _line(by_length: dict[int, list[float]]) -> tuple[float, float]:
    """(a, b) of a + b k through the typical seconds at each k > 0, weighted by how often it was seen; (0, 0) for fewer
    than two lengths.
    """
    lengths, typicals, seen = _typical({length: seconds for length, seconds in by_length.items() if length})
    if len(lengths) < 2:
        return 0.0, 0.0
    slope, offset = np.polyfit(lengths, typicals, 1, w=np.sqrt(seen))
    return float(offset), float(slope)


def _straight(by_length: dict[int, list[float]], longest: int) -> Array:
    offset, slope = _line(by_length)
    if slope <= 0:  # noise, or one length only
        offset, slope = typical([value for values in by_length.values() for value in values]), 0.0
    return offset + slope * np.arange(1, longest + 1)


def _errors(generations: Sequence[Generation], max_draft_length: int) -> TimeErrors:
    """Relative standard errors of t_draft and of t_target(k), its mean over k: by bootstrap of the generations of each
    draft length, since the machine's speed changes from one generation to the next.
    """
    of_length: dict[int, list[Generation]] = {}
    for generation in generations:
        longest = max(len(round_.drafted) for round_ in generation.rounds)
        of_length.setdefault(longest, []).append(generation)
    generator, resampled = np.random.default_rng(0), []
    for _ in range(_RESAMPLES):
        drawn = [
            members[index]
            for members in of_length.values()
            for index in generator.integers(len(members), size=len(members))
        ]
        resampled.append(_times_of(drawn, max_draft_length))
    draft_s, target_s = (np.array(times) for times in zip(*resampled, strict=True))
    return TimeErrors(float(draft_s.std() / draft_s.mean()), float((target_s / target_s.mean(0)).mean(1).std()))


def typical(values: Sequence[float]) -> float:
    """The first quartile: other work on the machine lengthens a time, and nothing shortens it."""
    return float(np.quantile(values, 0.25))


def fit_costs(generations: Sequence[Generation]) -> Fit:
    """Least squares over generations of seconds on (num_draft_forwards, N_target), no intercept; the rounds that read
    prompts left out.

    Raises:
        ValueError: fewer than three generations with a second round.
    """
    totals = np.array([_totals(generation.rounds[1:]) for generation in generations if len(generation.rounds) > 1])
    if len(totals) < 3:
        raise ValueError(
            f"a regression of two times needs at least 3 generations of several rounds, there are {len(totals)}"
        )
    counts, seconds = totals[:, :2], totals[:, 2]
    times, *_ = np.linalg.lstsq(counts, seconds, rcond=None)
    residual = seconds - counts @ times
    r2 = 1 - float(residual @ residual) / float(((seconds - seconds.mean()) ** 2).sum())
    return Fit(float(times[0]), float(times[1]), r2, len(totals))


def _totals(rounds: Sequence[Round]) -> tuple[float, float, float]:
    return (
        float(sum(round_.counts.num_draft_forwards for round_ in rounds)),
        float(len(rounds)),
        sum(round_.draft_s + round_.target_s for round_ in rounds),
    )
