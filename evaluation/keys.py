"""What kept values depend on: the parts of the keys of every keyed store (`store.json_files`).

A kept value is returned only for the same models, heads, prompts, machine and code. A setting missing from a key gives
wrong numbers, so keys list what they leave out.
"""

import inspect
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from data_gen.prompts.prompt import Prompt
from data_gen.store.manifest import digest
from decode.experiment import Experiment, Level
from decode.policies.base import Policy
from heads.model.head import AcceptanceHead

_PACKAGES = ("torch", "transformers", "acceptance-heads")
_ROOMS = ("lm", "heads", "decode", "evaluation")
"""Folders whose code decides how long a generation takes."""
_ELSEWHERE = ("path", "revision", "trust_remote_code")
"""Settings of a model that say where it is; its description has the commit and the hash of its weights."""
_REMOVED = {"extra_layers": 0}  # removed settings, as earlier keys hold them: kept values are still found
_AFTERWARDS = ("recommended", "metrics")  # entries of a head's config that do not change its scores


def models_key(experiment: Experiment, *levels: Level) -> dict[str, Any]:
    """Each model's description, its weights included, and how it is loaded."""
    sources = {level: _REMOVED | asdict(getattr(experiment.models, level)) for level in levels}
    return {
        level: {name: value for name, value in source.items() if name not in _ELSEWHERE} | experiment.described(level)
        for level, source in sources.items()
    }


def machine_key(experiment: Experiment) -> dict[str, Any]:
    """The device, its threads and the versions of the packages that run on it."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    threads = experiment.models.num_threads or torch.get_num_threads()
    return {"device": name, "threads": threads, "versions": {package: _version(package) for package in _PACKAGES}}


def prompts_key(experiment: Experiment, prompts: Iterable[Prompt]) -> str:
    """A digest of prompts and of what turns them into token ids; no tokenizer is loaded."""
    texts = [(prompt.id, prompt.content) for prompt in prompts]
    return digest(json.dumps([texts, experiment.template, experiment.data.max_prompt_tokens]))


def head_key(head: AcceptanceHead) -> str:
    """A digest of a head's weights and of its config, calibration included."""
    config = {name: value for name, value in head.config.items() if name not in _AFTERWARDS}
    return digest(json.dumps([head.fingerprint(), config], sort_keys=True, default=str))


def policy_key(policy: Policy) -> dict[str, Any]:
    """A policy's class, its code if the class is custom, and its parameters."""
    kind = type(policy)
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}  # type: ignore[arg-type]
    return {"policy": f"{kind.__module__}:{kind.__qualname__}", "code": class_key(kind)} | {
        name: head_key(value) if isinstance(value, AcceptanceHead) else repr(value) for name, value in values.items()
    }


def class_key(kind: type) -> str | None:
    """A digest of the file of a custom class; None for a class of this project, whose code `code_key` covers."""
    if kind.__module__.partition(".")[0] in _ROOMS:
        return None
    return digest(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))


@cache
def code_key() -> str:
    """A digest of the code that generations are timed with."""
    root = Path(__file__).parents[1]
    paths = sorted(path for room in _ROOMS for path in (root / room).rglob("*.py"))
    return digest("".join(f"{path.relative_to(root)}\n{path.read_text(encoding='utf-8')}" for path in paths))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
