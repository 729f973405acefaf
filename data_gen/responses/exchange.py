"""What a source of responses is given and what it gives back (law 4.6)."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

FinishReason = Literal["stop", "length"]
Progress = Callable[[int], None]
"""A function that is called with the number of requests that have been dealt with since the last call."""


class Request(NamedTuple):
    """One turn to be answered."""

    id: str
    """The row's id: the prompt's, with #turn from the second turn on."""
    text: str
    """The rendered prompt."""
    prompt_ids: list[int]


class Laws(NamedTuple):
    """The target's laws p under the run's `Sampling` at the places of a response, by the tokens that have any
    probability.
    """

    ids: Int[Tensor, "token support"]
    """int32; what pads a row is id 0 with probability 0."""
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
    """Laws from which the tokens were drawn, if the source is a server that tells them."""


class Problem(NamedTuple):
    """A request that has no row, and the reason."""

    id: str
    outcome: Literal["error", "skipped"]
    reason: str


@runtime_checkable
class ResponseSource(Protocol):
    """Where responses come from."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """One answer per request, in order. The same requests and seed give the same answers, as far as the source can
        promise it.
        """
        ...


class Exchange(NamedTuple):
    """One prompt and the target's response to it: the subject of a row."""

    id: str
    prompt: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: FinishReason | None
    """None where it is not known: imported data."""


class Answers(NamedTuple):
    """The exchange or the problem of every turn of a shard, both in the order of the shard."""

    exchanges: list[Exchange]
    problems: list[Problem]
    states: Tensor | None = None
    """[response token, hidden] of all exchanges, one after the other; None unless the source kept those of each."""
    laws: Sequence[Laws | None] = ()
    """Laws of each exchange, None where they are not known."""
