"""What a generation cost (law 4.4) as drafter, models and cache saw it, beside what the loop says that it cost."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from decode import Generation, Proposal, SpeculativeDecoder
from lm import CachedModel


@dataclass
class Observed:
    """Counts of one generation, none of them the loop's."""

    feeds_again: bool  # the target has recurrent layers, which roll back further than requested
    num_proposed: int = 0  # tokens that the drafter handed over
    num_target: int = 0  # calls of the target
    num_fed: int = 0  # tokens fed to the target
    num_given_back: int = 0  # positions that the target's cache gave back
    num_draft_forwards: int = 0

    def check(self, generation: Generation, num_prompt_tokens: int) -> None:
        """The loop counted right, and law 4.4 holds of what was seen."""
        counts, num_emitted = generation.counts, len(generation.token_ids)
        assert counts.num_emitted == num_emitted
        assert counts.num_drafted == self.num_proposed == sum(len(played.drafted) for played in generation.rounds)
        assert counts.num_target == self.num_target == len(generation.rounds)
        assert counts.num_discarded == self.num_given_back
        # a residual token is never the rejected one, so that the two texts part exactly where verification stopped
        rounds = [zip(played.drafted, played.emitted, strict=False) for played in generation.rounds]
        assert counts.num_accepted == sum(np.cumprod([one == other for one, other in pairs]).sum() for pairs in rounds)
        assert self.num_proposed + self.num_target == num_emitted + self.num_given_back
        if num_emitted and not self.feeds_again:
            assert self.num_fed == num_prompt_tokens + self.num_proposed + self.num_target - 1


@contextmanager
def observed(decoder: SpeculativeDecoder, draft: CachedModel | None = None) -> Iterator[Observed]:
    """Count what happens in `decoder`, and the forwards of `draft`, while this is open."""
    target = decoder.target
    seen = Observed(feeds_again=getattr(target, "_snapshots", None) is not None)

    def propose(original: Callable[..., Proposal], *arguments: Any) -> Proposal:
        proposal = original(*arguments)
        seen.num_proposed += len(proposal.tokens)
        return proposal

    def feed(original: Callable[..., Any], new_tokens: Sequence[int], num_rows: int = 1) -> Any:
        seen.num_target += 1
        seen.num_fed += len(new_tokens)
        return original(new_tokens, num_rows)

    def roll_back(original: Callable[..., None], length: int) -> None:
        seen.num_given_back += max(0, len(target) - length)
        original(length)

    def reset(original: Callable[..., None], num_tokens: int) -> None:
        before = seen.num_given_back
        original(num_tokens)
        seen.num_given_back = before  # a sequence that is forgotten is nothing that this generation discards

    def draft_forward(original: Callable[..., Any], *arguments: Any) -> Any:
        before = seen.num_draft_forwards
        result = original(*arguments)
        seen.num_draft_forwards = before + 1  # a toy feeds a drawn token by its other method: one forward all the same
        return result

    watched = [(decoder.drafter, "propose", propose), (target, "feed", feed), (target, "roll_back", roll_back)]
    watched.append((target, "reset", reset))
    if draft is not None:
        watched += [(draft, "feed", draft_forward), (draft, "feed_drawn", draft_forward)]
    with pytest.MonkeyPatch.context() as patch:  # puts back what a test had replaced
        for owner, name, watch in watched:
            patch.setattr(owner, name, partial(watch, getattr(owner, name)))
        yield seen
