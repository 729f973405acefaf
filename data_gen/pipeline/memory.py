"""GPU memory of each stage of an experiment, computed from config.json and the YAML alone.

    weights      parameters x bytes of the dtype; of quantised layers, of the method
    KV cache     sequences x (positions + a few spare) x 2 x layers x KV heads x head width x bytes
    activations  positions of a forward x the widest moment of one layer: residuals, queries, keys and values, two MLP
                 widths; nothing is kept for a backward pass, and the attention matrix is not materialised
    logits       decoding: sequences x vocabulary in float32 (logits, probabilities) and float64 (their sum, levels), 24
                 bytes in all; labelling: eight float32 chunks of data.chunk_mb
    heads        weights, gradients, Adam's two moments and the selected weights, five float32 of each; per token the
                 stream and three more of each block's width

GPUs are one pool, as with device_map: auto, less 2 GB each for CUDA's context, kernels and fragmentation. With
tp_plan every GPU holds a slice of every layer of the sliced model (attention heads, their cache, a part of the
MLP and of the output layer) and a copy of the rest: embeddings, residuals, logits, and models that are not
sliced.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from configs.schema import Config, DataConfig, HeadsConfig, ModelSource
from data_gen.responses.target import SPARE_POSITIONS
from lm import model_config
from lm.pair import dtype_bytes, weight_bytes
from lm.parallel import check_slices, sliced_models

GB = 1e9
_RESERVED_BYTES = 2 * GB
_DECODING_BYTES_PER_LOGIT = 24.0
_LABELLING_CHUNKS = 8.0
_FLOATS_PER_WEIGHT = 5
_FLOATS_PER_BLOCK = 3


class Size(NamedTuple):
    """Bytes of one model, or of one of its slices: its weights, and per position its cache and its activations."""

    weights: float
    kv_per_position: float
    activations_per_position: float
    hidden_size: int
    vocab_size: int


class Need(NamedTuple):
    """Peak memory of one stage, in bytes."""

    stage: str
    fixed: dict[str, float]
    """Purpose -> bytes, independent of the batch."""
    per_sequence: dict[str, float]
    """Purpose -> bytes for each sequence of a batch."""
    batch_size: int = 1
    setting: str | None = None
    """The setting of the batch size; None: one sequence at a time."""
    is_per_gpu: bool = False
    """Whether every GPU holds all of it."""

    @property
    def total(self) -> float:
        """Bytes with a full batch."""
        return sum(self.fixed.values()) + self.batch_size * sum(self.per_sequence.values())

    def memory(self, gpus: Sequence[float]) -> float:
        """Bytes that the stage may use; `gpus` are the usable bytes of each GPU."""
        return min(gpus) if self.is_per_gpu else sum(gpus)

    def __str__(self) -> str:
        terms = [f"{name} {size / GB:,.1f}" for name, size in self.fixed.items()]
        terms += [f"{name} {self.batch_size} x {size / GB:,.3f}" for name, size in self.per_sequence.items()]
        return " + ".join(terms)

    def problem(self, gpus: Sequence[float]) -> str:
        """Why the stage does not fit, and the remedy; empty if it does, or if there is no GPU."""
        if not gpus or self.total <= (room := self.memory(gpus)):
            return ""
        largest_batch = int((room - sum(self.fixed.values())) // sum(self.per_sequence.values()))
        remedy = "use more or larger GPUs, quantization, or data.mode: sequential"
        if self.setting and largest_batch > 0:
            remedy = f"set {self.setting} to at most {largest_batch}"
        return f"{self.stage} takes {self.total / GB:,.1f} GB, but the GPUs have {room / GB:,.0f} GB; {remedy}"


def needs(config: Config, num_gpus: int = 1, *, head_weights: int = 0) -> list[Need]:
    """The stages of data, training and evaluation that this experiment has, in order. Models with `tp_plan` are
    cut into `num_gpus` slices; ValueError if one cannot be.
    """
    pair = config.pair
    data = config.data
    sliced = sliced_models(config.pair)
    sources = {"target": pair.target, "draft": pair.draft, "micro": pair.micro}
    sizes = {name: size_of(source) for name, source in sources.items() if source is not None}
    slices = sizes | {name: size_of(getattr(pair, name), num_gpus) for name in sliced}
    makes_data = any(num != 0 for num in (data.num_train, data.num_dev, data.num_test))
    stages = list(_data_stages(slices["target"], slices["draft"], data)) if makes_data else []
    if sliced:
        stages = [need._replace(stage=f"{need.stage}, on each GPU", is_per_gpu=True) for need in stages]
    if data.num_train != 0:  # null: all prompts
        stages.append(_training(sizes["draft"], data, config.heads, head_weights=head_weights))
    positions = data.max_prompt_tokens + config.decode.max_new_tokens
    per_sequence = {
        "KV caches": sum(size.kv_per_position for size in sizes.values()) * positions,
        "activations": _activations(sizes) * positions,
        "logits": (config.decode.max_draft_length + 1) * sizes["target"].vocab_size * _DECODING_BYTES_PER_LOGIT,
    }
    return [*stages, Need("decoding, traces", _weights(sizes), per_sequence)]


def gpus_of(written: str | None) -> list[float]:
    """Usable bytes of each GPU, written as `2x80` (two of 80 GB) or those of this machine, by the smallest."""
    if written is None:
        sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
        return [min(sizes) - _RESERVED_BYTES] * len(sizes) if sizes else []
    parts = re.fullmatch(r"([1-9]\d*)\s*x\s*(\d+(?:\.\d+)?)", written)
    if parts is None or float(parts[2]) * GB <= _RESERVED_BYTES:
        raise ValueError(
            f"pair.gpus is {written!r}; write count x GB, such as 2x80, each of more than {_RESERVED_BYTES / GB:g} GB"
        )
    return [float(parts[2]) * GB - _RESERVED_BYTES] * int(parts[1])


def size_of(source: ModelSource, num_slices: int = 1) -> Size:
    """One model's bytes, by its config.json; with several slices, those of one, which has whole embeddings and
    residuals. ValueError if it cannot be cut so.
    """
    whole = model_config(source)
    if source.tp_plan is not None:
        check_slices(source, whole, num_slices)
    text = whole.get_text_config()
    width = dtype_bytes(source, whole)
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    tables = text.vocab_size * text.hidden_size * width
    residuals = 4.0 * text.hidden_size * width
    return Size(
        weights=tables + (weight_bytes(source) - tables) / num_slices,
        kv_per_position=2.0 * text.num_hidden_layers * key_heads * head_width * width / num_slices,
        activations_per_position=residuals + (2 * inner + (heads + 2 * key_heads) * head_width) * width / num_slices,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def _weights(sizes: Mapping[str, Size]) -> dict[str, float]:
    return {f"{name} weights": size.weights for name, size in sizes.items()}


def _activations(sizes: Mapping[str, Size]) -> float:
    return max(size.activations_per_position for size in sizes.values())


def _data_stages(target: Size, draft: Size, data: DataConfig) -> Iterator[Need]:
    positions = data.max_prompt_tokens + data.max_new_tokens
    labelling = {"labels": {"target": target, "draft": draft}}
    if data.labels == "server" or data.mode == "sequential":
        labelling = {"labels of the draft": {"draft": draft}}
        if data.labels == "target":
            labelling["labels of the target"] = {"target": target}
    if data.source == "transformers":
        per_sequence = {
            "KV cache": target.kv_per_position * (positions + SPARE_POSITIONS),
            "activations": target.activations_per_position * data.max_prompt_tokens,
            "logits": target.vocab_size * _DECODING_BYTES_PER_LOGIT,
        }
        answering = _weights(labelling.get("labels", {"target": target}))
        yield Need("responses", answering, per_sequence, data.batch_size, "data.batch_size")
    for stage, sizes in labelling.items():
        fixed = _weights(sizes) | {"logits": _LABELLING_CHUNKS * data.chunk_mb * 2**20}
        states = sum(4.0 * size.hidden_size for size in sizes.values()) * positions
        per_sequence = {"activations": _activations(sizes) * positions, "states": states}
        yield Need(stage, fixed, per_sequence, data.batch_size, "data.batch_size")


def _training(draft: Size, data: DataConfig, heads: HeadsConfig, *, head_weights: int) -> Need:
    """Memory on one GPU in training: every rank holds all heads, and with online states the draft."""
    widest = max(heads.depths) * _FLOATS_PER_BLOCK + 1
    per_sequence = {"activations": 4.0 * widest * len(heads.reject_weights) * draft.hidden_size * data.max_new_tokens}
    fixed = {"heads": 4.0 * _FLOATS_PER_WEIGHT * head_weights}
    if heads.states == "online":
        fixed |= {"draft weights": draft.weights, "logits": _LABELLING_CHUNKS * data.chunk_mb * 2**20}
        per_sequence["draft"] = draft.activations_per_position * (data.max_prompt_tokens + data.max_new_tokens)
    return Need("training, on each GPU", fixed, per_sequence, heads.batch_size, "heads.batch_size", is_per_gpu=True)
