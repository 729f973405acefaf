"""A shard's conversations, held with the target turn by turn: turn k is asked with the target's own replies to the
turns before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import DataConfig
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode_text, render
from data_gen.responses.exchange import Answers, Exchange, Problem, Progress, Request, Response, ResponseSource
from lm.uniforms import seed_of


@dataclass(frozen=True)
class ShardSpec:
    """The prompts of one shard, and its place in the run."""

    split: str
    index: int
    prompts: tuple[Prompt, ...]

    @property
    def num_requests(self) -> int:
        """Turns of all conversations; each becomes a row or a problem."""
        return sum(len(prompt.turns) for prompt in self.prompts)


@dataclass
class _Talk:
    """A conversation, as far as it has come."""

    prompt: Prompt
    replies: list[str] = field(default_factory=list)
    problem: Problem | None = None
    """Why its latest turn has no reply; later turns cannot be asked then."""


def ask(
    spec: ShardSpec, source: ResponseSource, *, tokenizer: PreTrainedTokenizerBase, data: DataConfig, progress: Progress
) -> Answers:
    """The source's answers to every turn of the shard.

    Args:
        spec: the shard.
        source: answers all conversations' turn k together, then their turn k + 1.
        tokenizer: of the pair.
        data: for its seed, its template and its limit on prompts.
        progress: is told of every turn once.
    """
    talks = [_Talk(prompt) for prompt in spec.prompts]
    answers: dict[str, Response | Problem] = {}
    requests: dict[str, Request] = {}
    for turn in range(max((len(prompt.turns) for prompt in spec.prompts), default=0)):
        waiting = []
        for talk in (talk for talk in talks if turn < len(talk.prompt.turns)):
            request = _request(talk, turn, tokenizer, data)
            if isinstance(request, Problem):
                answers[request.id] = talk.problem = request
                progress(1)
            else:
                requests[request.id] = request
                waiting.append((talk, request))
        seed = seed_of(data.seed, "response", spec.split, spec.index, turn)
        responses = source.respond([request for _, request in waiting], seed, progress) if waiting else []
        for (talk, request), answer in zip(waiting, responses, strict=True):
            answers[request.id] = answer
            if isinstance(answer, Problem):
                talk.problem = answer
            else:
                talk.replies.append(str(tokenizer.decode(answer.response_ids, skip_special_tokens=True)))
    return _in_order(spec, requests, answers)


def _in_order(spec: ShardSpec, requests: Mapping[str, Request], answers: Mapping[str, Response | Problem]) -> Answers:
    """The answers, conversation by conversation instead of turn by turn."""
    result, states = Answers([], []), []
    for name in (row_id(prompt, turn) for prompt in spec.prompts for turn in range(len(prompt.turns))):
        answer = answers[name]
        if isinstance(answer, Problem):
            result.problems.append(answer)
            continue
        request = requests[name]
        result.exchanges.append(
            Exchange(name, request.text, request.prompt_ids, answer.response_ids, answer.finish_reason)
        )
        states.append(answer.states)
    known = [state for state in states if state is not None]  # a response that was kept from an earlier run has none
    return result._replace(states=torch.cat(known)) if known and len(known) == len(states) else result


def row_id(prompt: Prompt, turn: int) -> str:
    """The prompt's id; from its second turn on with the number of the turn, as in `81#2`."""
    return prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}"


def _request(talk: _Talk, turn: int, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Request | Problem:
    """The next turn, or why it cannot be asked."""
    name = row_id(talk.prompt, turn)
    if talk.problem is not None:
        return Problem(name, "skipped", f"{talk.problem.id}, an earlier turn of this conversation, has no response")
    if not talk.prompt.turns[turn].strip():
        return Problem(name, "skipped", "empty prompt")
    if not talk.prompt.is_text:
        return Problem(name, "skipped", "prompt with a lone surrogate, half of a character")
    text = render(talk.prompt, tokenizer, data.template, talk.replies)
    prompt_ids = encode_text(text, tokenizer, data.template)
    if len(prompt_ids) > data.max_prompt_tokens:
        return Problem(
            name, "skipped", f"prompt of {len(prompt_ids)} tokens; data.max_prompt_tokens is {data.max_prompt_tokens}"
        )
    return Request(name, text, prompt_ids)
