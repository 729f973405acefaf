"""Figures of the embedded trio: how often the small models are accepted, and how much cheaper they are.

Responses are drawn from the target at temperature 1 on prompts of the test split; acceptance_rate, the sum over v of
min(p(v), q(v)), is measured at each of their positions.
"""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import ModelSource
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode, render
from data_gen.responses.exchange import Request, Response
from data_gen.responses.in_process import TargetInProcess
from data_gen.stories.stories import stories
from lm import Sampling, acceptance_rate, load_model, load_tokenizer
from lm.forwards import hidden_states, logits_of

NAMES = ("target", "draft", "micro")
_CONTEXT_TOKENS = 100  # length of the cache at which a forward is timed
_MAX_NEW_TOKENS = 160  # longer than any worked answer
_BATCH_SIZE, _NUM_PROMPTS = 64, 60


def measure(directory: str | Path) -> dict[str, float]:
    """Acceptance rates (mean and standard deviation over positions), forward times in ms, their ratio, and bytes on
    disk.
    """
    paths = {name: Path(directory) / name for name in NAMES}
    models = {name: load_model(ModelSource(path=str(path), dtype="float32")) for name, path in paths.items()}
    tokenizer = load_tokenizer(ModelSource(path=str(paths["target"])))
    figures = {f"{name}_forward_ms": forward_ms(model) for name, model in models.items()}
    figures["forward_ratio"] = figures["target_forward_ms"] / figures["draft_forward_ms"]
    rates = trio_acceptance_rates(models, tokenizer, num_prompts=_NUM_PROMPTS, seed=0)
    for name, rate in rates.items():
        figures |= {f"{name}_acceptance_mean": rate.mean().item(), f"{name}_acceptance_std": rate.std().item()}
    figures["positions"] = len(rates["draft"])
    figures["size_bytes"] = sum(file.stat().st_size for path in paths.values() for file in path.iterdir())
    return figures


def trio_acceptance_rates(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, *, num_prompts: int, seed: int
) -> dict[str, Float[Tensor, " position"]]:
    """The acceptance_rate of every model but the target, at every position of the target's responses to `num_prompts`
    test prompts.
    """
    sampling, vocab_size, eos_ids = Sampling(), len(tokenizer), frozenset([tokenizer.eos_token_id])
    prompts = [Prompt(story.id, (story.prompt,)) for story in stories("test", num_prompts, seed=seed)]
    requests = [Request(one.id, render(one, tokenizer, "chat"), encode(one, tokenizer, "chat")) for one in prompts]
    how: dict[str, Any] = {"vocab_size": vocab_size, "max_new_tokens": _MAX_NEW_TOKENS, "batch_size": _BATCH_SIZE}
    source = TargetInProcess(models["target"], sampling, eos_ids=eos_ids, **how)
    rates: dict[str, list[Tensor]] = {name: [] for name in models if name != "target"}
    for request, answer in zip(requests, source.respond(requests, seed, lambda _: None), strict=True):
        assert isinstance(answer, Response), answer
        row, start = request.prompt_ids + answer.response_ids, len(request.prompt_ids) - 1
        probs = {
            name: sampling.probs(logits_of(model, hidden_states(model, [row[:-1]], [start]), vocab_size))
            for name, model in models.items()
        }
        for name, parts in rates.items():
            parts.append(acceptance_rate(probs[name], probs["target"]))
    return {name: torch.cat(parts) for name, parts in rates.items()}


@torch.inference_mode()
def forward_ms(model: PreTrainedModel) -> float:
    """Median milliseconds of a forward of one token, batch 1, on one thread, with a cache of 100 tokens."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones(1, _CONTEXT_TOKENS, dtype=torch.long), past_key_values=cache)
    token = torch.ones(1, 1, dtype=torch.long)
    names = {"model": model, "token": token, "cache": cache}
    timer = Timer("model(input_ids=token, past_key_values=cache); cache.crop(-1)", globals=names)  # on one thread
    return 1000 * timer.adaptive_autorange().median


def report_figures(figures: dict[str, float]) -> str:
    """One JSON line."""
    return json.dumps({name: round(value, 4) for name, value in figures.items()})
