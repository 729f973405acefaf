"""Feature drafts made from released directories, read strictly and checked to fit the target.

A reduced vocabulary comes as two maps: `d2t`, offsets (the target's id of entry i is i + d2t[i]), and `t2d`, a mask
over the target's ids. Without `lm_head` its rows are the target's own.
"""

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from configs.schema import ModelSource, PairConfig
from lm.features.draft import FeatureDraft
from lm.features.dspark import MARKOV_HEADS, DSpark
from lm.features.eagle import Eagle, Eagle3
from lm.features.eight_bits import to_eight_bits
from lm.features.glide import Glide
from lm.features.released import Released
from lm.finite import FLOATS

_KEYS = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
)
"""Keys of the layout of speculators beside the layer's own config."""
_OF_BLOCKS = (
    *("block_size", "target_layer_ids", "num_target_layers", "mask_token_id"),
    *("markov_rank", "enable_confidence_head"),
)
"""Keys of DeepSpec's layout that a draft of blocks cannot do without."""
_ELSEWHERE = "use it with the target that it was trained for"


def feature_draft_of(pair: PairConfig, target: PreTrainedModel) -> FeatureDraft:
    """The feature draft that pair.draft names, loaded by `load_feature_draft`."""
    num_layers = target.config.get_text_config().num_hidden_layers
    dtype = None if pair.draft.dtype == "auto" else getattr(torch, pair.draft.dtype)
    return load_feature_draft(pair.draft, target, num_layers=num_layers, dtype=dtype)


def load_feature_draft(
    source: ModelSource, target: PreTrainedModel, *, num_layers: int, dtype: torch.dtype | None = None
) -> FeatureDraft:
    """The draft in evaluation mode, on the device of the target's output head, bound to the target.

    Args:
        source: directory or hub repository of the draft; its device is the target's, whatever `device_map` says.
        target: the model whose states the draft reads.
        num_layers: layers of the target.
        dtype: dtype of the draft's weights; None: as stored.

    Raises:
        ValueError: weights that are pickled, missing, surplus, or of another shape; a draft that does not fit the
            target; a quantisation that is not of 8 bits.
    """
    released = Released(source)
    if source.quantization not in (None, "8bit"):
        raise released.refusal(f"quantization is {source.quantization}", "of feature drafts it is 8bit or null")
    makers = {"eagle": _eagle, "eagle3": _eagle3, "speculators": _speculators, "glide": _glide, "dspark": _dspark}
    released.check_kind()
    with init_empty_weights():
        draft = makers[released.layout or "eagle"](released, target, num_layers)
    _fill(draft, released, dtype)
    device = next(target.get_output_embeddings().parameters()).device
    draft.name_or_path = source.path
    draft.to(device).eval().bind(target)
    if source.quantization is not None:
        to_eight_bits(draft)
    return draft


def _fill(draft: FeatureDraft, released: Released, dtype: torch.dtype | None) -> None:
    """Give the draft its weights: all of them, and nothing else. Buffers stay as they are: rotary frequencies are no
    numbers to round.
    """
    expected = draft.state_dict()
    remedy = "fetch the release again, and check that config.json belongs to it"
    for difference, names in (
        ("lacks", expected.keys() - released.tensors.keys()),
        ("also has", released.tensors.keys() - expected.keys()),
    ):
        if names:
            raise released.refusal(f"it {difference} {len(names)} tensors, first {min(names)}", remedy)
    for name, tensor in released.tensors.items():
        if tensor.shape != expected[name].shape:
            raise released.refusal(f"{name} is {list(tensor.shape)}, expected {list(expected[name].shape)}", remedy)
        if tensor.dtype not in FLOATS or not tensor.isfinite().all():
            raise released.refusal(f"{name} is {tensor.dtype} or has NaN, and finite floats are read", remedy)
    dtype = dtype or next(iter(released.tensors.values())).dtype
    draft.load_state_dict({name: tensor.to(dtype) for name, tensor in released.tensors.items()}, assign=True)


def _eagle(released: Released, target: PreTrainedModel, num_layers: int) -> FeatureDraft:
    config = released.llama(released.config)
    _check_fits(released, config, target, config.hidden_size)
    return Eagle(
        config, has_embedding="embed_tokens.weight" in released.tensors, has_fc_bias="fc.bias" in released.tensors
    )


def _eagle3(released: Released, target: PreTrainedModel, num_layers: int) -> FeatureDraft:
    released.rename("midlayer.", "layers.0.")
    return _of_layers(released, released.llama(released.config), target, num_layers)


def _speculators(released: Released, target: PreTrainedModel, num_layers: int) -> FeatureDraft:
    keys = released.config
    if keys["speculators_model_type"] != "eagle3":
        raise released.refusal(
            f"its speculators_model_type is {keys['speculators_model_type']}", "eagle3 is the one that is known here"
        )
    if "norm_before_residual" not in keys:
        raise released.refusal(
            "config.json lacks norm_before_residual, for which readers assume different values", "write true or false"
        )
    config = released.llama(keys.get("transformer_layer_config", {}))
    for name in _KEYS:
        setattr(config, name, keys.get(name))
    return _of_layers(released, config, target, num_layers)


def _eagle3_layer_ids(released: Released, config: LlamaConfig) -> tuple[int, ...]:
    """The hidden states of the target that config.json names, as transformers counts them; () if it names none.

    SafeAILab and speculators count so too, at the top level. SpecForge writes `eagle_config`, counts layers from 0 and
    means the state after each (its default, [1, L / 2 - 1, L - 4], names the same states as SafeAILab's).
    """
    nested = released.config.get("eagle_config") or {}
    if not isinstance(nested, dict) or not nested.get("use_aux_hidden_state", True):
        remedy = "a draft that reads three of the target's states is known"
        raise released.refusal(f"its eagle_config is {nested!r:.80}", remedy)
    written = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    ids = written or nested.get("eagle_aux_hidden_state_layer_ids") or ()
    if not isinstance(ids, list | tuple) or not all(type(layer_id) is int for layer_id in ids):
        raise released.refusal(f"its eagle_aux_hidden_state_layer_ids are {ids!r:.80}", "write a list of whole numbers")
    return tuple(ids) if written else tuple(layer_id + 1 for layer_id in ids)


def _of_layers(released: Released, config: LlamaConfig, target: PreTrainedModel, num_layers: int) -> FeatureDraft:
    """An EAGLE-3 draft, of SafeAILab's layout or of speculators'."""
    target_size = getattr(config, "target_hidden_size", None) or config.hidden_size
    _check_fits(released, config, target, target_size)
    ids = _eagle3_layer_ids(released, config) or (2, num_layers // 2, num_layers - 3)
    if not all(1 <= layer_id <= num_layers for layer_id in ids):
        remedy = f"name layers from 1 to {num_layers} as eagle_aux_hidden_state_layer_ids in its config.json"
        raise released.refusal(
            f"it reads the target behind layers {list(ids)}, and the target has {num_layers}",
            f"{remedy}, or {_ELSEWHERE}",
        )
    if any(name.startswith("layers.1.") for name in released.tensors):
        raise released.refusal("it has more than one layer", "EAGLE-3 drafts of one layer are read")
    has_embedding, has_head = (f"{name}.weight" in released.tensors for name in ("embed_tokens", "lm_head"))
    lacks = [name for name, has in (("embed_tokens", has_embedding), ("lm_head", has_head)) if not has]
    if lacks and config.hidden_size != target.config.get_text_config().hidden_size:
        raise released.refusal(
            f"it is not as wide as the target and has no {lacks[0]}", f"fetch a release with {lacks[0]} of its own"
        )
    width = getattr(config, "draft_vocab_size", None) or config.vocab_size
    num_logits = width if has_head or "d2t" in released.tensors else None
    draft = Eagle3(
        config,
        ids,
        target_size=target_size,
        has_embedding=has_embedding,
        num_logits=num_logits if has_head else None,
    )
    target_ids = _target_ids(released, num_logits, config.vocab_size)
    if target_ids is not None:
        draft.reduce(target_ids)
    return draft


def _glide(released: Released, target: PreTrainedModel, num_layers: int) -> FeatureDraft:
    released.rename("model.", "")
    config = released.llama({"large_num_attention_heads": 32} | released.config)
    config.tie_word_embeddings = config.tie_word_embeddings and "lm_head.weight" not in released.tensors
    of_target = target.config.get_text_config()
    head_size = getattr(of_target, "head_dim", None) or of_target.hidden_size // of_target.num_attention_heads
    _check_fits(released, config, target, config.large_hidden_size, of_target.num_attention_heads * head_size)
    if config.large_num_attention_heads != of_target.num_attention_heads:
        num_heads = f"{config.large_num_attention_heads} heads and the target's {of_target.num_attention_heads}"
        raise released.refusal(f"its queries have {num_heads}", _ELSEWHERE)
    if config.num_hidden_layers > num_layers:
        raise released.refusal(f"it has {config.num_hidden_layers} layers and the target {num_layers}", _ELSEWHERE)
    return Glide(config, num_layers)


def _dspark(released: Released, target: PreTrainedModel, num_layers: int) -> FeatureDraft:
    keys = {"markov_head_type": None, "confidence_head_with_markov": False} | released.config
    lacks = [name for name in _OF_BLOCKS if name not in keys]
    if lacks:
        raise released.refusal(f"config.json lacks {', '.join(lacks)}", "fetch the release again")
    config = released.qwen3(keys)
    _check_fits(released, config, target, config.hidden_size)
    if config.num_target_layers != num_layers:
        layers = f"{config.num_target_layers} layers, and this one has {num_layers}"
        raise released.refusal(f"it is made for a target of {layers}", _ELSEWHERE)
    for name, (fits, needed) in _needed_of_blocks(config).items():
        if not fits:
            raise released.refusal(
                f"its {name} is {getattr(config, name)}", f"it must be {needed}; fetch the release again"
            )
    return DSpark(config)


def _needed_of_blocks(config: Qwen3Config) -> dict[str, tuple[bool, str]]:
    """(whether a key of a DSpark draft has a value that it can have, those values), by key."""
    ids, last = config.target_layer_ids, config.num_target_layers - 1
    is_list = isinstance(ids, list) and all(type(layer_id) is int for layer_id in ids)
    has_markov = config.markov_rank in range(1, config.vocab_size + 1)
    kinds = ", ".join(MARKOV_HEADS)
    return {
        "block_size": (config.block_size in range(1, config.max_position_embeddings), "a number of tokens, at least 1"),
        "mask_token_id": (config.mask_token_id in range(config.vocab_size), f"an id below {config.vocab_size}"),
        # what follows the target's last layer is normed in some readers and not in others
        "target_layer_ids": (
            is_list and bool(ids) and ids == sorted({*ids}) and all(layer_id in range(-1, last) for layer_id in ids),
            f"rising numbers from -1, the embedding, to {last - 1}, before the last layer",
        ),
        "markov_rank": (has_markov or config.markov_rank == 0, f"0 or a width of at most {config.vocab_size}"),
        "markov_head_type": (not has_markov or config.markov_head_type in MARKOV_HEADS, f"one of {kinds}"),
        "confidence_head_with_markov": (
            has_markov or not config.confidence_head_with_markov,
            "false where markov_rank is 0",
        ),
        "layer_types": (set(config.layer_types or ()) == {"full_attention"}, "full_attention for every layer"),
    }


def _check_fits(
    released: Released,
    config: LlamaConfig | Qwen3Config,
    target: PreTrainedModel,
    width: int,
    expected: int | None = None,
) -> None:
    """Raise unless the draft reads states as wide as the target's, and its vocabulary is the target's."""
    of_target = target.config.get_text_config()
    for quantity, read, given in (
        ("states", width, expected or of_target.hidden_size),
        ("a vocabulary", config.vocab_size, of_target.vocab_size),
    ):
        if read != given:
            raise released.refusal(
                f"it is made for a target with {quantity} of {read}, and this one has {given}", _ELSEWHERE
            )


def _target_ids(released: Released, num_logits: int | None, vocab_size: int) -> Tensor | None:
    """The target's id of each entry of a reduced vocabulary; None where it is whole."""
    offsets, mask = (released.tensors.pop(name, None) for name in ("d2t", "t2d"))
    if num_logits is None or num_logits == vocab_size:
        return None
    remedy = "fetch the release again, or map the vocabulary anew"
    if offsets is None:
        raise released.refusal(
            f"its vocabulary is reduced to {num_logits} of {vocab_size} ids, and d2t is missing", remedy
        )
    if offsets.shape != (num_logits,):
        raise released.refusal(f"d2t has shape {list(offsets.shape)} for a vocabulary of {num_logits}", remedy)
    ids = torch.arange(num_logits) + offsets.long()
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < num_logits:
        leads = f"leads to {len(ids.unique())} ids from {int(ids.min())} to {int(ids.max())}"
        raise released.refusal(
            f"d2t, which holds offsets, {leads}, where {num_logits} below {vocab_size} are expected", remedy
        )
    if mask is not None:
        kept = mask.bool()
        if len(kept) != vocab_size or int(kept.sum()) != num_logits or not bool(kept[ids].all()):
            marks = f"t2d marks {int(kept.sum())} of {len(kept)} ids"
            raise released.refusal(f"{marks}, which are not the {num_logits} of {vocab_size} that d2t leads to", remedy)
    return ids
