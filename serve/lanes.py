"""Requests of a serving engine that draft in lockstep, each with its own policy and its own draft length (laws 4.3,
4.13).

An engine drafts for its whole batch at once: a round is a number of draft steps, and in each of them every row of the
batch gets a token. A *lane* is what one request's policy knows; `Lanes` says after every step which rows go on, and the
engine may end the round once none does. What a row draws after its lane has stopped is dropped unseen, so that law 4.3
holds; requests come, go, wait and come back between rounds. The policies are those of `decode.policies`, one state per
request, and are told what `decode.loop.drafter` tells them, but for one thing: an engine reveals whether a token was
accepted, not with which probability, so that `Policy.feedback` gets 1 or 0, the right number on average and at
temperature 0 the same. Of rows with a rule for batches (`auto`) `serve.pace` decides together which go on.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from decode.policies.base import AfterDraw, Outcome, Policy, Seen, feedback_of
from decode.policies.batch import BatchRule
from serve.pace import MeasuredController


class RequestRow(NamedTuple):
    """One row of the engine's batch at the start of a round."""

    request: str
    """Id of the request."""
    policy: Policy
    """Policy of the request; the same in all of its rounds."""
    verified: Sequence[int]
    """The drafted tokens that the target has just verified; an engine may verify fewer than were drafted, or none."""
    num_accepted: int
    """Number of those that were accepted."""
    room: int
    """The most tokens to draft now; 0 where the request still reads its prompt, or has ended."""
    stop_ids: frozenset[int]
    """Tokens that end the request; nothing is drafted after one."""


class Lane:
    """One request: its policy's state, and the draft of its newest round."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.state = policy, policy.start()
        self.tokens: list[int] = []
        self.is_going = False
        self._is_open = False  # whether a round was begun that has not ended

    def begin(self, room: int, stop_ids: frozenset[int]) -> None:
        """Begin a round of at most `room` tokens."""
        self.state = self.policy.begin(self.state)
        self._room, self._stop_ids = room, stop_ids
        self._longest = int(min(self.policy.limit(self.state), room))
        self.tokens, self._seen = [], list[Seen]()
        self.is_going, self._is_open = self._longest > 0, True

    def take(self, token: int, drawn: AfterDraw) -> None:
        """One draft step's token joins the draft, unless the policy stops before it."""
        if self.policy.stop_before(self.state, drawn.before):
            self.is_going = False
            return
        self.tokens.append(token)
        self._seen.append((self.state, drawn))
        self.state, stop = self.policy.after(self.state, drawn)
        self.is_going = not (stop or token in self._stop_ids or len(self.tokens) >= self._longest)

    def end(self, verified: Sequence[int], num_accepted: int) -> bool:
        """Tell the policy how its round ended; a draft that was not verified (the request had to wait) is as if it had
        never been.

        Returns:
            Whether there was a round, and it was verified.
        """
        is_void = list(verified) != self.tokens[: len(verified)] or bool(self.tokens and not verified)
        was_verified = self._is_open and not is_void
        if was_verified:
            self.state = self.policy.end(self.state, self._outcome(len(verified), num_accepted))
        self._is_open, self.tokens = False, []
        return was_verified

    def _outcome(self, num_verified: int, num_accepted: int) -> Outcome:
        is_rejected = num_accepted < num_verified
        revealed = [1.0] * num_accepted + [0.0] * is_rejected
        return Outcome(
            num_drafted=num_verified,
            num_accepted=num_accepted,
            num_allowed=self._room,
            rejected_entropy=self._seen[num_accepted][1].entropy if is_rejected else 0.0,
            feedback=feedback_of(self.policy, self._seen, revealed),
        )


class Lanes:
    """All requests that are alive, by id, and the rows of the round that is being drafted."""

    def __init__(self, controller: MeasuredController | None = None) -> None:
        self._controller = controller or MeasuredController()
        self._alive: dict[str, Lane] = {}
        self._rows: list[Lane] = []

    def begin(self, rows: Sequence[RequestRow], alive: Container[str]) -> bool:
        """Begin a round: the rows' last ones are over, and requests that are not alive any more are forgotten.

        Args:
            rows: the rows of the engine's batch, in its order.
            alive: every request that may come back, in a row or waiting.

        Returns:
            Whether any row drafts.
        """
        self._alive = {request: lane for request, lane in self._alive.items() if request in alive}
        self._rows = [self._lane(row) for row in rows]
        ended = [row for row, lane in zip(rows, self._rows, strict=True) if lane.end(row.verified, row.num_accepted)]
        self._controller.begin(
            len(rows),
            num_ended=len(ended),
            num_tokens=sum(len(row.verified) + 1 for row in ended),
            num_emitted=sum(row.num_accepted + 1 for row in ended),
        )
        for row, lane in zip(rows, self._rows, strict=True):
            if row.room > 0:
                lane.begin(row.room, row.stop_ids)
            else:
                lane.is_going = False
        self._choose()
        return self.is_going

    def step(self, tokens: Sequence[int], signals: Sequence[AfterDraw]) -> bool:
        """A draft step of every row is done; those that have stopped ignore it.

        Returns:
            Whether any row goes on.
        """
        for lane, token, drawn in zip(self._rows, tokens, signals, strict=True):
            if lane.is_going:
                lane.take(token, drawn)
        self._controller.step()
        self._choose()
        return self.is_going

    def _choose(self) -> None:
        """Let the batch's rule choose which rows draft on, among those whose requests have it and want to."""
        undecided = [lane for lane in self._rows if lane.is_going and isinstance(lane.policy, BatchRule)]
        if not undecided:
            return
        num_others = sum(lane.is_going for lane in self._rows) - len(undecided)
        values = [lane.policy.expected_tokens(lane.state) for lane in undecided]  # type: ignore[attr-defined]
        num_tokens = sum(len(lane.tokens) + 1 for lane in self._rows) + num_others
        chosen = self._controller.chosen(np.array(values, dtype=float), num_tokens, is_paid=num_others > 0)
        for lane, goes_on in zip(undecided, chosen, strict=True):
            lane.is_going = bool(goes_on)

    @property
    def is_going(self) -> bool:
        """Whether any row drafts on."""
        return any(lane.is_going for lane in self._rows)

    @property
    def policies(self) -> list[Policy]:
        """Policy of each row."""
        return [lane.policy for lane in self._rows]

    @property
    def drafts(self) -> list[list[int]]:
        """The tokens of each row that the target is to verify."""
        return [list(lane.tokens) for lane in self._rows]

    def __len__(self) -> int:
        """The number of requests that are remembered."""
        return len(self._alive)

    def _lane(self, row: RequestRow) -> Lane:
        lane = self._alive.get(row.request)
        if lane is None or lane.policy != row.policy:  # another request took the id
            lane = self._alive[row.request] = Lane(row.policy)
        return lane
