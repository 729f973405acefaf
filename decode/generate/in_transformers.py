"""Speculative decoding inside transformers: `target.generate(**inputs, custom_generate=decode.speculative_generate, draft_model=draft)`.

The GenerationConfig means what it means in plain `generate`: its processors (repetition penalty, min-p, bad words, …) and warpers
(temperature, top-k, top-p, …) arrive as one list and are applied to target and draft alike, each position with the tokens before it,
drafted ones included; so the output has the law of `generate` without a draft. Greedily it is the same tokens in float32 and float64. In
bfloat16 one forward of several tokens rounds otherwise than several of one, and near ties may fall the other way: of 20 prompts with up to
128 new tokens 1 (five tokens a draft) and 2 (transformers' heuristic) ended otherwise, at logits that were within 0.08 of each other.

What is asked of it, one of three ways:

    means the same    EOS ids, `max_new_tokens`, `min_new_tokens`, `max_time`, processors and stopping criteria of one's own, asked token
                      by token. Criteria are given scores=None, as `generate` gives them unless `output_scores` is set. Processors must
                      depend on their arguments alone: each is asked about drafted prefixes that may be discarded.
    changes nothing   `use_cache`, `logits_to_keep`, `prefill_chunk_size`, compilation settings; negative prompts without guidance;
                      `tokenizer` and `assistant_tokenizer`, which `generate` drops. So it refuses `stop_strings` itself: give
                      `StopStringCriteria` among the stopping criteria.
    is refused        with a ValueError that names it: every other keyword that is not None (`pixel_values`, `token_type_ids`, …);
                      `streamer`, `assistant_model`, `synced_gpus`; batches, several sequences, beams and whatever else is neither greedy
                      search nor sampling; encoder-decoders; padding, embedded prompts, positions of one's own; a cache handed in, or one
                      that is not dynamic; classifier-free guidance and SynthID watermarks, which are not functions of the tokens;
                      `output_scores` and its kin; a prompt and `max_new_tokens` that together exceed the target's
                      `max_position_embeddings`, where plain `generate` goes on beyond what the model was made for.

With `return_dict_in_generate` the result holds the sequences and the rounds; its `past_key_values` is None.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    GenerationMode,
    MaxLengthCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decode.loop.decoder import Generation, Round, SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.base import Policy
from decode.policies.length import Heuristic
from lm import CachedModel, Draws, Sampling, eos_ids_of

_PREPARED = frozenset({"attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep"})
"""Keywords that `generate` prepares by itself; each is checked where a user's own would matter."""
_MODES = ("num_beams", "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "penalty_alpha", "dola_layers", "force_words_ids")
_REMEDY = "it would be dropped without a word, since only token ids are read; leave it out"
_REMEDIES = {
    "streamer": "generate hands it on to no custom_generate; take the rounds of SpeculativeDecoder.stream",
    "assistant_model": "generate hands it on to no custom_generate; name it draft_model",
    "synced_gpus": "a loop that drafts keeps no other process in step; unshard the model, or leave it out",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_IMPURE = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


@dataclass(frozen=True)
class ProcessedSampling(Sampling):
    """Logits to probabilities by a list of transformers' processors, which look at the tokens before each position."""

    processors: LogitsProcessorList | None = None

    def processed(self, logits: Float[Tensor, "rows vocab"], token_ids: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """Row i follows all but the last rows - 1 - i of `token_ids`."""
        ids = torch.tensor([token_ids], device=logits.device)
        first = len(token_ids) - len(logits) + 1
        logits = logits.to(torch.float32, copy=True)  # as transformers does, and processors may write in place
        rows = [self.processors(ids[:, : first + i], logits[i : i + 1]) for i in range(len(logits))] if self.processors else [logits]  # type: ignore[arg-type]
        return torch.cat(rows)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `return_dict_in_generate` returns: transformers' own fields, and the rounds that the sequence was made in."""

    generation: Generation | None = None


@torch.no_grad()
def speculative_generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch position"],
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft_model: PreTrainedModel | None = None,
    policy: Policy | None = None,
    max_draft_length: int = 20,
    generator: torch.Generator | Draws | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | Int[Tensor, "batch length"]:
    """The prompt and what the target says after it, as `generate` returns them.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: what `generate` passes: the target, one prompt, …
        draft_model: drafts; its logits may be narrower or wider than the target's, ids must mean the same tokens.
        policy: when to stop drafting; None: transformers' heuristic.
        max_draft_length: upper bound of every round.
        generator: source of chance; None: torch's global one, as `generate` uses.
        model_kwargs: what else `generate` prepared or was given.

    Raises:
        ValueError: something of this module's list of what is refused.
    """
    if generation_config is None or draft_model is None:
        raise ValueError("it needs a draft, and generate: target.generate(…, custom_generate=speculative_generate, draft_model=draft)")
    _check(model, input_ids, generation_config, logits_processor or [], model_kwargs | _dropped_by_generate())
    ends = _ends_of(stopping_criteria or [], generation_config)
    decoder = SpeculativeDecoder(
        CachedModel(model),
        _drafter(draft_model, policy or Heuristic(), width=model.get_output_embeddings().weight.shape[0]),
        sampling=ProcessedSampling(0.0 if not generation_config.do_sample else 1.0, processors=logits_processor or None),
        max_draft_length=max_draft_length,
        eos_ids=ends.eos_ids,
    )
    # a token is emitted before anybody is asked whether to stop, as in `generate`
    rounds = decoder.stream(input_ids[0].tolist(), max(1, ends.max_length - input_ids.shape[1]), generator=generator)
    generation = _until(rounds, input_ids, ends.criteria)
    sequences = torch.cat([input_ids, input_ids.new_tensor([generation.token_ids]).view(1, -1)], dim=-1)
    return SpeculativeOutput(sequences=sequences, generation=generation) if generation_config.return_dict_in_generate else sequences  # type: ignore[arg-type]


def _drafter(model: PreTrainedModel, policy: Policy, *, width: int) -> ModelDrafter:
    """The draft under a policy, its logits cut to the target's width."""
    has_heads = policy.fed_head is not None or policy.drawn_head is not None
    return ModelDrafter(CachedModel(model, vocab_size=width, with_hidden=has_heads), policy)


class _Ends(NamedTuple):
    """What ends a generation."""

    eos_ids: frozenset[int]
    max_length: int
    """Of prompt and answer."""
    criteria: StoppingCriteriaList
    """Those that have to be asked."""


def _ends_of(criteria: Sequence[StoppingCriteria], config: GenerationConfig) -> _Ends:
    """EOS ids and length as the loop knows them itself: those of the criteria, since a user's own take the place of the config's."""
    eos = [one for one in criteria if isinstance(one, EosTokenCriteria)]
    lengths = [one for one in criteria if isinstance(one, MaxLengthCriteria)]
    return _Ends(
        eos_ids=frozenset(chain.from_iterable(one.eos_token_id.flatten().tolist() for one in eos)) if eos else eos_ids_of(config),
        max_length=min(one.max_length for one in lengths) if lengths else config.max_length,  # type: ignore[arg-type]
        criteria=StoppingCriteriaList([one for one in criteria if one not in (*eos, *lengths)]),
    )


def _until(rounds: Iterable[Round], input_ids: Tensor, criteria: StoppingCriteriaList) -> Generation:
    """The generation, cut after the token at which a criterion says stop; its last round keeps what it really drafted."""
    played: list[Round] = []
    for one in rounds:
        played.append(one)
        tokens = list(chain.from_iterable(each.emitted for each in played))
        for length in range(len(tokens) - len(one.emitted) + 1, len(tokens) + 1) if criteria else ():
            ids = torch.cat([input_ids, input_ids.new_tensor([tokens[:length]])], dim=-1)
            if bool(criteria(ids, None).all()):
                played[-1] = one.cut(len(one.emitted) - (len(tokens) - length))
                return Generation.of(played)
    return Generation.of(played)


def _dropped_by_generate() -> dict[str, Any]:
    """What the `generate` that called us was given and hands on to nobody: a reader of its streamer, say, would wait for ever.

    No signature can ask for these keywords, so they are read where they are.
    """
    generate, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    given = {} if frame is None else {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
    return {name: value for name, value in given.items() if value is not False}


def _check(model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, processors: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for what speculative_generate does not support."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    caches = [cache for name in ("past_key_values", "cache_params") if (cache := kwargs.get(name)) is not None]
    modes = ", ".join(f"{name}={value}" for name in _MODES if (value := getattr(config, name, None)) not in (None, False, 1))
    impure = [type(one).__name__ for one in processors if isinstance(one, _IMPURE)]
    refusals = {
        f"{modes or config.get_generation_mode().value}; unset it, for greedy search or sampling": config.get_generation_mode()
        not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        f"a batch of {len(input_ids)} (or num_return_sequences > 1); generate one sequence at a time": len(input_ids) != 1,
        "encoder-decoder models; take a decoder-only target": model.config.is_encoder_decoder,
        "prompts given as inputs_embeds; pass input_ids": kwargs.get("inputs_embeds") is not None,
        "padded prompts; drop the padding": mask is not None and not bool(mask.all()),
        "position_ids other than 0, 1, 2, …; leave them out": positions is not None and not _is_counting(positions),
        "a cache handed in, which it would not fill; leave it out": any(_is_own(cache) for cache in caches),
        f"cache_implementation={config.cache_implementation!r}; leave it unset": config.cache_implementation not in (None, "dynamic"),
        f"{', '.join(impure)} (guidance_scale, watermarking_config), which runs the model or remembers; leave it off": bool(impure),
        f"{', '.join(_OUTPUTS)}; leave them off": any(getattr(config, name, False) for name in _OUTPUTS),
    }
    others = {name: value for name, value in kwargs.items() if value is not None and name not in _PREPARED}
    refusals["; ".join(f"{name} ({_described(value)}): {_REMEDIES.get(name, _REMEDY)}" for name, value in others.items())] = bool(others)
    for what, is_asked in refusals.items():
        if is_asked:
            raise ValueError(f"speculative_generate does not support {what}")


def _is_counting(positions: Tensor) -> bool:
    """Are the positions those of a text that starts at 0?"""
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def _is_own(cache: Any) -> bool:
    """Was the cache handed in? `generate` marks such a one; one that holds tokens is nobody else's either."""
    return getattr(cache, "_is_user_defined", False) or int(cache.get_seq_length()) > 0


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
