"""The sections of an experiment's YAML: `pair`, `data`, `heads`, `trainer`, `decode`.

Plain frozen dataclasses that import nothing of the project, so that every room may read them. The docstring under a field is its help text
on the command line. Ranges are checked where a section is used, by the room that owns it; the schema only knows types.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where one model comes from."""

    path: str
    """A local directory or a hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: str = "auto"
    """float64, float32, bfloat16, float16, or auto: as stored."""
    device_map: str | dict[str, str | int] | None = None
    """Anything accelerate takes: auto, cpu, cuda:0, a map of modules; null: GPU 0 if there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The one transform from logits to probabilities that data, traces and decoding share."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    """Keep the k most probable tokens."""
    top_p: float | None = None
    """Keep the smallest set of tokens that holds this probability."""


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """The models, largest first, and how they are sampled."""

    target: ModelSource
    draft: ModelSource
    micro: ModelSource | None = None
    """A third, still smaller model for hierarchies."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    trust_remote_code: bool = False
    """Run model code that comes with a repository. Off unless you have read it."""
    num_threads: int | None = None
    """CPU threads of torch; null: as torch chooses. Same seed, machine and thread count give the same bytes."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """From prompts to rows and features."""

    dir: str = "data/run"
    """Where rows, features and manifest go."""
    prompts: str = "stories"
    """stories (made here), alpaca, gsm8k, humaneval, mt_bench, spec_bench (hub), or the path of a JSONL file."""
    template: str = "chat"
    """chat (the tokenizer's own), or a named wrapper of data_gen.templates."""
    num_train: int = 1000
    num_dev: int = 100
    num_test: int = 100
    seed: int = 0
    max_prompt_tokens: int = 512
    max_new_tokens: int = 128
    mixing_ratio: float = 0.15
    """r: the probability that a token of the mixed sequence comes from the target (SpecDec++ section 3.3)."""
    mixes: int = 1
    """Independent token mixings per response."""
    rows_per_shard: int = 256
    batch_size: int = 64
    """Sequences per forward."""
    feature_dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The sweep of acceptance-prediction heads."""

    dir: str = "checkpoints/runs/run"
    """Where checkpoints, metrics and exported heads go."""
    depths: tuple[int, ...] = (0, 1, 2, 3, 4)
    reject_weights: tuple[float, ...] = (1.0, 3.0, 6.0, 12.0)
    timings: tuple[Literal["fed", "drawn"], ...] = ("fed",)
    scalars: tuple[bool, ...] = (False,)
    """With or without log q(y) and H(q) as inputs beside the hidden state."""
    learning_rate: float = 5e-5
    warmup_ratio: float = 0.03
    batch_size: int = 32
    """Sequences per optimiser step and device."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Policies, and how they are evaluated."""

    dir: str = "data/run/decode"
    """Where traces, tables and the report go."""
    max_draft_length: int = 20
    max_new_tokens: int = 128
    num_dev: int = 50
    """Prompts on which each policy's setting is chosen."""
    num_test: int = 50
    """Prompts on which it is reported."""
    seed: int = 0
    heads: tuple[str, ...] = ()
    """Exported heads: directories or hub ids. Empty: every head under heads.dir/exported."""
    grid: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """policy -> parameter -> values to try; empty: the built-in grid."""
    t_draft_s: float | None = None
    """Seconds per draft forward; null: measured here."""
    t_target_s: float | None = None
    """Seconds per target forward; null: measured here."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment."""

    pair: PairConfig
    data: DataConfig = field(default_factory=DataConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of pytorch_lightning.Trainer."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
