"""One policy through one generation: its decision at each token and its memory between rounds (law 4.3)."""

from collections.abc import Iterable
from copy import copy
from functools import partial, reduce
from math import inf
from operator import add

from decode.policies.base import AfterDraw, Outcome, Policy, State, mapped


class PolicyRun:
    """A policy's state. A round is `begin`, then `take` for each token, then `end`."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.state = policy, policy.start()
        self.takes_feedback = bool(policy.zero_feedback)
        self._may_stop_before = policy.stops_before
        self.steps: list[tuple[State, AfterDraw]] = []
        """Arguments of `Policy.after` for each kept token of the round."""
        self.is_going = False
        """Whether the policy wants another token in this round."""

    def begin(self, num_allowed: int, room: float = inf) -> int:
        """Begin a round; returns its maximum draft length.

        Args:
            num_allowed: the maximum that the loop sets, which the policy learns in `Outcome`.
            room: the maximum that the draft's context sets.
        """
        self.state = self._first_state = self.policy.begin(self.state)
        self._num_allowed = num_allowed
        self.num_tokens = int(min(self.policy.limit(self.state), num_allowed, room))
        self.steps, self.stop_reason, self.is_going = [], "limit", self.num_tokens > 0
        return self.num_tokens

    def take(self, drawn: AfterDraw, *, is_eos: bool = False) -> bool:
        """Show the policy a drawn token: returns whether it is kept, and sets `is_going` and `stop_reason`."""
        if self.stops_before(drawn):
            self.stop("policy")
            return False
        stops = self.keep(drawn)
        if is_eos or stops:
            self.stop("eos" if is_eos else "policy")
        elif len(self.steps) >= self.num_tokens:
            self.is_going = False
        return True

    def stop(self, reason: str) -> None:
        """End the draft of this round."""
        self.stop_reason, self.is_going = reason, False

    def stops_before(self, drawn: AfterDraw) -> bool:
        """Whether the policy ends the draft before this token, which it is not shown."""
        return self._may_stop_before and bool(self.policy.stop_before(self.state, drawn.before))

    def keep(self, drawn: AfterDraw) -> bool:
        """Add a token to the draft; returns whether the policy stops after it."""
        self.steps.append((self.state, drawn))
        self.state, stops = self.policy.after(self.state, drawn)
        return bool(stops)

    def branched(self, *, is_longer: bool) -> "PolicyRun":
        """A copy for another path of a tree, which extends this path (`is_longer`) or starts the round over."""
        run = copy(self)
        run.steps, run.state = ([*self.steps], self.state) if is_longer else ([], self._first_state)
        return run

    def end(
        self,
        num_drafted: int,
        num_accepted: int,
        acceptance_probs: Iterable[float] = (),
        *,
        rejected_entropy: float | None = None,
    ) -> None:
        """Report the round's verification to the policy.

        Args:
            num_drafted: verified tokens.
            num_accepted: those that were accepted.
            acceptance_probs: of the first tokens, as far as they are known.
            rejected_entropy: H(q) at the first rejected token; None: the entropy that the policy saw there.
        """
        if rejected_entropy is None:
            rejected_entropy = self.steps[num_accepted][1].entropy if num_accepted < num_drafted else 0.0
        verified = zip(self.steps, acceptance_probs, strict=False)
        feedback = (self.policy.feedback(*step, prob) for step, prob in verified)
        total = reduce(partial(mapped, add), feedback, self.policy.zero_feedback)
        outcome = Outcome(num_drafted, num_accepted, self._num_allowed, rejected_entropy, total)
        self.state = self.policy.end(self.state, outcome)
