"""Requests of a serving engine that draft in lockstep, each with its own policy and its own draft length (laws
4.3, 4.13).

An engine drafts for its whole batch at once: in each draft step of a round, every row gets a token. A *lane* has
the policy state of one request. After each step `Lanes` decides which rows continue; the engine ends the round
once none does. Tokens that a row draws after its lane has stopped are discarded without being read (law 4.3).
Between rounds, requests can join, leave, wait and return.

Policies get the same inputs as from `decode.loop.drafter`, with one exception: an engine reveals whether a token
was accepted, not its acceptance probability, so feedback is 1 or 0, which is right on average and exact at
temperature 0. Rows whose policy has a batch rule (`auto`) are decided together by `serve.controller`.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple

from decode.policies.base import AfterDraw, Policy, PolicyRun
from decode.policies.batch import BatchAuto
from serve.controller import MeasuredController


class RequestRow(NamedTuple):
    """One row of the engine's batch at the start of a round."""

    request: str
    """Id of the request."""
    policy: Policy
    """The same in all rounds of the request."""
    verified: Sequence[int]
    """Drafted tokens that the target has just verified; an engine may verify only some of the draft, or none."""
    num_accepted: int
    """Number of verified tokens that were accepted."""
    room: int
    """Maximum draft length of this round; 0 while the prompt is processed, or after the request has ended."""
    stop_ids: frozenset[int]
    """Tokens that end the request; no token is drafted after one."""
    num_before: int = 0
    """Tokens that the request has generated."""


class Lane:
    """One request: its policy's run, and the draft of its newest round."""

    def __init__(self, policy: Policy) -> None:
        self.run = PolicyRun(policy)
        self.tokens: list[int] = []
        self._is_open = False  # whether a round has begun and not ended

    def begin(self, room: int, stop_ids: frozenset[int]) -> None:
        self.run.begin(room)
        self.tokens = []
        self._stop_ids = stop_ids
        self._is_open = True

    def take(self, token: int, drawn: AfterDraw) -> None:
        """Append a draft step's token, unless the policy stops before it."""
        if self.run.take(drawn, is_eos=token in self._stop_ids):
            self.tokens.append(token)

    def end(self, verified: Sequence[int], num_accepted: int) -> bool:
        """Report the round's outcome to the policy, and return True; False if the draft was not verified, since
        the request had to wait.
        """
        is_unverified = list(verified) != self.tokens[: len(verified)] or bool(self.tokens and not verified)
        was_verified = self._is_open and not is_unverified
        if was_verified:
            probs = [1.0] * num_accepted
            if num_accepted < len(verified):
                probs.append(0.0)
            self.run.end(len(verified), num_accepted, probs)
        self._is_open = False
        self.tokens = []
        return was_verified


class Lanes:
    """All unfinished requests, by id, and the rows of the current round."""

    def __init__(self, controller: MeasuredController | None = None) -> None:
        self._controller = controller or MeasuredController()
        self._alive: dict[str, Lane] = {}
        self._rows: list[Lane] = []

    def begin(self, rows: Sequence[RequestRow], alive: Container[str]) -> None:
        """Begin a round, after reporting the outcome of each row's last one; forget finished requests.

        Args:
            rows: rows of the engine's batch, in its order.
            alive: ids of all unfinished requests, including waiting ones.
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
                lane.run.is_going = False
        self._choose()

    def step(self, tokens: Sequence[int], signals: Sequence[AfterDraw]) -> None:
        """Record a draft step; rows that have stopped ignore it."""
        for lane, token, drawn in zip(self._rows, tokens, signals, strict=True):
            if lane.run.is_going:
                lane.take(token, drawn)
        self._controller.step()
        self._choose()

    def _choose(self) -> None:
        """Apply the batch rule to the rows that have it and have not stopped."""
        going = [lane.run for lane in self._rows if lane.run.is_going]
        if undecided := [run for run in going if isinstance(run.policy, BatchAuto)]:
            num_others = len(going) - len(undecided)
            self._controller.is_paid = num_others > 0
            self._controller.stop_losing(undecided, sum(len(lane.tokens) + 1 for lane in self._rows) + num_others)

    @property
    def is_going(self) -> bool:
        """Whether any row continues to draft."""
        return any(lane.run.is_going for lane in self._rows)

    @property
    def policies(self) -> list[Policy]:
        """Policy of each row."""
        return [lane.run.policy for lane in self._rows]

    @property
    def drafts(self) -> list[list[int]]:
        """Draft of each row."""
        return [list(lane.tokens) for lane in self._rows]

    def _lane(self, row: RequestRow) -> Lane:
        lane = self._alive.get(row.request)
        if lane is None or lane.run.policy != row.policy:  # the id was reused
            lane = self._alive[row.request] = Lane(row.policy)
        return lane
