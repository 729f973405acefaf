"""t_draft and t_target(k) of this machine, measured inside the real loop.

A turn is one round of each draft length, in a random order, in real generations; so long drafts are timed as often as
short ones. Each round reports the seconds of its draft and of its verification. The machine's pace changes from turn to
turn, so a round is compared with its own turn:

    pace                     median over a turn's rounds of seconds / (median seconds of that length)
    draft of k forwards      begin + t_draft k: a line through the medians of (seconds / pace)
    verification of k        medians of (seconds / pace), made monotone; linear between two lengths that were timed

Medians, and not a lower quantile, because a generation pays for its slow rounds too: on the embedded pair the clocked
target alone takes 3.9 to 4.0 ms per token; the median round is 4.0 ms, the first quartile 3.7.

What a draft takes whatever its length is paid once a round, so t_target(k) includes begin for k > 0. A block of which k
tokens are drawn takes begin + each k: t_draft = begin + each, and each (k - 1) is part of t_target(k).

The error of a time is that of resampled turns (`evaluation.regression.resampled_errors`).
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int

from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from decode.policies.batch import Curve
from evaluation.regression import resampled_errors, rising
from evaluation.times import MEASURED, TimeErrors, Times
from evaluation.traces.trace import Array
from evaluation.turns import turns_within
from lm import Sampling

if TYPE_CHECKING:  # given times need no loop, which takes seconds to import
    from decode.drafters.factory import PairModels
    from decode.loop.decoder import SpeculativeDecoder
    from decode.loop.rounds import Round
    from lm import Pair

BUDGET_S = 13.0
"""Seconds that rounds are timed for; longer where `FEWEST_TURNS` take longer."""
FEWEST_TURNS = 10
_EACH_UP_TO = 20
"""Every length up to this one is timed."""
_GROWTH = 1.25
"""Of longer ones, each is this many times the one before."""
_MOST_FRUITLESS = 20
"""Generations without a round that can be timed, before timing stops."""
_RESAMPLES = 100
_NEEDED = "costs need rounds with and without drafts after the first; raise decode.max_new_tokens, or give decode.t_*_s"


AnyLoop = TypeVar("AnyLoop", bound="Loop")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop that is timed, and on what: models, sampling, prompts."""

    pair: "Pair"
    sampling: Sampling
    max_draft_length: int
    prompts: Sequence[list[int]] = ()
    max_new_tokens: int = 0
    ends_at_eos: bool = False
    """Generations end at the target's EOS; else at no token."""

    @classmethod
    def of(cls: type[AnyLoop], experiment: Experiment, **changes: Any) -> AnyLoop:
        """The loop that a config describes, but for these changes."""
        longest = experiment.decode.max_draft_length
        return replace(cls(pair=experiment.pair, sampling=experiment.sampling, max_draft_length=longest), **changes)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return self.pair.eos_ids if self.ends_at_eos else frozenset()

    def decoder(self, policy: Policy) -> "SpeculativeDecoder":
        """The loop with that policy; all decoders share their models."""
        return self.models.decoder(
            self.models.drafter(policy),
            sampling=self.sampling,
            eos_ids=self.eos_ids,
            max_draft_length=self.max_draft_length,
        )

    @cached_property
    def models(self) -> "PairModels":
        """Target and draft, shared by all decoders."""
        from decode.drafters.factory import PairModels

        return PairModels(self.pair)


def timed_lengths(longest: int) -> list[int]:
    """The draft lengths that are timed: 0, 1, …, and few of the very long ones."""
    lengths = list(range(min(longest, _EACH_UP_TO) + 1))
    while lengths[-1] < longest:
        lengths.append(min(longest, int(_GROWTH * lengths[-1])))
    return lengths


def time_rounds(loop: Loop) -> "list[list[Round]]":
    """Turns of rounds, each with one round of every timed length, after a warm-up; near the end of a generation fewer
    tokens than that may be left to draft. ValueError for a loop whose generations have too few tokens.
    """
    longest = min(loop.max_draft_length, loop.max_new_tokens - 1)
    if longest < 1:
        raise ValueError(_NEEDED)
    lengths = timed_lengths(longest)
    with closing(_rounds(loop, lengths)) as rounds:
        list(islice(rounds, len(lengths)))  # a warm-up
        turns = turns_within(BUDGET_S, FEWEST_TURNS, desc="costs: t_draft and t_target", unit="turns")
        return [list(islice(rounds, len(lengths))) for _ in turns]


def _rounds(loop: Loop, lengths: Sequence[int]) -> "Generator[Round, None, None]":
    """Endless rounds with these draft lengths, each once in every turn; rounds that read a prompt are left out."""
    decoder = loop.decoder(FixedLength(lengths[-1]))
    order = np.random.default_rng(0)
    scheduled = (int(length) for _ in cycle([None]) for length in order.permutation(lengths))
    generator = torch.Generator().manual_seed(0)
    num_fruitless = 0
    for prompt in cycle(loop.prompts):
        decoder.max_draft_length = 1
        has_drafted = False
        num_fruitless += 1
        for round_ in decoder.stream(prompt, loop.max_new_tokens, generator=generator):
            if has_drafted:
                num_fruitless = 0
                yield round_
            # the draft reads the prompt in its first round, which for a feature draft is not the target's first
            has_drafted = has_drafted or round_.counts.num_draft_forwards > 0
            if has_drafted:
                decoder.max_draft_length = next(scheduled)
        if num_fruitless > _MOST_FRUITLESS:
            raise ValueError(_NEEDED)


def costs_of(turns: "Sequence[Sequence[Round]]", max_draft_length: int) -> Times:
    """Times with their errors, from turns of rounds with drafts of several lengths, 0 among them; ValueError where
    drafts of either kind are missing. `max_draft_length` is the last k of t_target(k).
    """
    rows = _at_one_pace([_rows_of(turn) for turn in turns])

    def fit(sample: Int[Array, " turn"]) -> Float[Array, " time"]:
        return _times_of([rows[turn] for turn in sample], max_draft_length)

    measured_s = fit(np.arange(len(rows)))
    draft_error, *target_errors = (resampled_errors(fit, len(rows), _RESAMPLES) / measured_s).tolist()
    t_draft_s, *t_target_s = measured_s.tolist()
    target = Curve(tuple(range(1, len(t_target_s) + 1)), tuple(t_target_s))
    return Times(Curve.line(t_draft_s), target, MEASURED, errors=TimeErrors(draft_error, tuple(target_errors)))


def _rows_of(turn: "Sequence[Round]") -> Float[Array, "round 4"]:
    """Draft forwards, drafted tokens, seconds of the draft and of the verification."""
    rows = [(round_.counts.num_draft_forwards, len(round_.drafted), round_.draft_s, round_.target_s) for round_ in turn]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def _at_one_pace(turns: Sequence[Float[Array, "_ 4"]]) -> list[Float[Array, "_ 4"]]:
    """The rows of every turn, with seconds over the turn's pace."""
    every = np.concatenate(turns)
    totals_s = every[:, 2] + every[:, 3]
    typical_s = {length: np.median(totals_s[every[:, 1] == length]) for length in np.unique(every[:, 1])}
    paced = []
    for rows in turns:
        usual_s = [typical_s[length] for length in rows[:, 1]]
        pace = np.median((rows[:, 2] + rows[:, 3]) / usual_s) if len(rows) else 1.0
        paced.append(rows / [1.0, 1.0, pace, pace])
    return paced


def _times_of(turns: Sequence[Float[Array, "_ 4"]], max_draft_length: int) -> Float[Array, " time"]:
    """[t_draft, t_target(0), t_target(1), …], from rows as `_rows_of` has them."""
    forwards, drafted, draft_s, target_s = np.concatenate(turns).T
    is_drafting = forwards > 0
    if not is_drafting.any() or is_drafting.all():
        raise ValueError(_NEEDED)
    alone_s = float(np.median((target_s + draft_s)[~is_drafting]))
    forwards, drafted, draft_s, target_s = (column[is_drafting] for column in (forwards, drafted, draft_s, target_s))
    has_blocks = bool((drafted > forwards).any())
    each_s = 0.0
    begin_s, t_draft_s = _line(drafted if has_blocks else forwards, draft_s)
    if has_blocks:
        begin_s, t_draft_s, each_s = 0.0, begin_s + t_draft_s, t_draft_s
    elif begin_s <= 0 or t_draft_s <= 0:  # one length only, or noise
        begin_s = 0.0
        t_draft_s = float(np.median(draft_s / forwards))
    verified = rising({int(length): target_s[drafted == length].tolist() for length in np.unique(drafted)})
    lengths = np.arange(1, max_draft_length + 1)
    longer_s = verified(lengths) + begin_s + each_s * (lengths - 1)
    # verifying drafted tokens never costs less than verifying none
    return np.array([t_draft_s, alone_s, *np.maximum(alone_s, longer_s)])


def _line(lengths: Float[Array, " round"], seconds: Float[Array, " round"]) -> tuple[float, float]:
    """(a, b) of a + b k through the median seconds at each k, weighted by its number of rounds; b is never below 0."""
    distinct, counts = np.unique(lengths, return_counts=True)
    if len(distinct) > 1:
        medians = [np.median(seconds[lengths == length]) for length in distinct]
        slope, offset = np.polyfit(distinct, medians, 1, w=np.sqrt(counts))
        if slope > 0:
            return float(offset), float(slope)
    return float(np.median(seconds)), 0.0  # one length only, or noise
