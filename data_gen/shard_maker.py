"""One shard from prompts to files: responses, labels, mixings, features. The unit that engines distribute.

Every random number of a shard comes from seeds of (run seed, stage, split, shard index), and nothing else of the run reaches its bytes: so
the same shard is the same on any engine, in any order, and after any interruption.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data_gen import features, rows
from data_gen.draws import seed_of, uniforms
from data_gen.labelling import Labeller
from data_gen.labels import mixed
from data_gen.layout import Layout
from data_gen.records import Prompt
from data_gen.responses import Problem, Progress, Request, ResponseSource
from data_gen.rows import Exchange
from data_gen.shards import features_path, is_whole, rows_path, write_shard
from data_gen.templates import encode_text, render

_EMPTY = ("acceptance_prob", "log_p", "log_q", "acceptance_rate", "entropy", "cross_entropy", "log_token_prob")


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


def is_done(config: Config, spec: ShardSpec) -> bool:
    """Whether every file of the shard is whole."""
    directory = config.data.dir
    paths = [features_path(directory, timing, spec.split, spec.index) for timing in config.data.features]
    return all(map(is_whole, [*paths, rows_path(directory, spec.split, spec.index)]))


@dataclass
class Conversation:
    """A prompt while it is being held with the target."""

    prompt: Prompt
    replies: list[str] = field(default_factory=list)
    problem: Problem | None = None


def ask(
    spec: ShardSpec, source: ResponseSource, tokenizer: PreTrainedTokenizerBase, config: Config, progress: Progress
) -> tuple[list[Exchange], list[Problem]]:
    """Hold every conversation of a shard, turn by turn: exchanges and problems, one or the other for each turn."""
    talks = [Conversation(prompt) for prompt in spec.prompts]
    answered: dict[str, Exchange] = {}
    problems: dict[str, Problem] = {}
    for turn in range(max((len(prompt.turns) for prompt in spec.prompts), default=0)):
        open_talks = [talk for talk in talks if turn < len(talk.prompt.turns)]
        requests, waiting = [], []
        for talk in open_talks:
            request = _request(talk, turn, tokenizer, config)
            if isinstance(request, Problem):
                problems[request.id], talk.problem = request, request
            else:
                requests.append(request)
                waiting.append(talk)
        progress(len(open_talks) - len(requests))
        seed = seed_of(config.data.seed, "response", spec.split, spec.index, turn)
        for request, talk, answer in zip(requests, waiting, source.respond(requests, seed, progress) if requests else [], strict=True):
            if isinstance(answer, Problem):
                problems[request.id], talk.problem = answer, answer
                continue
            answered[request.id] = Exchange(request.id, request.text, request.prompt_ids, answer.response_ids, answer.finish_reason)
            talk.replies.append(str(tokenizer.decode(answer.response_ids, skip_special_tokens=True)))
    names = [row_id(prompt, turn) for prompt in spec.prompts for turn in range(len(prompt.turns))]
    return [answered[name] for name in names if name in answered], [problems[name] for name in names if name in problems]


def row_id(prompt: Prompt, turn: int) -> str:
    """The prompt's id; from its second turn on with the number of the turn, from 1."""
    return prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}"


def _request(talk: Conversation, turn: int, tokenizer: PreTrainedTokenizerBase, config: Config) -> Request | Problem:
    """The next turn, or why it cannot be asked."""
    name = row_id(talk.prompt, turn)
    if talk.problem is not None:
        return Problem(name, "skipped", f"turn {talk.problem.id} of the same conversation has no response")
    if not talk.prompt.turns[turn].strip():
        return Problem(name, "skipped", "empty prompt")
    text = render(talk.prompt, tokenizer, config.data.template, talk.replies)
    prompt_ids = encode_text(text, tokenizer, config.data.template)
    if len(prompt_ids) > config.data.max_prompt_tokens:
        return Problem(name, "skipped", f"prompt of {len(prompt_ids)} tokens; data.max_prompt_tokens is {config.data.max_prompt_tokens}")
    return Request(name, text, prompt_ids)


def coins(config: Config, spec: ShardSpec, layout: Layout) -> Tensor:
    """from_target of every mixing, [token] in the layout of the mixings: True with probability `mixing_ratio`, a coin per position and
    mix.
    """
    seed = seed_of(config.data.seed, "mixing", spec.split, spec.index)
    return uniforms(seed, layout.num_tokens * config.data.mixes) < config.data.mixing_ratio


def make_features(
    exchanges: Sequence[Exchange], columns: dict[str, Tensor], spec: ShardSpec, labeller: Labeller, config: Config
) -> tuple[dict[str, bytes], Tensor]:
    """Feature files by timing, and the coins; takes `hidden` out of `columns`."""
    layout = Layout(tuple(len(exchange.response_ids) for exchange in exchanges))
    mixes = config.data.mixes
    from_target = coins(config, spec, layout)
    files: dict[str, bytes] = {}
    hidden = columns.pop("hidden", None)
    if "drawn" in config.data.features and hidden is not None:
        files["drawn"] = features.to_safetensors(hidden, columns, torch.ones(layout.num_tokens), layout)
    if "fed" in config.data.features:
        order = layout.positions([row for row in range(len(exchanges)) for _ in range(mixes)]) if exchanges else torch.empty(0).long()
        response_ids = torch.tensor([token for exchange in exchanges for token in exchange.response_ids], dtype=torch.int64)
        mixed_ids = mixed(response_ids[order], columns["draft_ids"][order], from_target)
        fed = labeller.fed_hidden(exchanges, mixed_ids, mixes)
        files["fed"] = features.to_safetensors(fed, columns, ~from_target, layout, mixes)
    return files, from_target


def write_files(
    config: Config, spec: ShardSpec, files: Mapping[str, bytes], table: bytes, problems: Sequence[Problem], exchanges: Sequence[Exchange]
) -> None:
    """Features first, rows last: rows that are there have their features."""
    num_tokens = sum(len(exchange.response_ids) for exchange in exchanges)
    for timing, content in files.items():
        times = config.data.mixes if timing == "fed" else 1
        path = features_path(config.data.dir, timing, spec.split, spec.index)
        write_shard(path, content, rows=len(exchanges) * times, tokens=num_tokens * times)
    facts = {"input": spec.num_requests, "ok": len(exchanges), "problems": [problem._asdict() for problem in problems]}
    write_shard(rows_path(config.data.dir, spec.split, spec.index), table, rows=len(exchanges), tokens=num_tokens, **facts)


def make_shard(
    spec: ShardSpec, source: ResponseSource, labeller: Labeller, tokenizer: PreTrainedTokenizerBase, config: Config, progress: Progress
) -> None:
    """Everything of one shard, with both models loaded (`mode: together`)."""
    exchanges, problems = ask(spec, source, tokenizer, config, progress)
    progress(len(problems))
    num_tokens = sum(len(exchange.response_ids) for exchange in exchanges)
    uniform = uniforms(seed_of(config.data.seed, "draft", spec.split, spec.index), num_tokens)
    columns = labeller.label(exchanges, {"uniform": uniform}, with_hidden="drawn" in config.data.features, progress=progress)
    if not exchanges:
        columns = empty_columns(labeller)
    files, from_target = make_features(exchanges, columns, spec, labeller, config)
    table = rows.to_parquet(exchanges, columns, from_target, config.data.mixes)
    write_files(config, spec, files, table, problems, exchanges)


def empty_columns(labeller: Labeller) -> dict[str, Tensor]:
    """What labelling gives for a shard whose every prompt was skipped."""
    assert labeller.draft is not None
    hidden = torch.empty(0, labeller.draft.config.get_text_config().hidden_size, dtype=labeller.feature_dtype)
    return {"hidden": hidden, "draft_ids": torch.empty(0, dtype=torch.int64), **{name: torch.empty(0) for name in _EMPTY}}
