"""Limits of every number and path of an experiment's YAML, checked before a command starts. Limits that depend on more
than the setting (available prompts, positions that a model reads) are checked by the package that knows them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from configs.paths import check_local
from configs.schema import Config


class Limit(NamedTuple):
    """A range of finite numbers; `is_open` excludes `low`."""

    low: float
    high: float = math.inf
    is_open: bool = False

    def admits(self, value: Any) -> bool:
        """Whether the value is a number within the limit."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return is_number and self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        low = f"greater than {self.low:g}" if self.is_open else f"at least {self.low:g}"
        return low if math.isinf(self.high) else f"{low} and at most {self.high:,.10g}"


_MOST = 10**9
_COUNT = Limit(1, _MOST)
_NAMES = {
    Limit(0, is_open=True): """
        data.prompts.weight data.server.timeout_s heads.reject_weights trainer.limit_train_batches
        trainer.limit_val_batches trainer.limit_test_batches trainer.val_check_interval decode.t_draft_s
        decode.t_target_s decode.t_target_ms decode.ratios decode.transfer_weights""",
    Limit(0): """
        pair.sampling.temperature data.split_weights data.ray.num_cpus data.ray.num_gpus data.ray.resources
        trainer.gradient_clip_val decode.verify_shares decode.stop_share""",
    Limit(0, 1, is_open=True): "pair.sampling.top_p",
    Limit(0, 1): "data.mixing_ratio data.max_error_share heads.warmup_ratio",
    Limit(0, 0.9): "heads.dropout",
    Limit(0, 10, is_open=True): "heads.learning_rate",
    Limit(0, 1000): "heads.depths heads.layer decode.max_draft_length",
    Limit(0, 2**32 - 1): "data.seed heads.seed decode.seed",
    Limit(0, _MOST): """
        data.num_train data.num_dev data.num_test data.server.max_retries trainer.log_every_n_steps decode.num_dev
        decode.num_test""",
    Limit(-1): "trainer.num_sanity_val_steps",
    Limit(1, 1000): "data.draft_length data.draft_every",
    Limit(1, 1024): "pair.num_threads",
    Limit(1, 4096): "data.server.concurrency",
    Limit(1, 10**4): "data.server.num_logprobs",
    _COUNT: """
        pair.sampling.top_k data.max_prompt_tokens data.max_new_tokens data.rows_per_shard data.batch_size
        data.chunk_mb data.ray.num_workers heads.num_train heads.batch_size heads.checkpoint_every_n_steps
        trainer.accumulate_grad_batches trainer.check_val_every_n_epoch trainer.num_nodes decode.max_new_tokens
        decode.prompts_per_shard decode.draws_per_prompt""",
}
LIMITS = {name: limit for limit, names in _NAMES.items() for name in names.split()}
"""Dotted name -> the limit of its number, or of each number of its list. null passes where the schema allows it."""
_PATHS = dict.fromkeys(("data.dir", "data.split_ids", "data.responses", "heads.dir", "decode.dir"), False)
_PATHS |= dict.fromkeys(("data.prompts", "decode.datasets", "decode.heads"), True)
"""Name -> whether it may also be a hub id; those of `pair` are checked when it is made."""


def refuse_null(schema: Any, section: Any, name: str) -> None:
    """Raise ValueError for a section without settings, and for a null that its dataclass (None: any) does not take."""
    if not isinstance(section, Mapping) and not hasattr(section, "__dict__"):
        raise ValueError(f"{name} is {'null' if section is None else section}; give it settings, or remove it")
    for key, kind in get_type_hints(schema).items() if schema else ():
        value = getattr(section, key)
        if value is None and NoneType not in get_args(kind):
            raise ValueError(f"{name}.{key} is null; give it a value, or remove it")
        if is_dataclass(kind):
            refuse_null(kind, value, f"{name}.{key}")


def check_limits(config: Config) -> None:
    """Raise ValueError for the first setting that is outside its limit."""
    values = asdict(config)
    sections = get_type_hints(Config)
    del sections["arguments"], sections["is_step"]
    for name, section in sections.items():
        refuse_null(section if is_dataclass(section) else None, getattr(config, name), name)
    for name, limit in LIMITS.items():
        for number in _leaves(values, name.split(".")):
            if not isinstance(number, str) and not limit.admits(number):
                raise ValueError(f"{name} is {number}; it must be a number, {limit}")
    for name, may_be_on_hub in _PATHS.items():
        for path in _leaves(values, name.split(".")):
            check_local(path, name, may_be_on_hub=may_be_on_hub)
    urls = config.data.server.urls
    if len(set(urls)) < max(1, len(urls)):
        raise ValueError(f"data.server.url is {list(urls)}; give at least one address, and each only once")
    if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
        raise ValueError(f"data.server.url is {wrong[0]!r}; it must begin with http(s)://, as http://localhost:8000/v1")
    for name in ("max_epochs", "max_steps"):
        value = config.trainer.get(name, -1)
        if value not in (None, -1) and not _COUNT.admits(value):
            raise ValueError(f"trainer.{name} is {value}; it must be a number, {_COUNT}, or -1 for no limit")


def _leaves(value: Any, names: Sequence[str]) -> Iterator[Any]:
    """What is at a dotted name, in every section of a list and every entry of a list or dict; no null."""
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry, names)
    elif names:
        yield from _leaves(value.get(names[0]), names[1:]) if isinstance(value, Mapping) else ()
    elif isinstance(value, Mapping):
        yield from value.values()
    elif value is not None:
        yield value
