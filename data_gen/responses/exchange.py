"""Requests to a source of responses, and its answers (law 4.6)."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

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


class Laws(NamedTuple):
    """The target's distributions p under the run's `Sampling` at the positions of a response: tokens with probability
    above 0.
    """

    ids: Int[Tensor, "token support"]
    """int32; rows are padded with id 0 of probability 0."""
    probs: Float[Tensor, "token support"]
    """float32; a row sums to 1."""


class Response(NamedTuple):
    """The target's response X to one request."""

    response_ids: list[int]
    """Ids of the response, the end-of-sequence token last if finish_reason is stop."""
    finish_reason: FinishReason
    states: Tensor | None = None
    """[response token, hidden] on the CPU: the target's final hidden states from which the tokens were drawn, if the
    source keeps them.
    """
    laws: Laws | None = None
    """Distributions from which the tokens were drawn, if a server returns them."""


class Problem(NamedTuple):
    """A request that has no row, and the reason."""

    id: str
    outcome: Literal["error", "skipped"]
    reason: str


@runtime_checkable
class ResponseSource(Protocol):
    """Where responses come from."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """One answer per request, in order; deterministic in requests and seed, as far as the source allows."""
        ...


class Exchange(NamedTuple):
    """One prompt and the target's response to it: the subject of a row."""

    id: str
    prompt: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: FinishReason | None
    """None if unknown, in imported data."""


class Answers(NamedTuple):
    """The exchange or the problem of every turn of a shard, both in the order of the shard."""

    exchanges: list[Exchange]
    problems: list[Problem]
    states: Tensor | None = None
    """[response token, hidden] of all exchanges, one after the other; None unless the source kept all of them."""
    laws: Sequence[Laws | None] = ()
    """Distributions of each exchange, None if unknown."""
