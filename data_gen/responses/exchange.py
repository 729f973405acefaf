"""What a source of responses is asked, and what it answers (law 4.6)."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

FinishReason = Literal["stop", "length"]


Progress = Callable[[int], None]


class Request(NamedTuple):
    """One turn to be answered."""

    id: str
    """The row's id: the prompt's, with #turn from the second turn on."""
    text: str
    """The rendered prompt."""
    prompt_ids: list[int]


class Response(NamedTuple):
    """X of one request."""

    response_ids: list[int]
    """With the end-of-sequence token last if finish_reason is stop."""
    finish_reason: FinishReason
    states: Tensor | None = None
    """[response token, hidden] on the CPU: the target's final hidden states that its tokens were drawn from, if the source keeps them."""


class Problem(NamedTuple):
    """Why a request has no row."""

    id: str
    outcome: Literal["error", "skipped"]
    reason: str


@runtime_checkable
class ResponseSource(Protocol):
    """Where responses come from."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """One answer per request, in order; `progress` is told how many more are done."""
        ...


class Exchange(NamedTuple):
    """One prompt and the target's response to it: what a row is about."""

    id: str
    prompt: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: FinishReason | None
    """None where it is not known: imported data."""
