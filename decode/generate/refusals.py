"""Checks of `speculative_generate`: settings that it would ignore, and heads that do not fit."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    GenerationMode,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decode.policies.base import Policy
from heads.model.fits import check_fits, description_of
from lm import FeatureDraft
from lm.selfcheck import is_written

_PREPARED = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep"}
)
"""Keywords that `generate` prepares by itself."""
_MODES = (
    "num_beams",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "force_words_ids",
)
_REMEDY = "only token ids are read, so it would have no effect; leave it out"
_REMEDIES = {
    "mm_encoder_outputs": "the prompt has images, sounds or videos, and only token ids are read; use a prompt of text"
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_IMPURE = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_DESCRIPTIONS: WeakKeyDictionary[PreTrainedModel | FeatureDraft, dict[str, Any]] = WeakKeyDictionary()
"""Cached, since reading a model's files takes longer than a short generation."""


def check_supported(
    model: PreTrainedModel,
    input_ids: Tensor,
    config: GenerationConfig,
    processors: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Raise ValueError for what speculative_generate does not support."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    caches = [cache for name in ("past_key_values", "cache_params") if (cache := kwargs.get(name)) is not None]
    modes = [f"{name}={value}" for name in _MODES if (value := getattr(config, name, None)) not in (None, False, 1)]
    impure = [type(processor).__name__ for processor in processors if isinstance(processor, _IMPURE)]
    mode, cache_kind, num_rows = config.get_generation_mode(), config.cache_implementation, len(input_ids)
    refusals = {
        f"{', '.join(modes) or mode.value}; unset it, for greedy search or sampling": mode
        not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        f"a batch of {num_rows} (or num_return_sequences > 1); generate one sequence at a time": num_rows != 1,
        "encoder-decoder models; use a decoder-only target": model.config.is_encoder_decoder,
        "prompts given as inputs_embeds; pass input_ids": kwargs.get("inputs_embeds") is not None,
        "padded prompts; remove the padding": mask is not None and not bool(mask.all()),
        "position_ids other than 0, 1, 2, ...; leave them out": positions is not None
        and not torch.equal(positions, torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)),
        "a cache handed in, which it would not fill; leave it out": any(map(_is_users, caches)),
        f"cache_implementation={cache_kind!r}; leave it unset": cache_kind not in (None, "dynamic"),
        f"{', '.join(impure)} (guidance_scale, watermarking_config); leave it out": bool(impure),
        f"{', '.join(_OUTPUTS)}; leave them off": any(getattr(config, name, False) for name in _OUTPUTS),
    }
    for refusal, is_refused in refusals.items():
        if is_refused:
            raise ValueError(f"speculative_generate does not support {refusal}")
    for name, value in kwargs.items():
        is_unset = value is None or value is False or (isinstance(value, Mapping) and not value)
        if not is_unset and name not in _PREPARED:
            shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"speculative_generate does not support {name} ({shape}): {_REMEDIES.get(name, _REMEDY)}")


def _is_users(cache: Any) -> bool:
    """`generate` marks a user's cache; it also is one if it holds tokens."""
    return getattr(cache, "_is_user_defined", False) or any(map(is_written, getattr(cache, "layers", ())))


def check_heads(
    policy: Policy, *, draft: PreTrainedModel | FeatureDraft, target: PreTrainedModel, config: GenerationConfig
) -> None:
    """Raise ValueError for a head that was trained with another draft, another target or another sampling (law 4.1).

    Of the sampling, temperature, top-k and top-p are compared.
    """
    is_random = bool(config.do_sample)
    sampling = {
        "temperature": float(config.temperature if config.temperature is not None else 1.0) if is_random else 0.0,
        "top_k": (config.top_k or None) if is_random else None,
        "top_p": (None if config.top_p is None or config.top_p >= 1.0 else config.top_p) if is_random else None,
    }
    for head in policy.heads:
        name = f"of the policy ({head.timing}-time)"
        remedy = "use a head that was trained for this, sample as it was trained, or pass allow_foreign_heads=True"
        models = {"draft": _description(draft), "target": _description(target)}
        check_fits(head, name, **models, sampling=sampling, remedy=remedy)


def _description(model: PreTrainedModel | FeatureDraft) -> dict[str, Any]:
    if model not in _DESCRIPTIONS:
        _DESCRIPTIONS[model] = description_of(model)
    return _DESCRIPTIONS[model]
