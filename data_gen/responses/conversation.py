"""A shard's conversations, held with the target turn by turn: turn k is asked with the target's own replies to the turns before it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema import DataConfig
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode_text, render
from data_gen.responses.exchange import Exchange, Problem, Progress, Request, ResponseSource
from lm.uniforms import seed_of


@dataclass(frozen=True)
class ShardSpec:
    """What one shard is made of."""

    split: str
    index: int
    prompts: tuple[Prompt, ...]

    @property
    def num_requests(self) -> int:
        """Turns of all conversations: each becomes a row or a problem."""
        return sum(len(prompt.turns) for prompt in self.prompts)


@dataclass
class _Talk:
    """A conversation while it is being held."""

    prompt: Prompt
    replies: list[str] = field(default_factory=list)
    problem: Problem | None = None


def ask(
    spec: ShardSpec, source: ResponseSource, tokenizer: PreTrainedTokenizerBase, config: DataConfig, progress: Progress
) -> tuple[list[Exchange], list[Problem], Tensor | None]:
    """Exchanges and problems, one or the other for every turn of the shard, in its order; and the target's states behind all response
    tokens, [token, hidden], if the source keeps them.
    """
    talks = [_Talk(prompt) for prompt in spec.prompts]
    answered: dict[str, Exchange] = {}
    states: dict[str, Tensor] = {}
    problems: dict[str, Problem] = {}
    for turn in range(max((len(prompt.turns) for prompt in spec.prompts), default=0)):
        waiting: list[tuple[_Talk, Request]] = []
        for talk in talks:
            if turn < len(talk.prompt.turns):
                request = _request(talk, turn, tokenizer, config)
                if isinstance(request, Problem):
                    problems[request.id], talk.problem = request, request
                    progress(1)
                else:
                    waiting.append((talk, request))
        seed = seed_of(config.seed, "response", spec.split, spec.index, turn)
        answers = source.respond([request for _, request in waiting], seed, progress) if waiting else []
        for (talk, request), answer in zip(waiting, answers, strict=True):
            if isinstance(answer, Problem):
                problems[request.id], talk.problem = answer, answer
            else:
                answered[request.id] = Exchange(request.id, request.text, request.prompt_ids, answer.response_ids, answer.finish_reason)
                if answer.states is not None:
                    states[request.id] = answer.states
                talk.replies.append(str(tokenizer.decode(answer.response_ids, skip_special_tokens=True)))
    names = [row_id(prompt, turn) for prompt in spec.prompts for turn in range(len(prompt.turns))]
    kept = torch.cat([states[name] for name in names if name in states]) if states else None
    return [answered[name] for name in names if name in answered], [problems[name] for name in names if name in problems], kept


def row_id(prompt: Prompt, turn: int) -> str:
    """The prompt's id; from its second turn on with the number of the turn, as in `81#2`."""
    return prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}"


def _request(talk: _Talk, turn: int, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Request | Problem:
    """The next turn, or why it cannot be asked."""
    name = row_id(talk.prompt, turn)
    if talk.problem is not None:
        return Problem(name, "skipped", f"{talk.problem.id}, an earlier turn of this conversation, has no response")
    if not talk.prompt.turns[turn].strip():
        return Problem(name, "skipped", "empty prompt")
    text = render(talk.prompt, tokenizer, config.template, talk.replies)
    prompt_ids = encode_text(text, tokenizer, config.template)
    if len(prompt_ids) > config.max_prompt_tokens:
        return Problem(name, "skipped", f"prompt of {len(prompt_ids)} tokens; data.max_prompt_tokens is {config.max_prompt_tokens}")
    return Request(name, text, prompt_ids)
