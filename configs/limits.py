"""Limits of every number of an experiment's YAML, checked before a command starts.

What depends on more than the setting itself (available prompts, positions that a model reads) is checked by the package
that knows it.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

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
_COUNT, _COUNT_OR_NONE = Limit(1, _MOST), Limit(0, _MOST)
_POSITIVE, _AT_LEAST_ZERO, _SHARE = Limit(0, is_open=True), Limit(0), Limit(0, 1)
_LIMITS = (
    ("pair.sampling", _AT_LEAST_ZERO, "temperature"),
    ("pair.sampling", _COUNT, "top_k"),
    ("pair.sampling", Limit(0, 1, is_open=True), "top_p"),
    ("pair", Limit(1, 1024), "num_threads"),
    ("data", _COUNT_OR_NONE, "num_train num_dev num_test"),
    ("data", _COUNT, "max_prompt_tokens max_new_tokens mixes rows_per_shard batch_size chunk_mb"),
    ("data", Limit(1, 1000), "draft_length draft_every"),
    ("data.prompts", _POSITIVE, "weight"),
    ("data", _AT_LEAST_ZERO, "split_weights"),
    ("data", _SHARE, "mixing_ratio max_error_share"),
    ("data.server", Limit(1, 4096), "concurrency"),
    ("data.server", _COUNT_OR_NONE, "max_retries"),
    ("data.server", _POSITIVE, "timeout_s"),
    ("data.server", Limit(1, 10**4), "num_logprobs"),
    ("data.ray", _COUNT, "num_workers"),
    ("data.ray", _AT_LEAST_ZERO, "num_cpus num_gpus resources"),
    ("heads", Limit(0, 1000), "depths"),
    ("heads", Limit(0, 0.9), "dropout"),
    ("heads", _POSITIVE, "reject_weights accept_weight"),
    ("heads", _COUNT, "num_train batch_size checkpoint_every_n_steps"),
    ("heads", Limit(0, 10, is_open=True), "learning_rate"),
    ("heads", _SHARE, "warmup_ratio"),
    ("trainer", _COUNT, "accumulate_grad_batches check_val_every_n_epoch num_nodes"),
    ("trainer", _POSITIVE, "limit_train_batches limit_val_batches limit_test_batches val_check_interval"),
    ("trainer", _AT_LEAST_ZERO, "gradient_clip_val"),
    ("trainer", _COUNT_OR_NONE, "log_every_n_steps"),
    ("trainer", Limit(-1), "num_sanity_val_steps"),
    ("decode", Limit(0, 1000), "max_draft_length"),
    ("decode", _COUNT_OR_NONE, "num_dev num_test"),
    ("decode", _COUNT, "max_new_tokens prompts_per_shard draws_per_prompt"),
    ("decode", _POSITIVE, "t_draft_s t_target_s ratios transfer_weights"),
    ("decode", _AT_LEAST_ZERO, "verify_shares stop_share"),
    *((section, Limit(0, 2**32 - 1), "seed") for section in ("data", "heads", "decode")),
)
LIMITS = {f"{section}.{name}": limit for section, limit, names in _LIMITS for name in names.split()}
"""Dotted name -> the limit of its number, or of each number of its list. null passes where the schema allows it."""
_PROCESSES_PER_CORE = 4


def refuse_null(schema: Any, section: Any, name: str) -> None:
    """Raise ValueError for a section without settings, and for a null that its dataclass (None: any) does not take."""
    if not isinstance(section, Mapping) and not hasattr(section, "__dict__"):
        raise ValueError(f"{name} is {'null' if section is None else section}; give it settings, or remove it")
    for key, kind in get_type_hints(schema).items() if schema else ():
        value, kinds = getattr(section, key), get_args(kind) or (kind,)
        if value is None and NoneType not in kinds:
            raise ValueError(f"{name}.{key} is null; give it a value, or remove it")
        if kinds == (kind,) and is_dataclass(kind):
            refuse_null(kind, value, f"{name}.{key}")


def check_limits(config: Config) -> None:
    """Raise ValueError for the first setting that is outside its limit."""
    values = asdict(config)
    for name, section in get_type_hints(Config).items():
        refuse_null(section if is_dataclass(section) else None, getattr(config, name), name)
    for name, limit in LIMITS.items():
        for number in _numbers(values, name.split(".")):
            if not limit.admits(number):
                raise ValueError(f"{name} is {number}; it must be a number, {limit}")
    for section in ("data", "heads", "decode"):
        _check_folder(f"{section}.dir", values[section]["dir"])
    for model in ("target", "draft", "micro"):
        if (source := getattr(config.pair, model)) is not None and source.path == "":
            raise ValueError(f"pair.{model}.path is empty; name a local directory or a hub id")
    urls = config.data.server.urls
    if len(set(urls)) < max(1, len(urls)):
        raise ValueError(f"data.server.url is {list(urls)}; give at least one address, and each only once")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"data.server.url is {url!r}; it must begin with http:// or https://, such as http://localhost:8000/v1"
            )
    _check_trainer(config.trainer)


def _numbers(value: Any, names: Sequence[str]) -> Iterator[Any]:
    """What is at a dotted name, in every section of a list and every entry of a list or dict; no text and no null."""
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _numbers(entry, names)
    elif names:
        yield from _numbers(value.get(names[0]), names[1:]) if isinstance(value, Mapping) else ()
    elif isinstance(value, Mapping):
        yield from value.values()
    elif value is not None and not isinstance(value, str):
        yield value


def _check_folder(name: str, folder: str) -> None:
    """Raise ValueError unless this path is a folder or can become one."""
    if not folder.strip() or "\0" in folder:
        raise ValueError(f"{name} is {folder!r}; name a directory")
    path = Path(folder)
    try:
        nearest = next((parent for parent in (path, *path.parents) if parent.exists()), Path())
    except OSError as error:  # a name too long, a loop of links
        raise ValueError(f"{name} is {folder[:80]!r}: {error.strerror}; name another directory") from error
    if not nearest.is_dir():
        raise ValueError(f"{name} is {folder!r} and {nearest} is a file; name another directory, or move that file")


def _check_trainer(trainer: Mapping[str, Any]) -> None:
    """Raise ValueError for a run that would never end, train nothing, or start too many processes."""
    for name in ("max_epochs", "max_steps"):
        value = trainer.get(name, -1)
        if value not in (None, -1) and not _COUNT.admits(value):
            raise ValueError(f"trainer.{name} is {value}; it must be a number, {_COUNT}, or -1 for no limit")
    devices, cores = trainer.get("devices"), os.cpu_count() or 1
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if not isinstance(devices, int):
        return
    if devices == 0 or devices < -1:
        raise ValueError(f"trainer.devices is {devices}; it must be at least 1, -1 for all, auto, or a list of devices")
    is_on_cpu = trainer.get("accelerator") in (None, "auto", "cpu")
    if devices > _PROCESSES_PER_CORE * cores and is_on_cpu and not _has_gpu():
        raise ValueError(
            f"trainer.devices is {devices} and this machine has {cores} cores; each device is one process on a CPU, "
            f"so set it to at most {_PROCESSES_PER_CORE * cores}"
        )


def _has_gpu() -> bool:
    import torch  # takes seconds, which most checks do not need

    return torch.cuda.is_available()
