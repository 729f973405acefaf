"""What makes data outside of this process: completions servers, and actors of Ray."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """An OpenAI-compatible completions server, or several of one model: vLLM, SGLang, TGI, `transformers serve`."""

    url: tuple[str, ...] | str = "http://localhost:8000/v1"
    """Address of the API, up to and with /v1; or a list of such addresses, which share the requests."""
    model: str | None = None
    """The name under which the server knows the target; null: pair.target.path."""
    kind: Literal["openai", "vllm", "transformers"] = "openai"
    """Dialect in which the server is told the sampling: vllm, also for SGLang; transformers, for `transformers serve`;
    openai, which knows no top_k.
    """
    prompt_as: Literal["auto", "text", "token_ids"] = "auto"
    """token_ids is exact, where the server takes lists; auto: token_ids for vllm, else text."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request body."""
    api_key_variable: str | None = None
    """Environment variable whose value is sent as the key. null: OPENAI_API_KEY to https://api.openai.com, and no key
    to any other address.
    """
    concurrency: int = 32
    """Requests in flight at once, at each address."""
    num_logprobs: int | None = None
    """`labels: server` asks for the log-probabilities of so many tokens at each place, more than sampling.top_k; null:
    30 more (without top_k 80). vLLM is to be started with --max-logprobs as large.
    """
    max_retries: int = 5
    """Retries of a request, with exponential back-off, after time-outs, refused connections, 429 and 5xx."""
    timeout_s: float = 600.0
    """Seconds that a request may take."""

    @property
    def urls(self) -> tuple[str, ...]:
        """`url` as a list, however it is written."""
        return (self.url,) if isinstance(self.url, str) else self.url


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Resources of `engine: ray`: each worker is an actor that holds the models of a stage, with so many CPUs and
    GPUs.
    """

    num_workers: int = 2
    """Actors, at least 1; each holds target and draft, so that memory grows with them."""
    num_cpus: float = 1.0
    """CPU cores reserved for each worker; a share, such as 0.5, is allowed."""
    num_gpus: float = 0.0
    """GPUs reserved for each worker; 0: the CPU, 0.5: two workers share a GPU."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources of Ray reserved for each worker, such as {h100: 1}; machines have those that they were started
    with.
    """
    address: str | None = None
    """A running cluster (auto, or ray://host:port); null: this machine."""
