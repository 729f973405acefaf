"""python -m decode generate: one prompt through the speculative loop, its tokens in colour as they come, or one JSON
document.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal

import torch
from rich.console import Console

from configs.paths import local_path
from configs.schema import Config
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode
from decode.drafters.factory import PairModels
from decode.drafters.trees.shapes import SHAPES
from decode.experiment import Experiment
from decode.generate.transcript import Transcript, legend, picture, summary
from decode.loop.decoder import Generation, Round
from decode.policies.base import Policy
from lm import Pair


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
    """One prompt, showing accepted, rejected, residual and bonus tokens in colour.

    Args:
        config: the experiment; `data.template` wraps the prompt, `decode.seed` seeds the draws.
        prompt: what the user says.
        policy: when to stop: a name (a wrong one prints them all), auto, head:PATH or your own as my_module:Unsure,
            with parameters: entropy:max_sqrt_entropy=0.4, my_module:Unsure:floor=0.2. null: the verdict of
            evaluate or tune (decode.dir/verdict.json), else the best head of heads.dir, else cumulative_token_prob.
        tree: draft trees of EAGLE-2 or CaPE; policies then count levels. null: chains.
        max_new_tokens: null: decode.max_new_tokens.
        json: one JSON document with every round in place of the coloured text.
        rejected: show rejected drafts too.
        svg: also write the coloured text to this file as a picture.
    """
    _check_length(max_new_tokens)
    picture_path = None if svg is None else local_path(svg, "--svg")
    experiment = Experiment(config)
    if policy is None:
        policy, reason = experiment.default_policy
        print(f"policy: {reason}", file=sys.stderr)
    stop = experiment.policy(policy)
    pair, decode = experiment.pair, experiment.decode
    prompt_ids = encode(Prompt("prompt", (prompt,)), pair.tokenizer, experiment.template)
    models = PairModels(pair, decode.compile, holds_trees=tree is not None)
    drafter = models.drafter(stop, None if tree is None else SHAPES[tree])
    decoder = models.decoder(drafter, sampling=experiment.sampling, max_draft_length=decode.max_draft_length)
    num_tokens = decode.max_new_tokens if max_new_tokens is None else max_new_tokens
    rounds = decoder.stream(prompt_ids, num_tokens, generator=torch.Generator().manual_seed(decode.seed))
    if json:
        print(_document(Generation.of(rounds), pair, prompt=prompt, policy=policy, sampling=decoder.sampling))
        return
    transcript = Transcript(Console(highlight=False), pair.tokenizer, has_rejected=rejected)
    closing = _show(rounds, transcript, stop)
    if picture_path is not None:
        picture_path.write_text(
            picture(transcript.text, closing, title=f"python -m decode generate --policy {policy}"), encoding="utf-8"
        )


def _check_length(max_new_tokens: int | None) -> None:
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens is {max_new_tokens}; it must be at least 1")


def _show(rounds: Iterable[Round], transcript: Transcript, policy: Policy) -> str:
    """Print each round as soon as it is decoded; the summary that ends the output."""
    transcript.console.print(legend())
    rounds_so_far: list[Round] = []
    for round_ in rounds:
        rounds_so_far.append(round_)
        transcript.write(round_)
    closing = summary(Generation.of(rounds_so_far), policy)
    transcript.console.print("\n" + closing, soft_wrap=True)
    return closing


def _document(generation: Generation, pair: Pair, **settings: Any) -> str:
    """Everything about a generation as JSON."""
    sampling = settings.pop("sampling")
    text = pair.tokenizer.decode(list(generation.token_ids), skip_special_tokens=True)
    return json.dumps(
        {"text": text, **settings, "sampling": asdict(sampling), **generation.as_dict()}, ensure_ascii=False
    )
