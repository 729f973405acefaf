"""The sections of an experiment's YAML: `pair`, `data`, `heads`, `trainer`, `decode`.

A field's docstring is its help on the command line. `configs.limits` has ranges, and refuses URLs instead of paths."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.paths import check_local


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model: its location and how it is loaded."""

    path: str
    """A local directory or a hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run the Python code in this model's repository. Read it first, and set `revision` to that commit."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights; auto: as stored."""
    device_map: str | dict[str, str | int] | None = None
    """A value of accelerate: auto, cpu, cuda:0, or a map of modules; null: GPU 0 if there is one, else the CPU."""
    tp_plan: Literal["auto"] | None = None
    """auto: for `data`, split every layer over the processes of torchrun, one GPU each (tensor parallelism), if
    transformers has a plan for the family. With device_map only one GPU works at a time."""
    attn_implementation: str | None = None
    """Attention implementation of transformers: sdpa, eager, flash_attention_2; null: the model's default."""
    quantization: Literal["4bit", "8bit"] | dict[str, Any] | None = None
    """4bit (NF4) or 8bit of bitsandbytes, or the fields of another method of transformers, such as {quant_method: hqq,
    nbits: 4}; 8bit of a feature draft needs no package. A quantised model needs its own data and heads."""
    packed: bool = False
    """In float32 on a CPU, keep matrices in oneDNN's order: verifying a few tokens then costs little more than one,
    which it does not otherwise on CPUs that lack bfloat16 arithmetic."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How logits become probabilities in data, traces and decoding."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    """Sample from the k most probable tokens; null: from all."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability; null: from all."""


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """The models, largest first, and how they are sampled."""

    target: ModelSource
    """The large model, whose output distribution is preserved; it takes most of the memory and time."""
    draft: ModelSource
    """The small model that drafts, with the target's tokenizer; mtp: the target's MTP layer. Heads fit only this."""
    micro: ModelSource | None = None
    """A third, still smaller model for hierarchies."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How logits become probabilities; another sampling needs new data, heads and traces."""
    gpus: str | None = None
    """GPUs that `plan` assumes, such as 2x80 (two of 80 GB each); null: those of this machine."""
    num_threads: int | None = None
    """CPU threads of torch; null: torch's default. Same seed, machine and thread count give the same bytes."""

    def __post_init__(self) -> None:
        for name, model in (("target", self.target), ("draft", self.draft), ("micro", self.micro)):
            check_local(model and model.path, f"pair.{name}.path", may_be_on_hub=True)
        if self.draft.path == "mtp":
            mtp = replace(self.draft, path=f"{self.target.path}#mtp", revision=self.target.revision)
            object.__setattr__(self, "draft", mtp)


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """One set of prompts."""

    path: str
    """stories (generated), the name of a known set (an unknown name lists them), a file (JSONL, JSON, CSV, TSV,
    Parquet, Arrow), a directory of such files, or org/name on the hub."""
    name: str | None = None
    """Configuration of the set, if it has several."""
    split: str = "train"
    """Part of the set that is read and then split; for a known set, train means the set's default part."""
    test_split: str | None = None
    """Part of the set used only for test; null: test is taken from `split`, or is the default of a known set."""
    columns: dict[str, str] = field(default_factory=dict, hash=False)
    """Our name of a field (prompt, id, messages, turns, ...) -> the set's name of it."""
    weight: float = 1.0
    """Share of the prompts, if there are several sets."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """An OpenAI-compatible completions server, or several of one model: vLLM, SGLang, TGI, `transformers serve`."""

    url: tuple[str, ...] | str = "http://localhost:8000/v1"
    """Address of the API, including /v1; or a list of addresses, which share the requests."""
    model: str | None = None
    """The name under which the server knows the target; null: pair.target.path."""
    kind: Literal["openai", "vllm", "transformers"] = "openai"
    """How sampling settings are sent: vllm (also SGLang), transformers (`transformers serve`), or openai (no top_k)."""
    prompt_as: Literal["auto", "text", "token_ids"] = "auto"
    """How prompts are sent. token_ids is exact, if the server accepts it; auto: token_ids for vllm, else text."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional fields of the request body."""
    api_key_variable: str | None = None
    """Environment variable of the key. null: OPENAI_API_KEY for https://api.openai.com, no key for other addresses."""
    concurrency: int = 32
    """Requests in flight at once, at each address."""
    num_logprobs: int | None = None
    """With `labels: server`, the number of log-probabilities requested at each position; it must exceed sampling.top_k.
    null: top_k + 30 (80 without top_k). Start vLLM with --max-logprobs at least as large."""
    max_retries: int = 5
    """Retries of a request after time-outs, refused connections, 429 and 5xx, with exponential back-off."""
    timeout_s: float = 600.0
    """Time limit of a request, in seconds."""

    @property
    def urls(self) -> tuple[str, ...]:
        """`url` as a tuple."""
        return (self.url,) if isinstance(self.url, str) else self.url


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Resources of `engine: ray`: each worker is an actor that holds the models of a stage."""

    num_workers: int = 2
    """Number of actors, at least 1. Each holds target and draft, so memory use grows with it."""
    num_cpus: float = 1.0
    """CPU cores reserved for each worker; a fraction such as 0.5 is allowed."""
    num_gpus: float = 0.0
    """GPUs reserved for each worker; 0 uses the CPU, 0.5 lets two workers share a GPU."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom Ray resources reserved for each worker, such as {h100: 1}."""
    address: str | None = None
    """Address of a running cluster (auto, or ray://host:port); null: use this machine only."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """From prompts to rows and labels."""

    dir: str = "data/run"
    """Directory of rows, labels and manifest, and of the cache of hidden states that training fills."""
    prompts: PromptSource | tuple[PromptSource | str, ...] | str = "stories"
    """A prompt set: its path, or {path: P, split: S, columns: {prompt: question}}; or a list of sets with weights."""
    template: str = "chat"
    """Prompt format: chat (the tokenizer's chat template), plain, or those of SpecDec++: llama2, humaneval, gsm8k."""
    num_train: int | None = 1000
    """Number of prompts for training; time and disk space grow with it. null: all prompts that dev and test leave."""
    num_dev: int = 100
    """Number of prompts for choosing the best head and its weights."""
    num_test: int = 100
    """Number of prompts for the reported results, at least 0."""
    split_weights: tuple[int, int, int] | None = None
    """Shares of train, dev and test in a set without predefined splits; num_* prompts are taken from each. null: 40, 10
    and 2 (SpecDec++: Alpaca 40k/10k/2k); or, if these are too small for num_* or num_train is null, exactly num_dev and
    num_test, and the rest for train."""
    split_ids: str | None = None
    """A JSON file {"dev": [ids], "test": [ids]} that defines the split instead; all other ids are train."""
    seed: int = 0
    """Random seed of the split, the responses and the token mixing, 0 to 2^32 - 1. Another seed makes other data."""
    max_prompt_tokens: int = 512
    """Longer prompts are skipped and counted; a larger limit takes more memory."""
    max_new_tokens: int = 128
    """Maximum response length in tokens; use the length that you will generate. Time grows with it."""
    source: Literal["transformers", "server", "file"] = "transformers"
    """Where responses come from: the target in this process, a completions server, or an existing file."""
    responses: str | None = None
    """The file of `source: file`: JSONL with id, response (text) or response_ids, optionally turn and finish_reason.
    The target generates the responses that it lacks."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """The server of `source: server` and `labels: server`."""
    labels: Literal["target", "server"] = "target"
    """Where the target's distribution at each position comes from: the target in this process, or the server's
    log-probabilities. With server no target is loaded; sampling must truncate, and cross_entropy is null."""
    max_error_share: float = 0.05
    """Largest share of prompts that may fail; above it a run writes everything, then exits with an error."""
    mixing_ratio: float = 0.15
    """Probability r that a token of the mixed sequence comes from the target (SpecDec++ section 3.3)."""
    mode: Literal["together", "sequential"] = "together"
    """sequential loads one model at a time. acceptance_rate and cross_entropy, which need both models, are then null
    (with `labels: server` only cross_entropy)."""
    rows_per_shard: int = 256
    """Responses per file; smaller values make more files. An interrupted run loses its unfinished shards."""
    batch_size: int = 64
    """Sequences per forward pass."""
    chunk_mb: int = 64
    """Size of one float32 [positions, vocabulary] chunk during labelling; about eight are in memory at once."""
    draft_length: int = 5
    """With a feature draft, tokens drafted from each position of a response; other drafts propose one."""
    draft_every: int = 1
    """With a feature draft, draft at every n-th position of a response only; time and disk space fall almost by n."""
    engine: Literal["local", "ray"] = "local"
    """Where shards are made: in this process or by Ray actors; both write the same bytes."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The workers of `engine: ray`."""

    @property
    def prompt_sources(self) -> tuple[PromptSource, ...]:
        """`prompts` as a tuple of sets."""
        sources = self.prompts if isinstance(self.prompts, tuple | list) else (self.prompts,)
        return tuple(PromptSource(path=source) if isinstance(source, str) else source for source in sources)


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The sweep of acceptance-prediction heads."""

    dir: str = "checkpoints/runs/run"
    """Directory of checkpoints, metrics and exported heads."""
    depths: tuple[int, ...] = (0, 1, 2)
    """Numbers of residual blocks to try; 0 is a linear head."""
    architectures: tuple[str, ...] = ("resnet",)
    """Block types to try: resnet (the paper's) or others of `heads.model.formula`."""
    reject_weights: tuple[float, ...] = (1.0,)
    """Values of w_rej / w_acc of the loss to try, above 0. A larger one counts rejections more and lowers raw scores;
    calibrated heads differ little. SpecDec++: [1, 3, 6, 12]."""
    timings: tuple[Literal["fed", "drawn", "prefix", "candidate"], ...] = ("drawn",)
    """When a token is scored: fed (once read, the paper's), drawn, prefix (before it is drawn), candidate (trees)."""
    scalars: tuple[bool | tuple[str, ...], ...] = (True,)
    """Inputs besides the hidden state: none (false), log q(y), H(q) and logit q(y) (true; prefix heads: H(q) and logit
    max q), or a list of names such as [entropy]; text_position is log(1 + response tokens before y)."""
    embeddings: tuple[bool, ...] = (False, True)
    """Whether the draft's token embedding is an input too, for which training reads the draft's weights; prefix heads,
    which see no token, never read it."""
    normalised: tuple[bool, ...] = (False,)
    """Whether hidden state and embedding pass a LayerNorm without weights."""
    dropout: tuple[float, ...] = (0.0, 0.2)
    """Dropout rates of the residual stream to try, for heads with blocks: they fit the training prompts slightly less
    and other prompts better."""
    specdec: bool = False
    """Also train the heads of SpecDec++: fed-time, on the hidden state alone."""
    states: Literal["cached", "online"] = "cached"
    """Hidden states of the draft: cached runs it once and keeps them in data.dir/states; online runs it over each
    batch, once for all heads, and needs no disk space."""
    state_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the hidden states; float32 takes twice the space."""
    layer: int | None = None
    """Take hidden states after this many layers of the draft, to compare layers; decoding reads the last (null)."""
    num_train: int | None = None
    """Train on this many responses only, the first ones; null: all."""
    learning_rate: float | None = None
    """Peak learning rate, above 0; null: from the draft's width. SpecDec++: 5e-5 for millions of tokens, width 4096."""
    warmup_ratio: float = 0.03
    """Share of all steps, 0 to 1, in which the learning rate rises to its peak; a cosine decay follows."""
    batch_size: int = 32
    """Responses per batch, over all processes together."""
    select: Literal["best", "last"] = "best"
    """Which weights of each head are used: best (lowest calibrated KL on dev) or last."""
    checkpoint_every_n_steps: int | None = None
    """Steps between checkpoints, from which a killed run continues; null: every 3 minutes and at each validation."""
    seed: int = 0
    """Random seed of the initial weights and the order of batches, 0 to 2^32 - 1."""

    @property
    def state_timings(self) -> tuple[Literal["fed", "drawn"], ...]:
        """The timings of the hidden states that the heads read: prefix and candidate heads read drawn ones."""
        is_fed = {timing == "fed" for timing in self.timings}
        if self.specdec:
            is_fed.add(True)
        return tuple(name for name, flag in (("fed", True), ("drawn", False)) if flag in is_fed)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Policies and their evaluation."""

    dir: str = "data/run/decode"
    """Directory of traces, tables and the report."""
    max_draft_length: int = 20
    """Maximum draft length in tokens, at least 0, also in traces. Raise it if drafts often reach it."""
    max_new_tokens: int = 128
    """Maximum generation length in tokens, also in traces; their time grows with it."""
    num_dev: int = 50
    """Number of prompts for choosing each policy's setting."""
    num_test: int = 50
    """Number of prompts for the reported results."""
    datasets: tuple[str, ...] = ()
    """Prompt sets to evaluate on, in the form of data.prompts; empty: data.prompts alone."""
    transfer_weights: tuple[int, int] = (1, 1)
    """Shares of dev and test in a transfer set, which no head was trained on."""
    seed: int = 0
    """Random seed of traces and generations, 0 to 2^32 - 1."""
    prompts_per_shard: int = 16
    """Prompts per file of a trace; an interrupted recording continues at the last complete file."""
    draws_per_prompt: int = 1
    """Independent responses per prompt in a trace; a larger value keeps those already recorded."""
    as_recorded: bool = False
    """Take models, sampling, prompts, limits and times from the trace in `decode.dir`. `evaluate`, `replay` and `tune`
    then read a published trace without models or prompts, and record and measure nothing."""
    trace_hidden: bool = True
    """Store the draft's hidden states in the trace, so that heads trained later are evaluated without a model."""
    perfect_head: bool = True
    """Also run the target along the branches of the trace, to compute the bound of a perfect head."""
    heads: tuple[str, ...] = ()
    """Exported heads to evaluate: directories or hub ids; empty: every head under heads.dir/exported."""
    allow_foreign_heads: bool = False
    """Also use heads trained for another draft, target or sampling; their predictions may be wrong."""
    policies: tuple[str, ...] = ()
    """Policies to compare: built-in names, `head` for the heads, custom ones as module:Class; empty: all built-in."""
    grid: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Policy -> parameter -> values to try; empty: the built-in grid."""
    t_draft_s: float | None = None
    """Seconds per draft forward, above 0; set it together with t_target_s or t_target_ms. null: measured."""
    t_target_s: float | None = None
    """Seconds per target forward, above 0, if verifying more tokens takes no longer; with t_draft_s. null: measured."""
    t_target_ms: float | str | None = None
    """Instead of t_target_s: milliseconds per target forward by the tokens that it verifies, 1:2.5,2:3.2,9:4.1."""
    stop_share: float | Literal["size", "measured"] = "size"
    """Time of a stop decision (signals, head) relative to a draft step, at `ratios` and given times. size: bytes of the
    head over bytes of the draft; measured: on this machine; a number: for the costliest stop, others in proportion."""
    verify_shares: tuple[float, ...] = (0.0, 0.2)
    """With `evaluate --batch`, at `ratios` and given times: time of each further verified token, in draft steps."""
    ratios: tuple[float, ...] = ()
    """Additional values of t_target / t_draft to evaluate at, as on other hardware."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment."""

    pair: PairConfig
    """The models and their sampling."""
    data: DataConfig = field(default_factory=DataConfig)
    """The training data and how it is made."""
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    """The heads and their training."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of pytorch_lightning.Trainer; by default max_epochs follows from the data, and devices is 1."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """Decoding and evaluation."""
    arguments: tuple[str, ...] = field(default=(), compare=False)
    """The part of a command line that gave these settings, such as --config FILE; empty if they were made in Python."""
    is_step: bool = field(default=False, compare=False)
    """Whether a command runs as a step of `all`, which prints less of each and the verdict once, at the end."""
