"""A released directory of a feature draft: its layout, its tensors, from safetensors alone, and its config.json,
in one form for every producer: flat keys, named and counted as DeepSpec and SafeAILab do.

SafeAILab    Llama's keys with one layer (EAGLE-1/2); `draft_vocab_size`, or "Eagle3" in `architectures` (EAGLE-3)
SpecForge    EAGLE-3 as SafeAILab's, with layers counted from 0 in `eagle_config`; DFlash and DSpark with their keys in
             `dflash_config` or `dspark_config`, as z-lab writes them
speculators  `speculators_model_type`; the layer's keys in `transformer_layer_config`, without those that have
             transformers' default; hidden states counted with the embedding as 0
DeepSpec     DFlash and DSpark: `markov_rank`, or "DSpark" in `architectures`; EAGLE-3 with Qwen3's layer
GliDe        `large_hidden_size`

A block reads the anchor and block_size - 1 masks. DSpark, and all of DeepSpec, draft a token from each
(`sample_from_anchor`); DFlash of others drafts none from the anchor. speculators has a key for it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.schema import ModelSource
from lm.folders import refuse_no_model
from store.hub import NETWORK_ERRORS
from store.json_files import read_json

Keys = dict[str, Any]
"""A config.json."""
LayerConfig = TypeVar("LayerConfig")
MTP = "#mtp"
"""End of the path of a target's own MTP layer (`configs.schema.PairConfig`)."""
_PREFIXES = {"midlayer.": "layers.0.", "model.": "", "logit_head.": ""}  # of tensors, and what replaces them
_NO_KEYS = ("model_type", "dtype", "torch_dtype", "architectures")  # keys of config.json that do not describe a layer
_MAX_SIZE = 2**17
_MAX_THETA = 1e15
# keys that are whole numbers, and their limits; DSpark's layout narrows the last three
_LIMITS = {
    **dict.fromkeys(("hidden_size", "large_hidden_size", "target_hidden_size"), (1, _MAX_SIZE)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "large_num_attention_heads"), (1, _MAX_SIZE)),
    **dict.fromkeys(("intermediate_size", "head_dim"), (1, 2**20)),
    **dict.fromkeys(("num_hidden_layers", "num_target_layers"), (1, 2**12)),
    **dict.fromkeys(("vocab_size", "draft_vocab_size"), (1, 2**24)),
    "max_position_embeddings": (1, 2**40),
    **dict.fromkeys(("block_size", "markov_rank", "mask_token_id"), (0, 2**24)),
}
_FLAGS = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "sample_from_anchor"),
    *("sliding_window_non_causal", "enable_confidence_head", "confidence_head_with_markov"),
)
_NESTED = ("dflash_config", "dspark_config")
_PARALLEL = ("parallel_drafting", "ptd_token_id", "pard_token")  # keys of P-EAGLE
_NO_MARKOV = {"markov_head_type": None, "confidence_head_with_markov": False}
_NO_HEADS = _NO_MARKOV | {"markov_rank": 0, "enable_confidence_head": False}
_OUTER = ("transformer_layer_config", "speculators_config", "auto_map")  # of speculators, not of the draft
MARKOV_HEADS = {"vanilla": 1, "gated": 2, "rnn": 2}
"""Kinds of Markov heads: vectors of width `rank` that each adds to `hidden`, W1[x] and z if that differs."""


class Released:
    """Contents of a released directory: its layout, config.json as flat keys, and every tensor."""

    def __init__(self, source: ModelSource) -> None:
        """Read the directory; ValueError for weights that are pickled alone or cannot be read, a kind of draft
        that is not read, or rotary embeddings of other families.
        """
        self.path = source.path
        self.layout, self.keys = _read(source)
        self.tensors: dict[str, Tensor] = {}
        for name, value in tensors_of(source, lambda name: not name.endswith("rotary_emb.inv_freq")).items():
            old = next(filter(name.startswith, _PREFIXES), "")
            self.tensors[_PREFIXES.get(old, "") + name.removeprefix(old)] = value
        kind = "P-EAGLE" if "mask_hidden" in self.tensors else self.layout
        is_read = kind in (None, "eagle", "eagle3", "glide", "dspark")
        self.require(is_read, f"it is a draft of the kind {kind}", "use an EAGLE, GliDe, DFlash or DSpark draft")
        rope = self.keys.get("rope_parameters") or self.keys.get("rope_scaling") or {}
        rope = rope if isinstance(rope, dict) else {}
        form = rope.get("rope_type", rope.get("type", "default"))
        part = rope.get("partial_rotary_factor")
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        is_known = form in ("default", *ROPE_INIT_FUNCTIONS)
        remedy = "use a draft with Llama's rotary embedding"
        self.require(is_known, f"its rotary embedding is {form!r:.40}, which transformers does not know", remedy)
        self.require(part in (None, 1), f"it rotates a part of each head (partial_rotary_factor {part})", remedy)

    def layer(self, made: Callable[..., LayerConfig]) -> LayerConfig:
        """The config of the draft's layers."""
        from transformers import LlamaConfig

        # what SafeAILab calls qwen2 is Llama's layer with `qkv_bias`
        name, kinds = ("Llama", ("llama", "eagle", "qwen2")) if made is LlamaConfig else ("Qwen3", ("qwen3",))
        kind = self.keys.get("model_type", kinds[0])
        self.require(kind in kinds, f"its layer is of model_type {kind}", f"{name}'s is the one that is known here")
        try:
            return made(**{key: value for key, value in self.keys.items() if key not in _NO_KEYS})
        except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
            reason = f"its config.json is no {name}'s ({' '.join(str(error).split())[:200]})"
            raise draft_refusal(self.path, reason, "correct the key that the message names") from error

    def require(self, condition: bool, subject: str, remedy: str) -> None:
        """Raise ValueError (`draft_refusal`) unless the condition holds."""
        if not condition:
            raise draft_refusal(self.path, subject, remedy)


def draft_refusal(path: str, subject: str, remedy: str) -> ValueError:
    """The error for the draft at this path: what is wrong, and the remedy."""
    return ValueError(f"the feature draft {path} cannot be used: {subject}; {remedy}")


def _impossible(keys: Keys) -> Iterator[tuple[str, object, str]]:
    """(name, value, remedy) of keys with impossible values."""
    for name, (minimum, maximum) in _LIMITS.items():
        value = keys.get(name)
        if value is not None and (type(value) is not int or not minimum <= value <= maximum):
            yield name, value, f"write a whole number from {minimum} to {maximum}"
    for table in (keys, keys.get("rope_parameters"), keys.get("rope_scaling")):
        theta = table.get("rope_theta", 1.0) if isinstance(table, dict) else 1.0
        if type(theta) not in (int, float) or not 0 < theta < _MAX_THETA:
            yield "rope_theta", theta, "write a number above 0, or leave it out"
    for name in _FLAGS:
        if type(keys.get(name, False)) is not bool:
            yield name, keys[name], "write true or false"
    if (markov := keys.get("markov_head_type")) not in (None, *MARKOV_HEADS):
        yield "markov_head_type", markov, f"write one of {', '.join(MARKOV_HEADS)}"
    activation = keys.get("hidden_act", "silu")
    if activation != "silu" and not _is_activation(activation):
        yield "hidden_act", activation, "transformers knows no such activation"


def _is_activation(name: object) -> bool:
    from transformers.activations import ACT2FN

    return isinstance(name, str) and name in ACT2FN


def _of_text(keys: Keys) -> Keys:
    """The keys, with rotary embeddings as text needs them: mrope's three positions of a token of text are one."""
    keys = dict(keys)
    for name in ("rope_scaling", "rope_parameters"):
        rope = keys.get(name)
        if isinstance(rope, dict):
            rope = rope.get("sliding_attention", rope)
            rope = rope if isinstance(rope, dict) else {"rope_type": str(rope)}  # refused by name
            is_mrope = "mrope" in (rope.get("rope_type"), rope.get("type"))
            keys[name] = {key: value for key, value in rope.items() if not is_mrope or key == "rope_theta"}
    return keys


def _read(source: ModelSource) -> tuple[str | None, Keys]:
    """The layout of a directory or repository, and the keys of its config.json in one form for all producers."""
    config = _config_of(source)
    if source.path.endswith(MTP):
        return "mtp", config
    tables = {name: config.get(name, {}) for name in ("transformer_layer_config", *_NESTED)}
    wrong = [(name, table, "write a table of keys there") for name, table in tables.items() if type(table) is not dict]
    for name, value, remedy in wrong or chain.from_iterable(map(_impossible, (config, *tables.values()))):
        raise draft_refusal(source.path, f"its {name} is {value!r:.40}", remedy)
    layout, keys = _layout_of(config)
    # EAGLE-1's config is that of a Llama with one layer, so its weights decide
    if layout is None and config.get("num_hidden_layers") == 1 and tensors_of(source, "fc.weight".__eq__):
        layout = "eagle"
    return layout, _of_text(keys)


def _layout_of(config: Keys) -> tuple[str | None, Keys]:
    """(eagle3, glide, dspark, or the name of a kind that is not read; flat keys) of a draft's config.json. The
    name is None if the keys do not decide: an EAGLE-1 draft, or a language model.
    """
    architectures = str(config.get("architectures"))
    if "speculators_model_type" in config:
        return _speculators(config)
    if "large_hidden_size" in config:
        return "glide", {"large_num_attention_heads": 32} | config
    if "PEagle" in architectures or any(name in config for name in _PARALLEL):
        return "P-EAGLE", config
    if any(name in config for name in _NESTED) or any(name in architectures for name in ("DFlash", "Domino")):
        return _nested(config, architectures)
    if "DSpark" in architectures or "markov_rank" in config:
        return "dspark", _NO_MARKOV | {"sample_from_anchor": True} | config
    if "draft_vocab_size" in config or "Eagle3" in architectures:
        return "eagle3", _eagle3(config)
    return None, config


def _speculators(config: Keys) -> tuple[str, Keys]:
    from transformers import LlamaConfig, Qwen3Config

    layers = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = config["speculators_model_type"]
    layer = {"model_type": "qwen3"} | config.get("transformer_layer_config", {})
    # what fails here is refused where the layer is made, with the error's text
    with suppress(TypeError, ValueError, KeyError, StrictDataclassError):
        layer = layers[layer["model_type"]](**layer).to_dict()
    keys = {name: value for name, value in config.items() if name not in _OUTER} | layer
    if kind == "eagle3":
        return "eagle3", {"eagle_aux_hidden_state_layer_ids": None} | keys
    if kind not in ("dflash", "dspark"):
        return f"speculators' {kind}", keys
    of_blocks = {"sample_from_anchor": kind == "dspark"} | (_NO_MARKOV if kind == "dspark" else _NO_HEADS)
    return "dspark", {
        **of_blocks,
        **keys,
        "target_layer_ids": _shifted(config.get("aux_hidden_state_layer_ids"), -1),
        "num_target_layers": None,
        "model_type": "qwen3",  # it has Qwen3's layer, whatever the target's family
    }


def _nested(config: Keys, architectures: str) -> tuple[str, Keys]:
    """Keys of blocks of z-lab's and SpecForge's layout."""
    nested = config.get("dflash_config", {}) | config.get("dspark_config", {})
    by_keys = "dspark" if "markov_rank" in nested else "dflash"
    by_name = next((name for name in ("Domino", "DSpark") if name in architectures), by_keys)
    projector = str(nested.get("projector_type") or by_name)
    is_dspark = projector.lower() == "dspark"
    keys = {  # of equal names the last one
        **_NO_HEADS,
        "num_target_layers": None,
        "window_follows_token": True,
        "sample_from_anchor": is_dspark,
        **{name: value for name, value in config.items() if name not in (*_NESTED, *_OUTER)},
        **nested,
        "enable_confidence_head": nested.get("enable_confidence_head", bool(nested.get("confidence_head_alpha"))),
    }
    return "dspark" if is_dspark or projector == "dflash" else projector, keys


def _eagle3(config: Keys) -> Keys:
    """Keys of SafeAILab's, SpecForge's and DeepSpec's layouts: hidden states counted with the embedding as 0."""
    nested = config.get("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    from_zero = nested.get(name) if isinstance(nested, dict) else config.get("target_layer_ids")
    return {
        **config,
        # speculators' `norm_output` norms what later steps read; SpecForge's what the LM head reads, here `norm_logits`
        "norm_output": False,
        "norm_logits": config.get("norm_output", True),
        name: config.get(name) or _shifted(from_zero, 1),
    }


def _shifted(ids: object, by: int) -> object:
    """Layer ids in another way of counting; what is no list of numbers stays as it is."""
    return [layer_id + by for layer_id in ids] if is_ids(ids) else ids


def is_ids(value: object) -> TypeGuard[list[int]]:
    """True for a list of whole numbers."""
    return isinstance(value, list) and all(type(number) is int for number in value)


def released_layout_of(source: ModelSource) -> str | None:
    """Layout of a directory or hub repository, by its config.json; None: a language model, or unreadable.
    ValueError for a broken config.json, or pickled weights whose names decide the layout.
    """
    return _read(source)[0]


def commit_of(source: ModelSource) -> str | None:
    """Commit of a hub repository."""
    if Path(source.path).is_dir():
        return None
    from transformers.utils.hub import cached_file, extract_commit_hash

    path = cached_file(source.path, "config.json", revision=source.revision)
    return extract_commit_hash(str(path), None)


def without_mtp(source: ModelSource) -> ModelSource:
    """The target that a path with `#mtp` names; any other source as it is."""
    return replace(source, path=source.path.removesuffix(MTP))


def markov_width(rank: int, kind: str | None) -> int:
    """Width that a Markov head adds to `hidden`; 0 without one."""
    return rank * MARKOV_HEADS[kind] if rank and kind else 0


def width_of(source: ModelSource) -> int | None:
    """Width of what heads on a feature draft read, by its config.json; None: not a feature draft."""
    layout, keys = _read(source)
    size = keys.get("hidden_size") if layout else None
    return None if size is None else size + markov_width(keys.get("markov_rank", 0), keys.get("markov_head_type"))


def max_positions_of(source: ModelSource) -> int:
    """Maximum text length of a feature draft, by its config.json; Llama's default if that has none."""
    return max_positions(_read(source)[1])


def max_positions(keys: Keys) -> int:
    """Maximum text length with these keys; texts of an EAGLE-3 draft with sliding layers must fit their window."""
    length = keys.get("max_position_embeddings")
    if not length:
        from transformers import LlamaConfig

        length = LlamaConfig().max_position_embeddings
    if "eagle_aux_hidden_state_layer_ids" in keys and "sliding_attention" in (keys.get("layer_types") or ()):
        length = min(length, keys.get("sliding_window") or length)
    return int(length)


def _config_of(source: ModelSource) -> Keys:
    path = source.path.removesuffix(MTP)
    file = Path(path, "config.json")
    if not file.is_file():
        from transformers.utils.hub import cached_file

        try:
            found = cached_file(path, "config.json", revision=source.revision)
        except NETWORK_ERRORS:
            return {}
        if found is None:
            refuse_no_model(source.path)
        file = Path(str(found))
    config = read_json(file, remedy="fetch or copy the model again")
    return config.get("text_config", config) if path != source.path else config


def tensors_of(source: ModelSource, is_read: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors with these names; ValueError for a broken file, or if all weights are pickled."""
    directory = Path(source.path)
    if not directory.is_dir():
        patterns = ["*.json", "*.safetensors", "*.bin.index*"]
        directory = Path(snapshot_download(source.path, revision=source.revision, allow_patterns=patterns))
    files = sorted(directory.glob("*.safetensors"))
    pickled = [path.name for kind in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(kind))]
    if pickled and not files:
        raise ValueError(
            f"the weights of {source.path} are pickled ({pickled[0]}), which can run code when they are read; convert "
            "them: safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in filter(is_read, opened.keys())}
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}); fetch or copy the model again") from error
    return tensors
