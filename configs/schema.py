"""The sections of an experiment's YAML: `pair`, `data`, `heads`, `trainer`, `decode`.

Frozen dataclasses that every room may read. A field's docstring is its help on the command line. Ranges are in
`configs.limits`. That no path is a URL (`configs.paths`) is settled here, so that no config with one can be made, in
Python either.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from configs.paths import check_local
from configs.remote import RayConfig, ServerConfig


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model: where it comes from and how it is loaded."""

    path: str
    """A local directory or a hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run the Python code in this model's repository. Read it first, and set `revision` to that commit."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """auto: as stored."""
    device_map: str | dict[str, str | int] | None = None
    """Anything accelerate takes: auto, cpu, cuda:0, a map of modules; null: GPU 0 if there is one, else the CPU."""
    tp_plan: Literal["auto"] | None = None
    """auto: cut every layer over the processes of torchrun, a GPU each, for `data`; transformers has a plan for most
    families. Instead of device_map, with which one GPU works at a time."""
    attn_implementation: str | None = None
    """Attention by name, as transformers knows it: sdpa, eager, flash_attention_2; null: the model's own choice."""
    quantization: Literal["4bit", "8bit"] | dict[str, Any] | None = None
    """4bit (NF4) or 8bit, of bitsandbytes, or the fields of another method of transformers, as {quant_method: hqq,
    nbits: 4}; 8bit of a feature draft needs no package. Another law: data and heads are of the quantised model."""


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
    """The large model, whose distribution the output keeps; memory and time go mostly here."""
    draft: ModelSource
    """The small model that proposes tokens; its tokenizer must be the target's. Heads are trained for it alone."""
    micro: ModelSource | None = None
    """A third, still smaller model for hierarchies."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How logits become probabilities; another sampling needs data, heads and traces of its own."""
    gpus: str | None = None
    """GPUs that the experiment is meant for, as 2x80 (two of 80 GB each), for `data_gen plan`; null: those of this
    machine.
    """
    num_threads: int | None = None
    """CPU threads of torch; null: as torch chooses. Same seed, machine and thread count give the same bytes."""

    def __post_init__(self) -> None:
        for name, model in (("target", self.target), ("draft", self.draft), ("micro", self.micro)):
            check_local(model and model.path, f"pair.{name}.path", may_be_on_hub=True)


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """One set of prompts."""

    path: str
    """stories (made here), a known set by name (an unknown name lists them), a file (JSONL, JSON, CSV, TSV, Parquet,
    Arrow), a directory of such files, or org/name on the hub."""
    name: str | None = None
    """Configuration of the set, where it has several."""
    split: str = "train"
    """Part of the set that is read, and split here; for a known set, train means the part that the set prescribes (for
    humaneval test, its only one).
    """
    test_split: str | None = None
    """Part of the set that is test alone; null: test is split off `split`, or is what a known set prescribes."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field that is looked for (prompt, id, messages, turns, ...) -> the set's own name of it, which for a known set
    comes on top of those that are known.
    """
    weight: float = 1.0
    """Share of the prompts, where there are several sets."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """From prompts to rows and features."""

    dir: str = "data/run"
    """Where rows, features and manifest go."""
    prompts: PromptSource | tuple[PromptSource | str, ...] | str = "stories"
    """A set by its path, {path: P, split: S, columns: {prompt: question}} where it needs more, or a list of such sets
    with weights.
    """
    template: str = "chat"
    """chat (the tokenizer's own), plain, or the paper's wrappers: llama2, humaneval, gsm8k."""
    num_train: int | None = 1000
    """Prompts that heads learn from; time and disk of the data grow with them. null: all that dev and test leave."""
    num_dev: int = 100
    """Prompts on which the best head and its weights are chosen."""
    num_test: int = 100
    """Prompts on which heads are reported, at least 0."""
    split_weights: tuple[int, int, int] | None = None
    """Shares of train, dev and test in a set without splits of its own; the num_* are drawn from them. null: 40, 10 and
    2 (SpecDec++: Alpaca 40k/10k/2k), or, where these do not have the num_* or num_train is null, num_dev and num_test
    as they are and the rest for train.
    """
    split_ids: str | None = None
    """A JSON file {"dev": [ids], "test": [ids]} that decides the split instead; ids that it does not name are train."""
    seed: int = 0
    """0 to 2^32 - 1; decides the split, the responses and every coin of the data. Another seed is other data."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out and counted as skipped; raise it for long texts, at the price of memory."""
    max_new_tokens: int = 128
    """Longest response in tokens; the time of the data grows with it. Use what you will generate."""
    source: Literal["transformers", "server", "file"] = "transformers"
    """Who writes the responses: the target in process, a completions server, or a file that is already there."""
    responses: str | None = None
    """File of `source: file`: JSONL with id, response (text) or response_ids, and optionally turn and finish_reason."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """The server of `source: server` and `labels: server`."""
    labels: Literal["target", "server"] = "target"
    """Who tells the target's law at each place of a response: the target in this process, or the server, which knows
    it already where sampling truncates, so that no target is loaded here; cross_entropy is then null.
    """
    max_error_share: float = 0.05
    """Errors over prompts beyond which a run that has written everything ends as a failure; `--retry_errors` then tries
    them again.
    """
    mixing_ratio: float = 0.15
    """r: the probability that a token of the mixed sequence comes from the target (SpecDec++ section 3.3)."""
    mixes: int = 1
    """Independent token mixings per response."""
    mode: Literal["together", "sequential"] = "together"
    """sequential loads one model at a time; acceptance_rate and cross_entropy, which need both, are then null (with
    `labels: server` cross_entropy alone).
    """
    rows_per_shard: int = 256
    """Responses per file, which is what a stopped run loses at most; smaller: resumes closer, more files."""
    batch_size: int = 64
    """Sequences per forward."""
    chunk_mb: int = 64
    """Size of one float32 [positions, vocabulary] chunk while labelling, whatever the vocabulary; about eight live at
    once.
    """
    draft_length: int = 5
    """Tokens that a feature draft drafts from each place of a response, all of which heads learn from; others draft
    one.
    """
    draft_every: int = 1
    """Heads on a feature draft learn from drafts at every n-th place of a response: neighbours say nearly the same, and
    time and disk of the data fall almost by n.
    """
    features: tuple[Literal["fed", "drawn"], ...] | None = None
    """Which hidden states are kept: fed with the mixed sequence (law 4.6), or those that the tokens were drawn from
    (law 4.8b). null: those that heads.timings and heads.specdec need.
    """
    feature_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the hidden states on disk; float32 takes twice the space of the other two."""
    engine: Literal["local", "ray"] = "local"
    """Where shards are made: in this process, or by actors of Ray; both write the same bytes."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The workers of `engine: ray`."""

    def __post_init__(self) -> None:
        for name in ("dir", "split_ids", "responses"):
            check_local(getattr(self, name), f"data.{name}")
        for source in self.prompt_sources:
            check_local(source.path, "data.prompts", may_be_on_hub=True)

    @property
    def feature_sets(self) -> tuple[Literal["fed", "drawn"], ...]:
        """`features`, or both where nothing has settled it yet."""
        return ("fed", "drawn") if self.features is None else self.features

    @property
    def prompt_sources(self) -> tuple[PromptSource, ...]:
        """`prompts` as a list of sets, however it is written."""
        given = self.prompts if isinstance(self.prompts, tuple | list) else (self.prompts,)
        return tuple(PromptSource(path=source) if isinstance(source, str) else source for source in given)


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The sweep of acceptance-prediction heads."""

    dir: str = "checkpoints/runs/run"
    """Where checkpoints, metrics and exported heads go."""
    depths: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Residual blocks; 0 is a linear head."""
    architectures: tuple[str, ...] = ("resnet",)
    """What a block computes: resnet, the paper's, or others of `heads.model.architectures`."""
    reject_weights: tuple[float, ...] = (1.0, 3.0, 6.0, 12.0)
    """w_rej of the loss, above 0: a head for each. Larger: rejections count more, so that raw scores are lower."""
    accept_weight: float = 1.0
    """w_acc of the loss, above 0; only its ratio to `reject_weights` matters."""
    timings: tuple[Literal["fed", "drawn", "prefix", "candidate"], ...] = ("drawn",)
    """fed: scored after a draft forward (the paper's); drawn: the moment a token is drawn; prefix: before; candidate:
    drawn, for trees.
    """
    scalars: tuple[bool | tuple[str, ...], ...] = (True,)
    """What heads read beside the hidden state: nothing, log q(y) and H(q) (true; prefix heads H(q)), or scalars by
    name: [entropy].
    """
    embeddings: tuple[bool, ...] = (False,)
    """With or without the draft's embedding of the token as input; prefix heads, which know no token, are without."""
    normalised: tuple[bool, ...] = (False,)
    """With or without a LayerNorm (which has no weights) of hidden state and embedding."""
    dropout: float = 0.0
    """Share of the residual stream that a training step drops: such a head fits home a little less, and travels
    better.
    """
    specdec: bool = True
    """Also the heads of SpecDec++, fed-time on the hidden state alone, whatever `timings`, `scalars` and `embeddings`
    combine to.
    """
    reached: bool = False
    """Of a feature draft's data: each token counts in the loss, and where weights are chosen, as often as verification
    looks at it, by the acceptance_probs before it in its draft; false: all count the same.
    """
    features: Literal["cached", "online"] = "cached"
    """online: the frozen draft runs over each batch, once for all heads, and nothing but rows is read."""
    num_train: int | None = None
    """Use only the first so many training responses; null: all."""
    learning_rate: float | None = None
    """Peak step of the optimiser, above 0; null: by rule from the draft's width (`heads.training.recipe`). SpecDec++
    has 5e-5, for millions of tokens and a width of 4096.
    """
    warmup_ratio: float = 0.03
    """Share of all steps, 0 to 1, in which the learning rate rises to its peak; then it falls as a cosine."""
    batch_size: int = 32
    """Responses per batch, of all processes together: each of n processes takes an n-th part."""
    select: Literal["best", "last"] = "best"
    """Which weights of each head count: those of its best calibrated KL on dev, or the last."""
    checkpoint_every_n_steps: int | None = None
    """A killed run goes on from the last checkpoint. null: one every 3 minutes. One follows each validation anyway."""
    seed: int = 0
    """0 to 2^32 - 1; decides the first weights and the order of batches."""

    def __post_init__(self) -> None:
        check_local(self.dir, "heads.dir")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Policies, and how they are evaluated."""

    dir: str = "data/run/decode"
    """Where traces, tables and the report go."""
    max_draft_length: int = 20
    """Most tokens of a draft, at least 0; traces record up to it. Raise it where drafts often reach it."""
    max_new_tokens: int = 128
    """Longest generation in tokens, in traces too; their time grows with it."""
    compile: bool | Literal["stop"] = False
    """true: draft steps and verifications, on static caches (each width's first use takes seconds; CUDA graphs on a
    GPU). stop: only what
    follows the draft's forward (sampling, draw, signals, head), beside eager models of any family."""
    num_dev: int = 50
    """Prompts on which each policy's setting is chosen."""
    num_test: int = 50
    """Prompts on which each policy is reported."""
    datasets: tuple[str, ...] = ()
    """Prompt sets, as data.prompts takes them; empty: data.prompts alone."""
    abroad_weights: tuple[int, int] = (1, 1)
    """Shares of dev and test in a set that no head was trained on; a small set may have few prompts to choose by."""
    seed: int = 0
    """0 to 2^32 - 1; decides the coins of traces and generations."""
    prompts_per_shard: int = 16
    """A trace is recorded, and resumed, in shards of so many prompts."""
    draws_per_prompt: int = 1
    """Responses of a trace to each prompt, with coins of their own. Raised, it keeps what is there. Intervals resample
    whole prompts.
    """
    as_recorded: bool = False
    """Take models, sampling, prompts and limits as the trace in `decode.dir` has them, and the times that lie beside
    it: `evaluate`, `replay` and `tune` then read a published trace with neither models nor prompts, and record and
    measure nothing.
    """
    trace_hidden: bool = True
    """Keep the draft's hidden states in the trace, so that heads trained later are evaluated with no model."""
    perfect_head: bool = True
    """Also run the target along the branches of the trace, for the bound of the perfect head."""
    heads: tuple[str, ...] = ()
    """Exported heads: directories or hub ids. Empty: every head under heads.dir/exported."""
    allow_foreign_heads: bool = False
    """Also use heads that were trained for another draft, target or sampling; their predictions are then not to be
    trusted.
    """
    policies: tuple[str, ...] = ()
    """Policies that compete: built-in names, `head` for the heads, your own as module:Class; empty: all built-in."""
    grid: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """policy -> parameter -> values to try; empty: the built-in grid."""
    t_draft_s: float | None = None
    """Seconds per draft forward, above 0, given together with t_target_s; null: measured here."""
    t_target_s: float | None = None
    """Seconds per target forward, above 0, given together with t_draft_s; null: measured here, in half a minute."""
    stop_share: float | Literal["size", "measured"] = "size"
    """Seconds of a stop (signals, head) over those of a draft step, at `ratios` and given times. size: bytes of the
    head over bytes of the draft; measured: as on this machine; a number: of the dearest stop, the others in proportion.
    Measured times have measured stops."""
    verify_shares: tuple[float, ...] = (0.0, 0.2)
    """With `evaluate --batch`, at `ratios` and given times: seconds of each further verified token over those of a
    draft step.
    """
    ratios: tuple[float, ...] = ()
    """Further values of t_target / t_draft to evaluate at, as on other hardware."""

    def __post_init__(self) -> None:
        check_local(self.dir, "decode.dir")
        for name in ("datasets", "heads"):
            for path in getattr(self, name):
                check_local(path, f"decode.{name}", may_be_on_hub=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment."""

    pair: PairConfig
    """The models and their sampling."""
    data: DataConfig = field(default_factory=DataConfig)
    """What heads learn from, and how it is made."""
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    """What is trained, and how."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of pytorch_lightning.Trainer; max_epochs is by rule (`heads.training.recipe`) and devices is 1 where
    nothing else is said, `auto` takes all.
    """
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """What is evaluated, and how."""
