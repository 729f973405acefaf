"""What `speculative_generate` refuses (its docstring lists it): what it would drop without a word, and heads that do
not fit.
"""

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
from lm.models.probe import is_written

_PREPARED = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep"}
)
"""Keywords that `generate` prepares by itself; each is checked where a user's own would matter."""
_MODES = (
    "num_beams",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "force_words_ids",
)
_REMEDY = "it would be dropped without a word, since only token ids are read; leave it out"
_IMAGES = "these are the images, sounds or videos of the prompt, and only token ids are read; give a prompt of text"
_REMEDIES = {"mm_encoder_outputs": _IMAGES}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_IMPURE = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_DESCRIPTIONS: WeakKeyDictionary[PreTrainedModel | FeatureDraft, dict[str, Any]] = WeakKeyDictionary()
"""Descriptions of models whose heads were checked before: reading a model's files takes longer than a short generation.
"""


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
    modes = ", ".join(
        f"{name}={value}" for name in _MODES if (value := getattr(config, name, None)) not in (None, False, 1)
    )
    impure = [type(processor).__name__ for processor in processors if isinstance(processor, _IMPURE)]
    mode = config.get_generation_mode()
    refusals = {
        f"{modes or mode.value}; unset it, for greedy search or sampling": mode
        not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        f"a batch of {len(input_ids)} (or num_return_sequences > 1); generate one sequence at a time": len(input_ids)
        != 1,
        "encoder-decoder models; take a decoder-only target": model.config.is_encoder_decoder,
        "prompts given as inputs_embeds; pass input_ids": kwargs.get("inputs_embeds") is not None,
        "padded prompts; drop the padding": mask is not None and not bool(mask.all()),
        "position_ids other than 0, 1, 2, …; leave them out": positions is not None and not _is_counting(positions),
        "a cache handed in, which it would not fill; leave it out": any(_is_own(cache) for cache in caches),
        f"cache_implementation={config.cache_implementation!r}; leave it unset": config.cache_implementation
        not in (None, "dynamic"),
        (
            f"{', '.join(impure)} (guidance_scale, watermarking_config), which runs the model or remembers; leave it "
            "off"
        ): bool(impure),
        f"{', '.join(_OUTPUTS)}; leave them off": any(getattr(config, name, False) for name in _OUTPUTS),
    }
    unread = {
        name: value
        for name, value in kwargs.items()
        if value is not None
        and value is not False
        and name not in _PREPARED
        and not (isinstance(value, Mapping) and not value)
    }
    refusals[
        "; ".join(f"{name} ({_described(value)}): {_REMEDIES.get(name, _REMEDY)}" for name, value in unread.items())
    ] = bool(unread)
    for refusal, is_asked in refusals.items():
        if is_asked:
            raise ValueError(f"speculative_generate does not support {refusal}")


def _is_counting(positions: Tensor) -> bool:
    """Are the positions those of a text that starts at 0?"""
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def _is_own(cache: Any) -> bool:
    """Was the cache handed in? `generate` marks such a one; one that holds tokens is nobody else's either."""
    return getattr(cache, "_is_user_defined", False) or any(map(is_written, getattr(cache, "layers", ())))


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_heads(
    policy: Policy, *, draft: PreTrainedModel | FeatureDraft, target: PreTrainedModel, config: GenerationConfig
) -> None:
    """Raise ValueError for a head that was trained with another draft, another target or another sampling (law 4.1).

    Sampling is compared as far as a head's `Sampling` goes: temperature, top-k and top-p.
    """
    is_random = bool(config.do_sample)
    sampling = {
        "temperature": float(config.temperature if config.temperature is not None else 1.0) if is_random else 0.0,
        "top_k": (config.top_k or None) if is_random else None,
        "top_p": (None if config.top_p is None or config.top_p >= 1.0 else config.top_p) if is_random else None,
    }
    for head in policy.heads:
        described = [_description(model) for model in (draft, target)]
        name = f"of the policy ({head.timing}-time)"
        remedy = "use a head that was trained for this, sample as it was trained, or pass allow_foreign_heads=True"
        check_fits(head, name, draft=described[0], target=described[1], sampling=sampling, remedy=remedy)


def _description(model: PreTrainedModel | FeatureDraft) -> dict[str, Any]:
    """The model's description, made at its first use."""
    if model not in _DESCRIPTIONS:
        _DESCRIPTIONS[model] = description_of(model)
    return _DESCRIPTIONS[model]
