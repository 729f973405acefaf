"""What kept values depend on: the parts of the keys of every keyed store (`store.json_files`).

A kept value is returned only for the same models, heads, prompts, machine and code. A setting missing from a key gives
wrong numbers, so keys list what they leave out. The code of a key is what a timed generation runs and what times it
(`_TIMED`). Code that only chooses settings or prints results is no part of it: it changes no time.
"""

import ast
import inspect
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from data_gen.prompts.prompt import Prompt
from data_gen.store.manifest import digest, git_commit
from decode.experiment import Experiment, Level
from decode.policies.base import Policy
from heads.model.head import AcceptanceHead

_PACKAGES = ("torch", "transformers", "acceptance-heads")
_PROJECT = ("lm", "heads", "decode", "evaluation")
"""Packages whose policies are no custom classes."""
_TIMED = (
    "lm",
    "heads/model",
    "decode",
    "evaluation/turns.py",
    "evaluation/sources",
    "evaluation/costs/measure.py",
    "evaluation/costs/stops.py",
    "evaluation/bench/arms.py",
    "evaluation/bench/batch_sizes.py",
)
"""Folders and files whose code decides how long a generation takes, and how that is measured."""
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_NAMES = ("model name", "cpu model", "Hardware", "CPU part")
"""Lines of /proc/cpuinfo that name the processor, the best name first; ARM has only the last one."""
_ELSEWHERE = ("path", "revision", "trust_remote_code")
"""Settings of a model that say where it is; its description has the commit and the hash of its weights."""
_AFTERWARDS = ("recommended", "metrics")  # entries of a head's config that do not change its scores


def models_key(experiment: Experiment, *levels: Level) -> dict[str, object]:
    """Each model's description, its weights included, and how it is loaded."""
    sources = {level: asdict(getattr(experiment.models, level)) for level in levels}
    return {
        level: {name: value for name, value in source.items() if name not in _ELSEWHERE and value is not False}
        | experiment.described(level)  # `packed: false` is omitted, as in keys written before the setting existed
        for level, source in sources.items()
    }


def machine_key(experiment: Experiment) -> dict[str, object]:
    """The processor's model, the GPU, the threads, and the versions of the packages and of the code that run there."""
    return {**_machine(experiment), "code": code_key()}


def _machine(experiment: Experiment) -> dict[str, Any]:
    """`machine_key` without the code, whose digest takes long."""
    return {
        "processor": processor_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": experiment.models.num_threads or torch.get_num_threads(),
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def made(experiment: Experiment) -> dict[str, str]:
    """When, with which versions, where and by which command something is made now, for the reader of a page."""
    key = _machine(experiment)
    versions = ", ".join(f"{package} {version}" for package, version in key["versions"].items() if version)
    command = shlex.join(["acceptance-heads", *sys.argv[1:]]) if experiment.arguments else "called from Python"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"Python {platform.python_version()}, {versions}",
        "commit": git_commit() or "unknown",
        "host": f"{platform.node()}: {key['gpu'] or key['processor']}, {key['threads']} threads",
        "command": command,
    }


def processor_name() -> str:
    """The processor's model name, such as "AMD EPYC 9R14"; the architecture where the system does not give a name."""
    if _CPU_INFO.is_file():
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        named = next((values[name] for name in _CPU_NAMES if values.get(name)), "")
    elif sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        named = subprocess.run(command, capture_output=True, encoding="utf-8", check=False).stdout.strip()
    else:
        named = platform.processor()
    return " ".join(filter(None, (named, platform.machine())))


def prompts_key(experiment: Experiment, prompts: Iterable[Prompt]) -> str:
    """A digest of prompts and of what turns them into token ids; no tokenizer is loaded."""
    texts = [(prompt.id, prompt.content) for prompt in prompts]
    return digest(json.dumps([texts, experiment.template, experiment.data.max_prompt_tokens]))


def head_key(head: AcceptanceHead) -> str:
    """A digest of a head's weights and of its config, calibration included."""
    config = {name: value for name, value in head.config.items() if name not in _AFTERWARDS}
    return digest(json.dumps([head.fingerprint(), config], sort_keys=True, default=str))


def policy_key(policy: Policy) -> dict[str, str | None]:
    """A policy's class, its code if the class is custom, and its parameters."""
    kind = type(policy)
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}  # type: ignore[arg-type]
    return {"policy": f"{kind.__module__}:{kind.__qualname__}", "code": class_key(kind)} | {
        name: head_key(value) if isinstance(value, AcceptanceHead) else repr(value) for name, value in values.items()
    }


def class_key(kind: type) -> str | None:
    """A digest of the file of a custom class; None for a class of this project, whose code `code_key` covers."""
    if kind.__module__.partition(".")[0] in _PROJECT:
        return None
    return digest(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))


@cache
def code_key() -> str:
    """A digest of the code that generations are timed with, without comments and docstrings."""
    root = Path(__file__).parents[1]
    paths: list[Path] = []
    for name in _TIMED:
        part = root / name
        paths += sorted(part.rglob("*.py")) if part.is_dir() else [part]
    return digest("".join(f"{path.relative_to(root)}\n{code_of(path.read_text(encoding='utf-8'))}" for path in paths))


def code_of(source: str) -> str:
    """Python source without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
