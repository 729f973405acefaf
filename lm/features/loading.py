"""Feature drafts from released directories, read strictly and checked to fit the target.

A reduced vocabulary comes as two maps: `d2t`, offsets (the target's id of entry i is i + d2t[i]), and `t2d`, a
mask over the target's ids. Without `lm_head` its rows are the target's own.
"""

import torch
from accelerate import init_empty_weights
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from configs.schema import ModelSource
from lm.features.base import FeatureDraft, draft_vocab_size
from lm.features.dspark import DSpark
from lm.features.eagle import Eagle, Eagle3
from lm.features.glide import Glide
from lm.features.released import MTP, Released, draft_refusal, is_ids, max_positions
from lm.linears import EightBitLinear, pack, replace_linears
from lm.sampling import FLOATS

_OTHER_TARGET = "use it with the target that it was trained for"


def feature_draft_of(source: ModelSource, target: PreTrainedModel) -> FeatureDraft:
    """The feature draft in evaluation mode, bound to the target, and on the device of its LM head whatever
    `device_map` says. ValueError for weights that are pickled, missing, surplus, or of another shape, a draft
    that does not fit the target, or a quantisation that is not of 8 bits.
    """
    if source.quantization not in (None, "8bit"):
        remedy = "of feature drafts it is 8bit or null"
        raise draft_refusal(source.path, f"quantization is {source.quantization}", remedy)
    dtype = None if source.dtype == "auto" else getattr(torch, source.dtype)
    if source.path.endswith(MTP):
        try:
            from lm.features.mtp import mtp_of  # older transformers lack what it imports
        except ImportError as error:
            raise draft_refusal(source.path, "this transformers has no MTP modules", "install 5.23 or later") from error
        draft: FeatureDraft = mtp_of(source, target, dtype)
    else:
        released = Released(source)
        make = {"eagle": _eagle, "eagle3": _eagle3, "glide": _glide, "dspark": _dspark}
        with init_empty_weights():
            draft = make[released.layout or "eagle"](released, target.config.get_text_config())
        _reduce(draft, released)
        _fill(draft, released, dtype)
    draft.name_or_path = source.path
    draft.to(next(target.get_output_embeddings().parameters()).device).eval().bind(target)
    if source.quantization is not None:
        replace_linears(draft, EightBitLinear)
    if source.packed:
        pack(draft, source.path)
    return draft


def _fill(draft: FeatureDraft, released: Released, dtype: torch.dtype | None) -> None:
    """Give the draft all of its weights, and nothing else. Buffers (RoPE frequencies) keep their dtype."""
    expected = draft.state_dict()
    tensors = released.tensors
    remedy = "check that the download is complete, and that config.json belongs to these weights"
    for verb, names in (("lacks", expected.keys() - tensors.keys()), ("also has", tensors.keys() - expected.keys())):
        released.require(not names, f"it {verb} {len(names)} tensors, first {min(names, default='')}", remedy)
    for name, tensor in tensors.items():
        shape = expected[name].shape
        released.require(tensor.shape == shape, f"{name} is {list(tensor.shape)}, expected {list(shape)}", remedy)
        is_finite = tensor.dtype in FLOATS and bool(tensor.isfinite().all())
        released.require(is_finite, f"{name} is {tensor.dtype} or has NaN, and finite floats are read", remedy)
    dtype = dtype or next(iter(tensors.values())).dtype
    draft.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)


def _eagle(released: Released, of_target: PretrainedConfig) -> FeatureDraft:
    config = released.layer(LlamaConfig)
    _check_fits(released, of_target, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    has_embedding = "embed_tokens.weight" in released.tensors
    return Eagle(config, has_embedding=has_embedding, has_fc_bias="fc.bias" in released.tensors)


def _eagle3(released: Released, of_target: PretrainedConfig) -> FeatureDraft:
    keys = released.keys
    tensors = released.tensors
    num_layers = of_target.num_hidden_layers
    is_silent = "speculators_model_type" in keys and "norm_before_residual" not in keys
    subject = "config.json lacks norm_before_residual, for which readers assume different values"
    released.require(not is_silent, subject, "write true or false")
    is_qwen3 = "layers.0.self_attn.q_norm.weight" in tensors
    config: Qwen3Config | LlamaConfig = released.layer(Qwen3Config) if is_qwen3 else released.layer(LlamaConfig)
    target_size = getattr(config, "target_hidden_size", None) or config.hidden_size
    _check_fits(released, of_target, hidden_size=target_size, vocab_size=config.vocab_size)
    nested = keys.get("eagle_config") or {}
    reads_states = isinstance(nested, dict) and nested.get("use_aux_hidden_state", True)
    remedy = "use a draft that reads three of the target's states"
    released.require(reads_states, f"its eagle_config is {nested!r:.80}", remedy)
    written = keys.get("eagle_aux_hidden_state_layer_ids") or []
    ids = written or [2, num_layers // 2, num_layers - 3]
    first = 0 if written else 1
    released.require(
        is_ids(ids) and all(layer_id in range(first, num_layers) for layer_id in ids),
        f"it reads the target after layers {ids!r:.80}, and the target has {num_layers}",
        f"write whole numbers from 0, the embedding, to {num_layers - 1} as eagle_aux_hidden_state_layer_ids in its "
        f"config.json (readers disagree whether what follows the last is normed), or {_OTHER_TARGET}",
    )
    reads_once = "layers.1.hidden_norm.weight" not in tensors
    released.require(reads_once, "each of its layers reads the embedding again", "use a draft of one layer")
    draft = Eagle3(config, tuple(ids), target_size=target_size, **_own_vocabulary(released, config, of_target))
    config.max_position_embeddings = max_positions(keys)
    return draft


def _own_vocabulary(released: Released, config: PretrainedConfig, of_target: PretrainedConfig) -> dict[str, bool]:
    """Whether a draft has input embeddings and an LM head."""
    has = {name: f"{name}.weight" in released.tensors for name in ("embed_tokens", "lm_head")}
    lacks = next((name for name in has if not has[name]), None)
    is_possible = lacks is None or config.hidden_size == of_target.hidden_size
    released.require(is_possible, f"it is not as wide as the target and has no {lacks}", f"use a release with {lacks}")
    return {"has_embedding": has["embed_tokens"], "has_head": has["lm_head"]}


def _glide(released: Released, of_target: PretrainedConfig) -> FeatureDraft:
    config = released.layer(LlamaConfig)
    config.tie_word_embeddings = config.tie_word_embeddings and "lm_head.weight" not in released.tensors
    num_heads = config.large_num_attention_heads
    _check_fits(released, of_target, num_attention_heads=num_heads, vocab_size=config.vocab_size)
    width = num_heads * (getattr(of_target, "head_dim", None) or of_target.hidden_size // num_heads)
    subject = f"its large_hidden_size is {config.large_hidden_size}, and the target's keys have {width} numbers"
    released.require(config.large_hidden_size == width, subject, _OTHER_TARGET)
    num_own = config.num_hidden_layers
    num_layers = of_target.num_hidden_layers
    released.require(num_own <= num_layers, f"it has {num_own} layers and the target {num_layers}", _OTHER_TARGET)
    return Glide(config, num_layers)


def _dspark(released: Released, of_target: PretrainedConfig) -> FeatureDraft:
    num_layers = of_target.num_hidden_layers
    required = ("block_size", "target_layer_ids", "num_target_layers", "mask_token_id", "markov_rank")
    lacks = [name for name in (*required, "enable_confidence_head") if name not in released.keys]
    released.require(not lacks, f"config.json lacks {', '.join(lacks)}", "write what the draft was trained with")
    config = released.layer(Qwen3Config)
    num_made_for = config.num_target_layers or num_layers
    _check_fits(
        released,
        of_target,
        hidden_size=config.hidden_size,
        num_hidden_layers=num_made_for,
        vocab_size=config.vocab_size,
    )
    _check_block(released, config, last=num_layers - 1)
    return DSpark(config, **_own_vocabulary(released, config, of_target))


def _check_block(released: Released, config: Qwen3Config, *, last: int) -> None:
    """Check the keys that describe a block; `last`: index of the target's last layer."""

    def require(name: str, is_valid: bool, expected: str) -> None:
        released.require(is_valid, f"its {name} is {getattr(config, name)}", f"it must be {expected}")

    is_from_anchor = getattr(config, "sample_from_anchor", True)
    minimum = 1 if is_from_anchor else 2
    is_length = config.block_size in range(minimum, config.max_position_embeddings)
    require("block_size", is_length, f"a number of tokens, at least {minimum}")
    is_token = config.mask_token_id in range(config.vocab_size)
    require("mask_token_id", is_token, f"an id below {config.vocab_size}")
    ids = config.target_layer_ids
    is_rising = is_ids(ids) and bool(ids) and ids == sorted({*ids})
    require(
        "target_layer_ids",  # what follows the target's last layer is normed in some readers and not in others
        is_rising and all(layer_id in range(-1, last) for layer_id in ids),
        f"rising numbers from -1, the embedding (0 as speculators counts), to {last - 1}, since readers disagree "
        f"whether what follows the last layer, {last}, is normed",
    )
    begins_at_anchor = config.markov_head_type == "rnn" and hasattr(config, "speculators_model_type")
    require(
        "sample_from_anchor",
        is_from_anchor or not begins_at_anchor,
        "true for a recurrent Markov head (rnn), whose state speculators begins at the anchor",
    )
    types = {"full_attention", "sliding_attention"} if config.sliding_window else {"full_attention"}
    require(
        "layer_types",
        set(config.layer_types or ()) <= types,
        "full_attention, or sliding_attention with a sliding_window, for every layer",
    )


def _check_fits(released: Released, of_target: PretrainedConfig, **sizes: int) -> None:
    """Check that the target has the sizes that the draft is made for, under their names in its config."""
    for name, size in sizes.items():
        subject = f"it is made for a target with {name} {size}, and this one has {getattr(of_target, name)}"
        released.require(getattr(of_target, name) == size, subject, _OTHER_TARGET)


def _reduce(draft: FeatureDraft, released: Released) -> None:
    """Read the maps of a reduced vocabulary."""
    offsets, mask = (released.tensors.pop(name, None) for name in ("d2t", "t2d"))
    num_logits = draft_vocab_size(draft.config)
    vocab_size = draft.config.vocab_size
    if num_logits == vocab_size:
        return
    remedy = "export the draft with the maps it was trained with"
    if offsets is None or offsets.shape != (num_logits,):
        found = "is missing" if offsets is None else f"has shape {list(offsets.shape)}"
        subject = f"its vocabulary is reduced to {num_logits} of {vocab_size} ids, and d2t {found}"
        raise draft_refusal(released.path, subject, remedy)
    ids = torch.arange(num_logits) + offsets.long()
    is_valid = bool(ids.min() >= 0) and bool(ids.max() < vocab_size) and len(ids.unique()) == num_logits
    subject = f"d2t, which holds offsets, does not lead to {num_logits} different ids below {vocab_size}"
    released.require(is_valid, subject, remedy)
    is_same = mask is None or mask.bool().nonzero().flatten().tolist() == sorted(ids.tolist())
    released.require(is_same, f"t2d does not mark the {num_logits} of {vocab_size} ids that d2t leads to", remedy)
    draft.target_ids = ids
