"""Requests of a shard, turn by turn, and their answers X ~ target (law 4.6). The request of a turn contains the
target's replies to earlier turns.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from configs.schema import DataConfig
from data_gen.prompts.prompt import Prompt, row_id
from data_gen.prompts.templates import RefusedPromptError, encode_text, render
from lm.draws import seed_of

if TYPE_CHECKING:  # transformers takes long to import
    from transformers import PreTrainedTokenizerBase

_MIN_ROWS = 8
_MAX_ROWS = 32
_HOPELESS_SHARE = 0.9
"""A run stops once this share of the latest 8 to 32 rows failed."""
FinishReason = Literal["stop", "length"]
Progress = Callable[[int], None]
"""A function that is called with the number of requests finished since the last call."""
Result = TypeVar("Result")


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


Turns = Generator[tuple[list[Request], int], list[Exchange | Problem], Result]
"""Yields the requests of one turn after another, each with the seed of its draws, and gets their answers in order."""


@runtime_checkable
class ResponseSource(Protocol):
    """Where responses come from."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Exchange | Problem]:
        """One answer per request, in order; deterministic in requests and seed, as far as the source allows."""


class Answers(NamedTuple):
    """The exchange or the problem of every turn of a shard, both in the order of the shard."""

    exchanges: list[Exchange]
    problems: list[Problem]


class LatestRows:
    """The latest rows of a run, which stops once nearly all of them failed: the cause is then a setting, a model
    or a proxy, not the rows. With a `max_error_share` of 1 it never stops.
    """

    def __init__(self, *, max_error_share: float = 0.0) -> None:
        self._problems: deque[Problem | None] = deque(maxlen=_MAX_ROWS)
        self._share = max(_HOPELESS_SHARE, max_error_share)

    def add(self, problems: Iterable[Problem | None], *, subject: str, remedy: str) -> None:
        """Add the problem of each row, None for a row without one; ValueError if nearly all of the latest rows
        failed. `subject` ends "8 of the last 8 …".
        """
        self._problems.extend(problems)
        failed = [problem for problem in self._problems if problem is not None]
        num = len(self._problems)
        if num >= _MIN_ROWS and len(failed) >= self._share * num and self._share < 1:
            raise ValueError(
                f"{len(failed)} of the last {num} {subject}; the latest, {failed[-1].id}: {failed[-1].reason}; {remedy}"
            )


@dataclass(frozen=True)
class ShardSpec:
    """The prompts of one shard, and its index in the run."""

    split: str
    index: int
    prompts: tuple[Prompt, ...]

    @property
    def digests(self) -> list[str]:
        """A digest of each prompt, by which a later run recognises it."""
        return [hashlib.sha256(ascii(prompt).encode()).hexdigest()[:16] for prompt in self.prompts]

    @property
    def name(self) -> str:
        """The shard in files and messages: train-00012."""
        return f"{self.split}-{self.index:05d}"

    @property
    def num_requests(self) -> int:
        """Number of turns of all conversations."""
        return sum(len(prompt.turns) for prompt in self.prompts)


def turns_of(
    spec: ShardSpec,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    progress: Progress,
    kept: Iterable[Exchange] = (),
) -> Turns[Answers]:
    """The requests of every turn of the shard: turn k of all conversations together, then turn k + 1; in the end
    all answers. `kept`: existing rows, which are not requested again.
    """
    answers: dict[str, Exchange | Problem] = {exchange.id: exchange for exchange in kept}
    for turn in range(max((len(prompt.turns) for prompt in spec.prompts), default=0)):
        requests: list[Request] = []
        for prompt in (prompt for prompt in spec.prompts if turn < len(prompt.turns)):
            if (name := row_id(prompt, turn)) not in answers:
                earlier = [answers[row_id(prompt, number)] for number in range(turn)]
                request = _request(prompt, name, earlier, tokenizer, data)
                if isinstance(request, Request):
                    requests.append(request)
                    continue
                answers[name] = request
            progress(1)
        if requests:
            replies = yield requests, seed_of(data.seed, "response", spec.split, spec.index, turn)
            answers |= {answer.id: answer for answer in replies}
    return in_order(spec, answers.values())


def ask(turns: Turns[Result], source: ResponseSource, progress: Progress) -> Result:
    """The source's answers to every turn of one shard."""
    try:
        requests, seed = next(turns)
        while True:
            requests, seed = turns.send(source.respond(requests, seed, progress))
    except StopIteration as end:
        result: Result = end.value
        return result


def in_order(spec: ShardSpec, rows: Iterable[Exchange | Problem]) -> Answers:
    """The answer to every turn of the shard; of several with the same id the last counts."""
    by_id = {row.id: row for row in rows}
    answers = [by_id[row_id(prompt, turn)] for prompt in spec.prompts for turn in range(len(prompt.turns))]
    exchanges = [answer for answer in answers if isinstance(answer, Exchange)]
    return Answers(exchanges, [answer for answer in answers if isinstance(answer, Problem)])


def without(spec: ShardSpec, answers: Answers, broken: Mapping[int, str]) -> Answers:
    """The answers with these rows (row -> reason) turned into problems."""
    new = [Problem(answers.exchanges[row].id, "error", reason) for row, reason in broken.items()]
    return in_order(spec, [*answers.exchanges, *answers.problems, *new])


def _request(
    prompt: Prompt,
    name: str,
    earlier: list[Exchange | Problem],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
) -> Request | Problem:
    """The request of the turn after the `earlier` ones, or the reason why there is none."""
    if earlier and isinstance(earlier[-1], Problem):
        return Problem(name, "skipped", f"an earlier turn of this conversation, {earlier[-1].id}, has no response")
    if not prompt.turns[len(earlier)].strip():
        return Problem(name, "skipped", "empty prompt")
    if not prompt.is_text:
        return Problem(name, "skipped", "the prompt has a lone surrogate (half of a character)")
    replies = [
        str(tokenizer.decode(answer.response_ids, skip_special_tokens=True))
        for answer in earlier
        if isinstance(answer, Exchange)
    ]
    try:
        text = render(prompt, tokenizer, data.template, replies)
    except RefusedPromptError as error:
        return Problem(name, "error", str(error))
    prompt_ids = encode_text(text, tokenizer, data.template)
    if (num := len(prompt_ids)) > data.max_prompt_tokens:
        return Problem(
            name, "skipped", f"the prompt has {num} tokens; data.max_prompt_tokens is {data.max_prompt_tokens}"
        )
    return Request(name, text, prompt_ids)
