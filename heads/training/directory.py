"""heads.dir: the files of a training run, and whether the next run resumes.

heads.dir/run.json            name of the run, resolved config, number of processes, versions, command line
heads.dir/last.ckpt           the newest checkpoint: every few minutes, after each validation, on SIGTERM and Ctrl-C
heads.dir/logs/               CSV and TensorBoard
heads.dir/val_metrics.json    all metrics; tables.md and plots/*.png show them
heads.dir/exported/NAME/      heads, by `acceptance-heads export`; heads.json names those of the newest run

A run that starts over gets a new name, and files of the earlier run remain until they are overwritten. Checkpoint and
metrics contain the name of their run, so a run neither resumes from nor exports files of another.
"""

import json
import pickle
import platform
import sys
import uuid
import zipfile
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path

import pytorch_lightning as pl
import torch

from configs.schema import Config, HeadsConfig
from data_gen.store.manifest import digest, read_manifest
from heads.batches.module import is_first_process
from store.facts import FileFacts
from store.json_files import Json, read_json
from store.lock import only_writer
from store.shards import clean_partial, write_atomic

_FREE_TO_CHANGE = {
    *("heads.dir", "heads.checkpoint_every_n_steps", "heads.states"),
    *("trainer.logger", "trainer.callbacks", "trainer.default_root_dir", "trainer.log_every_n_steps"),
    *("trainer.enable_checkpointing", "trainer.enable_progress_bar", "trainer.enable_model_summary"),
    *("trainer.profiler", "trainer.barebones", "trainer.devices", "trainer.num_nodes"),
}
"""Settings in which a resumed run may differ: they change at most rounding. The number of processes is compared, and
the manifest of the data instead of `pair` and `data`.
"""
_START_OVER = "pass --resume false to start over"


@dataclass(frozen=True)
class RunDirectory:
    """The folder heads.dir of one run."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        return self.path / "last.ckpt"

    @property
    def metrics(self) -> Path:
        return self.path / "val_metrics.json"

    def alone(self) -> AbstractContextManager[None]:
        """The lock of heads.dir; rank 0 holds it for all processes of a run."""
        return only_writer(self.path, setting="heads.dir") if is_first_process() else nullcontext()

    def prepare(self, config: Config, *, resume: bool, processes: int = 1) -> tuple[str, str | None]:
        """The name of the run, and the checkpoint to resume from, if any; rank 0 writes run.json. ValueError for a
        checkpoint that is broken, of another config, or of an incompatible number of processes.
        """
        described = {"processes": processes, **_described(config)}
        on_disk = self.read() if resume else {}
        saved = run_of(self.checkpoint) if resume and self.checkpoint.is_file() else None
        if saved and on_disk:
            _refuse_difference(on_disk, described, path=self.path)
        run = on_disk.get("run") or saved or uuid.uuid4().hex
        if is_first_process():
            clean_partial(self.path)
            write_atomic(self.path / "run.json", (json.dumps({"run": run, **described}, indent=1) + "\n").encode())
        return run, str(self.checkpoint) if run == saved else None

    def results(self, run: str) -> Json:
        """The results of a run in val_metrics.json; empty if it has none."""
        if not self.metrics.is_file():
            return {}
        measured = read_json(self.metrics, remedy="train again, or name a head and delete it", keys=("run", "results"))
        return dict(measured["results"]) if measured["run"] == run else {}

    def read(self) -> Json:
        """run.json; empty if there is none."""
        path = self.path / "run.json"
        if not path.is_file():
            return {}
        remedy = "delete it to continue without comparing configs"
        return read_json(path, remedy=remedy, keys=("run", "data", "config", "processes"))


def run_of(path: Path) -> str:
    """The name of the run that wrote a checkpoint; ValueError if it is not of a sweep, or, in the process that compares
    its sums (rank 0), truncated or corrupted.
    """
    if is_first_process():
        known = FileFacts()
        known.fact(path, "crc", _whole_zip)
        known.save()
    try:
        facts = torch.load(path, mmap=True, weights_only=True, map_location="cpu")["hyper_parameters"]["facts"]
        run: str = facts["run"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of `acceptance-heads train` ({type(error).__name__}: {error}); name another"
        ) from error
    if "signals" not in facts:
        raise ValueError(
            f"{path} is a checkpoint of version 0.2.0 or earlier, whose heads have other standard scalars; "
            f"export its heads with that version, or {_START_OVER}"
        )
    return run


def _whole_zip(path: Path) -> str:
    """Raise ValueError unless every entry of a checkpoint has its CRC-32."""
    try:
        with zipfile.ZipFile(path) as file:
            if broken := file.testzip():
                raise zipfile.BadZipFile(f"in {broken}")
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise ValueError(
            f"checkpoint {path} is incomplete or corrupted ({error}); delete it, or pass --resume false, to start over"
        ) from error
    return "whole"


def versions() -> dict[str, str]:
    """Versions of Python, of this project where it is installed, and of the packages that training depends on."""
    known = {"python": platform.python_version()}
    for name in ("acceptance-heads", "torch", "pytorch-lightning", "transformers", "safetensors", "torchmetrics"):
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def _described(config: Config) -> Json:
    """The content of run.json beside the run's name; values that are not JSON (callbacks) become their type's name."""
    manifest = {name: value for name, value in read_manifest(config.data.dir).items() if name != "recorded"}
    described = {
        "config": asdict(replace(config, arguments=(), is_step=False)),  # `command` has them
        "data": digest(json.dumps(manifest, sort_keys=True)),
        "versions": versions(),
        "command": sys.argv,
    }
    return json.loads(json.dumps(described, default=lambda value: type(value).__name__))  # type: ignore[no-any-return]


def _refuse_difference(on_disk: Json, described: Json, *, path: Path) -> None:
    """Raise ValueError for the first setting that differs; settings that run.json lacks have their default. Another
    number of processes changes only rounding, unless there is dropout.
    """
    remedy = f"choose another heads.dir, or {_START_OVER} in this one"
    if on_disk["data"] != described["data"]:
        directory = described["config"]["data"]["dir"]
        raise ValueError(f"{path} has a run that was trained on other data than {directory} contains now; {remedy}")
    for section, defaults in _DEFAULTS.items():
        old, new = (defaults | config[section] for config in (on_disk["config"], described["config"]))
        for name in new:
            if old.get(name) != new[name] and f"{section}.{name}" not in _FREE_TO_CHANGE:
                raise ValueError(
                    f"{path} has a run with {section}.{name} = {old.get(name)!r}, but this config has "
                    f"{new[name]!r}; {remedy}"
                )
    written = on_disk["processes"]
    processes = described["processes"]
    dropout = described["config"]["heads"]["dropout"]
    if written != processes and any(dropout):
        raise ValueError(
            f"{path} has a run of {written} processes, but this one has {processes}, and heads.dropout {dropout} "
            f"depends on their number; set trainer.devices x trainer.num_nodes to {written}, or {_START_OVER}"
        )


_DEFAULTS = {
    "heads": json.loads(json.dumps(asdict(HeadsConfig()))),
    "trainer": {name: parameter.default for name, parameter in signature(pl.Trainer).parameters.items()},
}
