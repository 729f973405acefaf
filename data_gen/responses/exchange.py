"""Requests to a source of responses, and its answers (law 4.6)."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

_MIN_ROWS, _MAX_ROWS, _HOPELESS_SHARE = 8, 32, 0.9
"""A run stops once this share of the latest 8 to 32 rows failed."""
FinishReason = Literal["stop", "length"]
Progress = Callable[[int], None]
"""A function that is called with the number of requests finished since the last call."""


class Request(NamedTuple):
    """One turn to be answered."""

    id: str
    """The row's id: the prompt's, with #turn from the second turn on."""
    text: str
    """The rendered prompt."""
    prompt_ids: list[int]


class Distributions(NamedTuple):
    """The target's distributions p at the positions of a response: tokens with probability above 0."""

    ids: Int[Tensor, "token support"]
    """int32; rows are padded with id 0 of probability 0."""
    probs: Float[Tensor, "token support"]
    """float32; a row sums to 1."""


class Exchange(NamedTuple):
    """One prompt and the target's response X to it: the subject of a row."""

    id: str
    prompt: str
    prompt_ids: list[int]
    response_ids: list[int]
    """Ids of the response, the end-of-sequence token last if finish_reason is stop."""
    finish_reason: FinishReason | None
    """None if unknown, in imported data."""
    states: Tensor | None = None
    """[response token, hidden] on the CPU: the target's states from which the tokens were drawn."""
    distributions: Distributions | None = None
    """Distributions from which the tokens were drawn, if a server returns them."""


class Problem(NamedTuple):
    """A request that has no row, and the reason."""

    id: str
    outcome: Literal["error", "skipped"]
    reason: str


class RefusedError(ValueError):
    """A request has no usable answer, for a reason that does not concern other requests: its row becomes a problem."""


@runtime_checkable
class ResponseSource(Protocol):
    """Where responses come from."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Exchange | Problem]:
        """One answer per request, in order; deterministic in requests and seed, as far as the source allows."""
        ...


class Answers(NamedTuple):
    """The exchange or the problem of every turn of a shard, both in the order of the shard."""

    exchanges: list[Exchange]
    problems: list[Problem]


class LatestRows:
    """The latest rows of a run, which stops once nearly all of them failed: the cause is then a setting, a model or a
    proxy, not the rows. With a `max_error_share` of 1 it never stops.
    """

    def __init__(self, *, max_error_share: float = 0.0) -> None:
        self._problems: deque[Problem | None] = deque(maxlen=_MAX_ROWS)
        self._share = max(_HOPELESS_SHARE, max_error_share)

    def add(self, problems: Iterable[Problem | None], *, subject: str, remedy: str) -> None:
        """Add the problem of each row, None for a row without one; ValueError if nearly all of the latest rows failed.
        `subject` ends "8 of the last 8 …".
        """
        self._problems.extend(problems)
        failed, num = [problem for problem in self._problems if problem is not None], len(self._problems)
        if num >= _MIN_ROWS and len(failed) >= self._share * num and self._share < 1:
            raise ValueError(
                f"{len(failed)} of the last {num} {subject}; the latest, {failed[-1].id}: {failed[-1].reason}; {remedy}"
            )
