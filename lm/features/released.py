"""A released directory of a feature draft: its layout, its config.json, and its tensors, from safetensors alone.

eagle         SafeAILab's EAGLE-1/2: Llama's keys with one layer; `fc.weight`, `layers.0.*`
eagle3        SafeAILab's EAGLE-3: `draft_vocab_size`, or "Eagle3" in `architectures`; `midlayer.*`
speculators   `speculators_model_type`; `layers.0.*`
glide         `large_hidden_size`; Llama's names, and `cross_attn`
dspark        DeepSpec's DSpark and DFlash: `markov_rank`, or "DSpark" in `architectures`; Qwen3's names. Directories of
              z-lab and SpecForge, whose keys are nested, are refused by name
mtp           the MTP layer of a target, in the target's own directory: its path is the target's and `#mtp`
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.utils.hub import cached_file, extract_commit_hash

from configs.schema import ModelSource
from lm.features.dspark import markov_width

MTP = "#mtp"
"""End of the path of a target's own MTP layer (`configs.schema.PairConfig`)."""
LayerConfig = TypeVar("LayerConfig", bound=PreTrainedConfig)
_NO_KEYS = ("model_type", "dtype", "torch_dtype", "architectures")
"""Keys of config.json that do not describe a layer."""
_MAX_SIZE = 2**17
_LIMITS = {
    **dict.fromkeys(("hidden_size", "large_hidden_size", "target_hidden_size"), (1, _MAX_SIZE)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "large_num_attention_heads"), (1, _MAX_SIZE)),
    **dict.fromkeys(("intermediate_size", "head_dim"), (1, 2**20)),
    **dict.fromkeys(("num_hidden_layers", "num_target_layers"), (1, 2**12)),
    **dict.fromkeys(("vocab_size", "draft_vocab_size"), (1, 2**24)),
    "max_position_embeddings": (1, 2**40),
    **dict.fromkeys(("block_size", "markov_rank", "mask_token_id"), (-1, 2**24)),
}
"""Keys that are whole numbers, and their limits; each layout narrows the last three."""
_NESTED = ("dflash_config", "dspark_config")
_PARALLEL = ("parallel_drafting", "ptd_token_id", "pard_token", "mask_hidden")
"""Keys or tensors of P-EAGLE, which drafts all tokens in one forward."""


class Released:
    """Contents of a released directory."""

    def __init__(self, source: ModelSource) -> None:
        """Read config.json and every tensor.

        Raises:
            ValueError: weights that are pickled alone, or that cannot be read.
        """
        self.path, self.layout, self.config = source.path, released_layout_of(source), _config_of(source) or {}
        self.tensors: dict[str, Tensor] = {}
        for file in files_of(source):
            try:
                self.tensors |= {
                    name: tensor for name, tensor in load_file(file).items() if not name.endswith("rotary_emb.inv_freq")
                }
            except SafetensorError as error:
                raise ValueError(f"{file} cannot be read ({error}); fetch or copy the model again") from error

    def rename(self, old: str, new: str) -> None:
        """Replace the prefix `old` of tensor names by `new`."""
        for name in [name for name in self.tensors if name.startswith(old)]:
            self.tensors[new + name.removeprefix(old)] = self.tensors.pop(name)

    def llama(self, keys: dict[str, Any]) -> LlamaConfig:
        """The config of the draft's layer, from these keys of config.json."""
        # what SafeAILab calls qwen2 is Llama's layer with `qkv_bias`
        return self._layer(LlamaConfig, keys, "Llama", ("llama", "eagle", "qwen2"))

    def qwen3(self, keys: dict[str, Any]) -> Qwen3Config:
        """The config of a DSpark draft's layers, from these keys of config.json."""
        return self._layer(Qwen3Config, keys, "Qwen3", ("qwen3",))

    def _layer(self, made: type[LayerConfig], keys: dict[str, Any], name: str, kinds: tuple[str, ...]) -> LayerConfig:
        kind = keys.get("model_type", kinds[0])
        if kind not in kinds:
            raise self.refusal(f"its layer is of model_type {kind}", f"{name}'s is the one that is known here")
        _check_layer(self.path, keys)
        try:
            return made(**{key: value for key, value in keys.items() if key not in _NO_KEYS})
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise self.refusal(
                f"its config.json is no {name}'s ({' '.join(str(error).split())[:200]})", "fetch the release again"
            ) from error

    def refusal(self, subject: str, remedy: str) -> ValueError:
        """The error for this directory: what is wrong, and the remedy."""
        return refusal_of(self.path, subject, remedy)

    def require(self, condition: bool, subject: str, remedy: str) -> None:
        """Raise the `refusal` unless the condition holds."""
        if not condition:
            raise self.refusal(subject, remedy)

    def check_kind(self) -> None:
        """Raise ValueError for an unsupported kind of draft that shares a layout's names."""
        _check_layer(self.path, self.config)
        if nested := [name for name in _NESTED if name in self.config]:
            remedy = "DeepSpec's layout is read, with those keys at the top level of config.json"
            raise self.refusal(f"its keys are nested in {nested[0]}, as z-lab and SpecForge write them", remedy)
        if any(name in self.config or name in self.tensors for name in _PARALLEL):
            raise self.refusal("it drafts all its tokens in one forward (P-EAGLE)", "use an EAGLE-3 draft")


def refusal_of(path: str, subject: str, remedy: str) -> ValueError:
    return ValueError(f"the feature draft {path} cannot be used: {subject}; {remedy}")


def _check_layer(path: str, keys: Any) -> None:
    """Raise ValueError for keys with impossible values."""
    if not isinstance(keys, dict):
        raise refusal_of(path, f"its transformer_layer_config is {keys!r:.40}", "fetch the release again")
    rope = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    if isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type")):
        raise refusal_of(path, "its rotary positions (mrope) are those of images in a text", "use a text model's draft")
    for name, (minimum, maximum) in _LIMITS.items():
        value = keys.get(name)
        if name in keys and value is not None and (type(value) is not int or not minimum <= value <= maximum):
            raise refusal_of(path, f"its {name} is {value!r:.40}", f"write a whole number from {minimum} to {maximum}")
    theta = keys.get("rope_theta", 1.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < float("inf"):
        raise refusal_of(path, f"its rope_theta is {theta!r:.40}", "write a number above 0, or leave it out")
    activation = keys.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise refusal_of(path, f"its hidden_act is {activation!r:.40}", "transformers knows no such activation")


def released_layout_of(source: ModelSource) -> str | None:
    """Layout of a directory or hub repository, by its config.json; None: a language model, or unreadable.

    Raises:
        ValueError: a broken config.json, or pickled weights whose names decide the layout.
    """
    if source.path.endswith(MTP):
        return "mtp"
    config = _config_of(source)
    if config is None:
        return None
    if "speculators_model_type" in config:
        return "speculators"
    if "large_hidden_size" in config:
        return "glide"
    architectures = str(config.get("architectures"))
    if "DSpark" in architectures or any(name in config for name in ("markov_rank", *_NESTED)):
        return "dspark"
    if "draft_vocab_size" in config or "Eagle3" in architectures:
        return "eagle3"
    # EAGLE-1's config is that of a Llama with one layer, so its weights decide
    is_eagle = config.get("num_hidden_layers") == 1 and any("fc.weight" in _names(file) for file in files_of(source))
    return "eagle" if is_eagle else None


def commit_of(source: ModelSource) -> str | None:
    """Commit of a hub repository."""
    source = without_mtp(source)
    path = cached_file(source.path, "config.json", revision=source.revision)
    return None if Path(source.path).is_dir() else extract_commit_hash(str(path), None)


def without_mtp(source: ModelSource) -> ModelSource:
    """The target that a path with `#mtp` names; any other source as it is."""
    return replace(source, path=source.path.removesuffix(MTP))


def width_of(source: ModelSource) -> int | None:
    """Width of what heads on a feature draft read, by its config.json; None: not a feature draft."""
    config, layout = _config_of(source) or {}, released_layout_of(source)
    if layout is None:
        return None
    size = _layer_keys(source, config).get("hidden_size")
    if layout != "dspark" or size is None:
        return size
    return size + markov_width(config.get("markov_rank", 0), config.get("markov_head_type"))


def max_positions_of(source: ModelSource) -> int:
    """Maximum text length of a feature draft, by its config.json; Llama's default if that has none."""
    layer = _layer_keys(source, _config_of(source) or {})
    return int(layer.get("max_position_embeddings") or LlamaConfig().max_position_embeddings)


def _layer_keys(source: ModelSource, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a draft's layer, in its config.json or nested in it; ValueError for impossible values."""
    layer = config.get("transformer_layer_config", config)
    for keys in (config, layer):
        _check_layer(source.path, keys)
    return layer


def _config_of(source: ModelSource) -> dict[str, Any] | None:
    path = source.path.removesuffix(MTP)
    try:
        file = cached_file(path, "config.json", revision=source.revision)
    except OSError:
        return None
    try:
        config = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config.json of {path} is not JSON ({error}); fetch or copy the model again") from error
    if not isinstance(config, dict):
        return None
    return config.get("text_config", config) if path != source.path else config


def _names(file: Path) -> set[str]:
    """Names of all tensors in a file; none for a broken one, which loading refuses."""
    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except SafetensorError:
        return set()


def files_of(source: ModelSource) -> list[Path]:
    """The files of weights; ValueError if all are pickled."""
    directory = Path(source.path)
    if not directory.is_dir():
        directory = Path(
            snapshot_download(
                source.path, revision=source.revision, allow_patterns=["*.json", "*.safetensors", "*.bin.index*"]
            )
        )
    files = sorted(directory.glob("*.safetensors"))
    pickled = [path.name for kind in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(kind))]
    if pickled and not files:
        raise ValueError(
            f"the weights of {source.path} are pickled ({pickled[0]}), which can run code when they are read; convert "
            "them: safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    return files
