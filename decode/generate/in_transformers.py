"""Speculative decoding inside transformers: `target.generate(**inputs,
custom_generate=decode.speculative_generate, draft_model=draft)`.

The GenerationConfig means what it means in plain `generate`: processors and warpers arrive as one list and are
applied to target and draft, each position with the tokens before it, drafted ones included. So the output has the
distribution of `generate` without a draft (docs/transformers.md, also on greedy output in bfloat16).

    same as in generate   EOS ids, `max_new_tokens`, `min_new_tokens`, `max_time`, and custom processors and stopping
                          criteria, which are called token by token. Criteria get scores=None, as from `generate` unless
                          `output_scores` is set. Processors must depend on their arguments alone, since they also see
                          drafted prefixes that are discarded.
    no effect             `use_cache`, `logits_to_keep`, `prefill_chunk_size`, compilation settings; negative prompts
                          without guidance; and what `generate` passes to no callable: its own `streamer` (bind one with
                          functools.partial), `assistant_model`, `synced_gpus`, `tokenizer`, `assistant_tokenizer`. It
                          therefore refuses `stop_strings`: use `StopStringCriteria` among the stopping criteria.
    refused               with a ValueError that names it: every other keyword that is not None, and what `_check_call`
                          lists; a text that exceeds the target's context; a head that was trained with another draft,
                          target or sampling, unless `allow_foreign_heads`.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    MaxLengthCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from configs.schema import ModelSource
from decode.loop.decoder import Generation, Round, SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.loop.models import Drafting, draft_of, target_of
from decode.policies.base import Policy
from decode.policies.engines import Assisted
from decode.policies.plain import Heuristic
from decode.policies.registry import parse_policy
from heads.model.fits import check_fits, description_of
from lm import CachedModel, FeatureDraft, Sampler, Sampling, load_model
from lm.forwards import eos_ids_of, num_logits_of
from lm.selfcheck import is_written

# transformers' settings of assisted generation (`decode.policies.engines.Assisted`). `generate` fills in these
# defaults, so only other values show that the caller set them.
_ASSISTED: dict[str, int | float | str] = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
# the second and the third are the same here: every generation starts from `num_assistant_tokens`
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")
# keywords that `generate` prepares by itself
_PREPARED = ("attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep")
_MODES = (
    *("num_beams", "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "penalty_alpha", "dola_layers"),
    "force_words_ids",
)
_CALL = "target.generate(…, custom_generate=speculative_generate, draft_model=draft)"
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# processors that are not functions of the tokens
_IMPURE = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
# cached, since reading a model's files takes longer than a short generation
_DESCRIPTIONS: WeakKeyDictionary[PreTrainedModel | FeatureDraft, Mapping[str, object]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ProcessedSampling(Sampling):
    """Logits to probabilities by transformers' processors, which read the tokens before each position."""

    processors: LogitsProcessorList | None = None
    num_ids: int = 0
    """Width of the logits that plain `generate` gives the processors; narrower logits are padded with probability 0."""

    def processed(self, logits: Float[Tensor, "rows vocab"], token_ids: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """Row i follows all but the last rows - 1 - i of `token_ids`."""
        if not self.processors:
            return logits.float()  # as transformers does
        ids = torch.tensor([token_ids], device=logits.device)
        first = len(token_ids) - len(logits) + 1
        logits = logits.to(torch.float32, copy=True)  # processors may write in place
        process: Any = self.processors  # transformers' annotations ask for a LongTensor
        width = logits.shape[-1]
        logits = torch.nn.functional.pad(logits, (0, max(0, self.num_ids - width)), value=-torch.inf)
        rows = torch.cat([process(ids[:, : first + i], logits[i : i + 1]) for i in range(len(logits))])
        if not bool((rows[:, :width] > -torch.inf).any(-1).all()):
            raise ValueError(
                f"the processors leave no token among the {width} ids that draft and target share; check forced, "
                "suppressed and EOS ids"
            )
        return rows[:, :width]


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output with `return_dict_in_generate`: transformers' fields, without `past_key_values`, and the rounds."""

    generation: Generation | None = None


@torch.no_grad()
def speculative_generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch position"],
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft_model: Drafting | str | PathLike[str] | None = None,
    policy: Policy | str | None = None,
    max_draft_length: int = 20,
    allow_foreign_heads: bool = False,
    vocab_size: int | None = None,
    generator: torch.Generator | Sampler | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | Int[Tensor, "batch length"]:
    """The prompt and the target's continuation; ValueError for what this module's docstring lists as refused.

    Args, beside those that `generate` passes:
        draft_model: a model with the target's ids or its path (loaded at every call), or a feature draft of the target.
        policy: as an object or as for `--policy`; None: transformers' assisted generation as set, else its heuristic.
        allow_foreign_heads: accept a head that was trained with other models or another sampling.
        vocab_size: size of the tokenizer, if the target's logits are padded beyond the ids that the draft takes.
        generator: source of randomness; None: torch's global one, as `generate` uses.
        streamer: gets the prompt and each round; pass it by `functools.partial`.
    """
    draft = _loaded(draft_model, model)
    if (config := generation_config) is None:
        raise ValueError(f"speculative_generate is not called alone; call {_CALL}")
    _check_call(model, input_ids, config, logits_processor or [], model_kwargs)
    policy = _policy_of(policy, config)
    if not allow_foreign_heads:
        _check_heads(policy, draft, model, config)
    target = target_of(model, draft, vocab_size=vocab_size)
    drafter = ModelDrafter(draft_of(draft, target), policy)
    sampling = _sampling_of(logits_processor, config, model)
    decoder = SpeculativeDecoder(target, drafter, sampling=sampling, max_draft_length=max_draft_length)
    with closing(_rounds(decoder, input_ids, stopping_criteria or [], config, generator)) as rounds:
        generation = Generation.of(rounds if streamer is None else _streamed(rounds, input_ids, streamer))
    return _output(input_ids, generation, has_rounds=bool(config.return_dict_in_generate))


def _output(input_ids: Tensor, generation: Generation, *, has_rounds: bool) -> SpeculativeOutput | Tensor:
    new_ids = torch.tensor([generation.token_ids], dtype=torch.long, device=input_ids.device).view(1, -1)
    sequences: Any = torch.cat([input_ids, new_ids], dim=-1)  # transformers' annotations ask for a LongTensor
    return SpeculativeOutput(sequences, generation=generation) if has_rounds else sequences


def _loaded(draft: object, target: PreTrainedModel) -> Drafting:
    """The draft; one at a path is loaded in the target's dtype and onto its device. ValueError for what is no model."""
    if isinstance(draft, str | PathLike):
        dtype: Any = str(target.dtype).removeprefix("torch.")
        return load_model(ModelSource(path=str(draft), dtype=dtype), device=target.device)
    if not isinstance(draft, Drafting):
        raise ValueError(f"speculative_generate needs a draft model, not {draft!r:.80}; call {_CALL}")
    return draft


def _policy_of(policy: Policy | str | None, config: GenerationConfig) -> Policy:
    """The policy of a call, from its keyword or from transformers' settings of assisted generation.

    Raises:
        ValueError: both are given, a policy does not parse, or a schedule is unknown.
    """
    known = {name: getattr(config, name, None) for name in _ASSISTED}
    given = {name: value for name, value in known.items() if value not in (None, _ASSISTED[name])}
    if policy is not None and given:
        raise ValueError(f"{', '.join(given)} and a policy are both set; leave one of them out")
    if isinstance(policy, str):
        return parse_policy(policy)
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy is {policy!r:.80}; it must be a Policy, or text such as 'fixed_length:k=4'")
    if not given:
        return policy or Heuristic()
    settings = _ASSISTED | given
    schedule = settings.pop("num_assistant_tokens_schedule")
    if schedule not in _SCHEDULES:
        raise ValueError(f"num_assistant_tokens_schedule is {schedule!r}; it must be one of {', '.join(_SCHEDULES)}")
    return Assisted(**settings, is_heuristic=schedule != "constant")


def _sampling_of(processors: LogitsProcessorList | None, config: GenerationConfig, model: PreTrainedModel) -> Sampling:
    """The sampling of plain `generate`; without processors other than warpers it reads no token, and costs less."""
    warped = Sampling.of(processors or [])
    if not config.do_sample:
        warped = None if processors else Sampling(temperature=0.0)
    return warped or ProcessedSampling(float(config.do_sample), processors=processors, num_ids=num_logits_of(model))


def _streamed(rounds: Iterator[Round], input_ids: Tensor, streamer: BaseStreamer) -> Iterator[Round]:
    streamer.put(input_ids.cpu())
    for round_ in rounds:
        streamer.put(torch.tensor(round_.emitted))
        yield round_
    streamer.end()


def _rounds(
    decoder: SpeculativeDecoder,
    input_ids: Tensor,
    criteria: Sequence[StoppingCriteria],
    config: GenerationConfig,
    generator: torch.Generator | Sampler | None,
) -> Generator[Round, None, None]:
    """Rounds of the generation, the last one truncated after the token at which a criterion stops.

    Close it where a criterion or a streamer raises, since a traceback would keep the models in use.
    """
    # the loop handles EOS ids and lengths, where custom criteria replace the config's; the others are called here
    eos = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    own_ids = frozenset(chain.from_iterable(ids.flatten().tolist() for ids in eos))
    decoder.eos_ids = own_ids if eos else eos_ids_of(config)
    lengths = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    others = StoppingCriteriaList(
        criterion for criterion in criteria if not isinstance(criterion, EosTokenCriteria | MaxLengthCriteria)
    )
    max_length: int = min(lengths) if lengths else config.max_length  # type: ignore[assignment]
    # one token is emitted before the first criterion is called, as in `generate`
    num_new = max(1, max_length - input_ids.shape[1])
    ids = input_ids
    with closing(decoder.stream(input_ids[0].tolist(), num_new, generator=generator)) as rounds:
        for round_ in rounds:
            for index, token in enumerate(round_.emitted) if others else ():
                ids = torch.cat([ids, ids.new_tensor([[token]])], dim=-1)
                if bool(others(ids, None).all()):
                    yield round_.truncated(index + 1)
                    return
            yield round_


def _check_call(
    model: PreTrainedModel,
    input_ids: Tensor,
    config: GenerationConfig,
    processors: Sequence[object],
    kwargs: dict[str, Any],
) -> None:
    """Raise ValueError for the first thing in this call that is not supported."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        modes = [f"{name}={value}" for name in _MODES if (value := getattr(config, name, None)) not in (None, False, 1)]
        raise _unsupported(f"{', '.join(modes) or mode.value}; unset it, for greedy search or sampling")
    if len(input_ids) != 1:
        raise _unsupported(
            f"a batch of {len(input_ids)} (or num_return_sequences > 1); generate one sequence at a time"
        )
    if model.config.is_encoder_decoder:
        raise _unsupported("encoder-decoder models; use a decoder-only target")
    if kwargs.get("inputs_embeds") is not None:
        raise _unsupported("prompts given as inputs_embeds; pass input_ids")
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise _unsupported("padded prompts; remove the padding")
    positions = kwargs.get("position_ids")
    if positions is not None and bool((positions != torch.arange(positions.shape[-1], device=positions.device)).any()):
        raise _unsupported("position_ids other than 0, 1, 2, ...; leave them out")
    if any(map(_is_users, (kwargs.get("past_key_values"), kwargs.get("cache_params")))):
        raise _unsupported("a cache handed in, which it would not fill; leave it out")
    if config.cache_implementation not in (None, "dynamic"):
        raise _unsupported(f"cache_implementation={config.cache_implementation!r}; leave it unset")
    if impure := [type(processor).__name__ for processor in processors if isinstance(processor, _IMPURE)]:
        raise _unsupported(f"{', '.join(impure)} (guidance_scale, watermarking_config); leave it out")
    if any(getattr(config, name, False) for name in _OUTPUTS):
        raise _unsupported(f"{', '.join(_OUTPUTS)}; leave them off")
    for name, value in kwargs.items():
        is_unset = value is None or value is False or (isinstance(value, Mapping) and not value)
        if not is_unset and name not in _PREPARED:
            shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            what = "images, sounds or videos" if name == "mm_encoder_outputs" else f"{name} ({shape})"
            raise _unsupported(f"{what}: only token ids are read, so it would have no effect; leave it out")


def _unsupported(what: str) -> ValueError:
    return ValueError(f"speculative_generate does not support {what}")


def _is_users(cache: object) -> bool:
    """True for a cache of the caller: `generate` marks it; the caches that `generate` makes hold no tokens yet."""
    return getattr(cache, "_is_user_defined", False) or any(map(is_written, getattr(cache, "layers", ())))


def _check_heads(policy: Policy, draft: Drafting, target: PreTrainedModel, config: GenerationConfig) -> None:
    """Raise ValueError for a head trained with another draft, target, temperature, top-k or top-p (law 4.1)."""
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    top_p = None if config.top_p is None or config.top_p >= 1.0 else config.top_p
    sampling = Sampling(temperature, config.top_k or None, top_p) if config.do_sample else Sampling(temperature=0.0)
    drafting = draft.model if isinstance(draft, CachedModel) else draft
    for head in policy.heads:
        for model in (drafting, target):
            if model not in _DESCRIPTIONS:
                _DESCRIPTIONS[model] = description_of(model)
        check_fits(
            head.provenance,
            f"of the policy ({head.timing}-time)",
            draft=_DESCRIPTIONS[drafting],
            target=_DESCRIPTIONS[target],
            sampling=sampling.as_dict(),
            remedy="use a head that was trained for this, sample as it was trained, or pass allow_foreign_heads=True",
        )
