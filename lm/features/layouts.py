"""One form of config.json for every producer of feature drafts: flat keys, named and counted as DeepSpec and SafeAILab
do.

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

from contextlib import suppress
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, Qwen3Config

REFUSED = {
    "peagle": ("it drafts all its tokens in one forward (P-EAGLE)", "use an EAGLE-3 draft"),
    "domino": ("a recurrent network corrects its logits (Domino)", "use a DFlash or DSpark draft"),
}
"""What is wrong with known kinds of drafts that are not read, and the remedy."""
_NESTED = ("dflash_config", "dspark_config")
_PARALLEL = ("parallel_drafting", "ptd_token_id", "pard_token")
"""Keys of P-EAGLE."""
_NO_MARKOV = {"markov_head_type": None, "confidence_head_with_markov": False}
_NO_HEADS = _NO_MARKOV | {"markov_rank": 0, "enable_confidence_head": False}
_OUTER = ("transformer_layer_config", "speculators_config", "auto_map")
"""Keys of speculators' layout that do not describe the draft."""
_LAYERS: dict[str, type[LlamaConfig] | type[Qwen3Config]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def layout_of(config: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """(eagle3, glide, dspark, or the name of a kind that is not read; flat keys) of a draft's config.json. The name is
    None if the keys do not decide: an EAGLE-1 draft, or a language model.
    """
    architectures = str(config.get("architectures"))
    if "speculators_model_type" in config:
        return _speculators(config)
    if "large_hidden_size" in config:
        return "glide", config
    if "PEagle" in architectures or any(name in config for name in _PARALLEL):
        return "peagle", config
    is_nested = any(isinstance(config.get(name), dict) for name in _NESTED)
    if is_nested or any(name in architectures for name in ("DFlash", "Domino")):
        return _nested(config, architectures)
    if "DSpark" in architectures or "markov_rank" in config:
        return "dspark", _NO_MARKOV | {"sample_from_anchor": True} | config
    if "draft_vocab_size" in config or "Eagle3" in architectures:
        return "eagle3", _eagle3(config)
    return None, config


def _speculators(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Keys of speculators' layout."""
    kind, layer = config["speculators_model_type"], {"model_type": "qwen3"} | config.get("transformer_layer_config", {})
    # what fails here is refused where the layer is made, with the error's text
    with suppress(TypeError, ValueError, KeyError, StrictDataclassError):
        layer = _LAYERS[layer["model_type"]](**layer).to_dict()
    keys = {name: value for name, value in config.items() if name not in _OUTER} | layer
    if kind == "eagle3":
        return "eagle3", {"eagle_aux_hidden_state_layer_ids": None} | keys
    if kind not in ("dflash", "dspark"):
        return "peagle" if kind == "peagle" else f"speculators' {kind}", keys
    of_blocks = {"sample_from_anchor": kind == "dspark"} | ({} if kind == "dspark" else _NO_HEADS)
    ids = _shifted(config.get("aux_hidden_state_layer_ids"), -1)
    # it has Qwen3's layer, whatever the target's family
    return "dspark", of_blocks | keys | {"target_layer_ids": ids, "num_target_layers": None, "model_type": "qwen3"}


def _nested(config: dict[str, Any], architectures: str) -> tuple[str, dict[str, Any]]:
    """Keys of blocks of z-lab's and SpecForge's layout."""
    nested: dict[str, Any] = {}
    for name in _NESTED:
        nested |= config.get(name) or {}
    projector = str(nested.get("projector_type") or "") or next(
        (name for name in ("Domino", "DSpark") if name in architectures), "dspark" if "markov_rank" in nested else ""
    )
    is_dspark = projector.lower() == "dspark"
    keys = _NO_HEADS | {"num_target_layers": None, "window_follows_token": True, "sample_from_anchor": is_dspark}
    keys |= {name: value for name, value in config.items() if name not in (*_NESTED, *_OUTER)} | nested
    keys |= {"enable_confidence_head": nested.get("enable_confidence_head", bool(nested.get("confidence_head_alpha")))}
    return "dspark" if is_dspark or projector in ("", "dflash") else projector.lower(), keys


def _eagle3(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of SafeAILab's, SpecForge's and DeepSpec's layouts: hidden states counted with the embedding as 0."""
    nested = config.get("eagle_config")
    from_zero = (
        nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else config.get("target_layer_ids")
    )
    ids = config.get("eagle_aux_hidden_state_layer_ids") or _shifted(from_zero, 1)
    # speculators' `norm_output` is about what later steps read, SpecForge's about what the LM head reads
    norms = {"norm_output": False, "norm_logits": config.get("norm_output", True)}
    return config | norms | {"eagle_aux_hidden_state_layer_ids": ids}


def _shifted(ids: Any, by: int) -> Any:
    """Layer ids in another way of counting; what is no list of numbers stays as it is."""
    is_list = isinstance(ids, list) and all(type(layer_id) is int for layer_id in ids)
    return [layer_id + by for layer_id in ids] if is_list else ids
