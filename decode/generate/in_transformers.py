"""Speculative decoding inside transformers: `target.generate(**inputs, custom_generate=decode.speculative_generate, draft_model=draft)`.

The GenerationConfig means what it means in plain `generate`: its processors (repetition penalty, min-p, bad words, …) and warpers
(temperature, top-k, top-p, …) arrive as one list and are applied to target and draft alike, each position with the tokens before it,
drafted ones included; so the output has the law of `generate` without a draft, and greedily it is the same tokens. EOS ids,
`max_new_tokens`, `min_new_tokens`, stop strings, `max_time` and stopping criteria of one's own end it; they are asked token by token.

Not supported, and refused: batches, beams, several sequences, encoder-decoders, padded or embedded prompts, a cache that already holds
tokens or is not dynamic, classifier-free guidance (it runs the model), `output_scores` and its kin. Processors must depend on their
arguments alone: each is asked about drafted prefixes that may be discarded. A streamer never reaches a custom generate: use
`SpeculativeDecoder.stream`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decode.loop.decoder import Generation, Round, SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.base import Policy
from decode.policies.length import Heuristic
from lm import CachedModel, Draws, Sampling, eos_ids_of


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
        model_kwargs: what else `generate` prepared.

    Raises:
        ValueError: something of this module's list of what is not supported.
    """
    if generation_config is None or draft_model is None:
        raise ValueError("it needs a draft, and generate: target.generate(…, custom_generate=speculative_generate, draft_model=draft)")
    _check(model, input_ids, generation_config, logits_processor or [], model_kwargs)
    decoder = SpeculativeDecoder(
        CachedModel(model),
        _drafter(draft_model, policy or Heuristic(), width=model.get_output_embeddings().weight.shape[0]),
        sampling=ProcessedSampling(0.0 if not generation_config.do_sample else 1.0, processors=logits_processor or None),
        max_draft_length=max_draft_length,
        eos_ids=eos_ids_of(generation_config),
    )
    rounds = decoder.stream(input_ids[0].tolist(), generation_config.max_length - input_ids.shape[1], generator=generator)
    generation = _until(rounds, input_ids, stopping_criteria)
    sequences = torch.cat([input_ids, input_ids.new_tensor([generation.token_ids]).view(1, -1)], dim=-1)
    return SpeculativeOutput(sequences=sequences, generation=generation) if generation_config.return_dict_in_generate else sequences  # type: ignore[arg-type]


def _drafter(model: PreTrainedModel, policy: Policy, *, width: int) -> ModelDrafter:
    """The draft under a policy, its logits cut to the target's width."""
    has_heads = policy.fed_head is not None or policy.drawn_head is not None
    return ModelDrafter(CachedModel(model, vocab_size=width, with_hidden=has_heads), policy)


def _until(rounds: Any, input_ids: Tensor, stopping_criteria: StoppingCriteriaList | None) -> Generation:
    """The generation, cut after the token at which a criterion says stop; its last round keeps what it really drafted."""
    own = (EosTokenCriteria, MaxLengthCriteria)
    criteria = StoppingCriteriaList([one for one in stopping_criteria or [] if not isinstance(one, own)])
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


def _check(model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, processors: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for what speculative_generate does not support."""
    mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    refusals = {
        f"num_beams={config.num_beams}; set num_beams=1": (config.num_beams or 1) > 1,
        f"a batch of {len(input_ids)} (or num_return_sequences > 1); generate one sequence at a time": len(input_ids) != 1,
        "encoder-decoder models": model.config.is_encoder_decoder,
        "prompts given as inputs_embeds; pass input_ids": "inputs_embeds" in kwargs,
        "padded prompts; drop the padding": mask is not None and not bool(mask.all()),
        "a cache that already holds tokens; pass the whole sequence": cache is not None and int(cache.get_seq_length()) > 0,
        f"cache_implementation={config.cache_implementation!r}; leave it unset": config.cache_implementation not in (None, "dynamic"),
        "classifier-free guidance; set guidance_scale=1": any(
            isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor) for one in processors
        ),
        f"{', '.join(outputs)}; leave them off": any(getattr(config, name, False) for name in outputs),
    }
    for what, is_asked in refusals.items():
        if is_asked:
            raise ValueError(f"speculative_generate does not support {what}")
