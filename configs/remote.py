"""Settings of data made outside this process: completions servers and Ray actors."""

from dataclasses import dataclass, field
from typing import Any, Literal


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
    """Environment variable whose value is sent as the key. null: OPENAI_API_KEY to https://api.openai.com, and no key
    to any other address.
    """
    concurrency: int = 32
    """Requests in flight at once, at each address."""
    num_logprobs: int | None = None
    """With `labels: server`, the number of log-probabilities requested at each position; it must exceed sampling.top_k.
    null: top_k + 30 (80 without top_k). Start vLLM with --max-logprobs at least as large.
    """
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
