"""One prompt through the speculative loop: `python -m decode generate`, and `complete` in Python."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import PurePath
from typing import Literal

import torch
from rich.console import Console

from configs.load import accepts_yaml, load_config
from configs.paths import local_path
from configs.schema import Config
from data_gen.prompts.prompt import Prompt, conversation_of
from data_gen.prompts.templates import encode
from decode.drafters.factory import PairModels
from decode.drafters.trees import SHAPES
from decode.experiment import Experiment
from decode.generate.transcript import picture, show
from decode.loop.decoder import Generation, Round
from decode.policies.base import Policy
from lm import Pair


@accepts_yaml
def generate(
    config: Config,
    *,
    prompt: str,
    policy: str | None = None,
    tree: Literal["eagle2", "cape"] | None = None,
    max_new_tokens: int | None = None,
    json: bool = False,
    rejected: bool = True,
    svg: str | None = None,
) -> None:
    """Run `acceptance-heads generate`; `configs.making` documents its flags."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens is {max_new_tokens}; it must be at least 1")
    picture_path = None if svg is None else local_path(svg, "--svg")
    experiment = Experiment(config)
    if policy is None:
        policy, reason = experiment.default_policy
        print(f"policy: {reason}", file=sys.stderr)
    stop = experiment.policy(policy)
    rounds = _rounds(experiment, prompt, stop, max_new_tokens, tree=tree)
    if json:
        generation = Generation.of(rounds)
        about = {"text": _text(generation, experiment.pair), "prompt": prompt, "policy": policy}
        record = about | {"sampling": asdict(experiment.sampling)} | generation.as_dict()
        print(dumps(record, ensure_ascii=False))
        return
    console = Console(highlight=False)
    text, closing = show(rounds, stop, console=console, tokenizer=experiment.pair.tokenizer, has_rejected=rejected)
    if picture_path is not None:
        title = f"acceptance-heads generate --policy {policy}"
        picture_path.write_text(picture(text, closing, title=title), encoding="utf-8")


def complete(
    config: Config | str | PurePath,
    prompt: str | Sequence[Mapping[str, object]],
    *,
    policy: str | Policy | None = None,
    max_new_tokens: int | None = None,
) -> str:
    """The target's response to a prompt, drawn as the config says.

    Args, beside those of `generate`:
        config: the experiment, or the path of its YAML.
        prompt: the user's message, or a list of messages.
        policy: when to stop drafting, as an object or as for `--policy`, also if None.

    Raises:
        ValueError: a policy that does not parse, or does not fit the models; malformed messages.
        FileNotFoundError: missing models or heads.
    """
    experiment = Experiment(load_config(config))
    stop = policy if isinstance(policy, Policy) else experiment.policy(policy or experiment.default_policy[0])
    generation = Generation.of(_rounds(experiment, prompt, stop, max_new_tokens))
    return _text(generation, experiment.pair)


def _rounds(
    experiment: Experiment,
    prompt: str | Sequence[Mapping[str, object]],
    policy: Policy,
    max_new_tokens: int | None,
    *,
    tree: str | None = None,
) -> Iterator[Round]:
    pair = experiment.pair
    decode = experiment.decode
    models = PairModels(pair, holds_trees=tree is not None)
    drafter = models.drafter(policy, None if tree is None else SHAPES[tree])
    decoder = models.decoder(drafter, sampling=experiment.sampling, max_draft_length=decode.max_draft_length)
    conversation, replies = (Prompt("prompt", (prompt,)), []) if isinstance(prompt, str) else conversation_of(prompt)
    if not conversation.is_text:
        raise ValueError(
            f"the prompt {prompt!r:.80} has half a character (a byte that is not UTF-8); encode it as UTF-8"
        )
    prompt_ids = encode(conversation, pair.tokenizer, experiment.template, replies)
    limit = decode.max_new_tokens if max_new_tokens is None else max_new_tokens
    return decoder.stream(prompt_ids, limit, generator=torch.Generator().manual_seed(decode.seed))


def _text(generation: Generation, pair: Pair) -> str:
    return str(pair.tokenizer.decode(list(generation.token_ids), skip_special_tokens=True))
