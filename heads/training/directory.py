"""heads.dir: the files of a training run, and whether the next run resumes.

heads.dir/run.json            name of the run, resolved config, number of processes, versions, command line
heads.dir/last.ckpt           the newest checkpoint: every few minutes, after each validation, on SIGTERM and Ctrl-C
heads.dir/logs/               CSV and TensorBoard
heads.dir/val_metrics.json    all metrics; tables.md and plots/*.png show them
heads.dir/exported/NAME/      heads, by `acceptance-heads export`

A run that starts over gets a new name, and files of the earlier run remain until they are overwritten. Checkpoint and
metrics contain the name of their run, so a run neither resumes from nor exports files of another.
"""

import json
import platform
import sys
import uuid
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from configs.schema import Config, ModelSource, PairConfig
from data_gen.store.manifest import digest, read_manifest
from heads.batches.module import is_first_process
from heads.training.checkpoints import check_whole, run_of
from store.json_files import read_json
from store.lock import only_writer
from store.shards import clean_partial, write_atomic

_FREE_TO_CHANGE = {
    "pair": {"gpus", "num_threads", "trust_remote_code"},  # trust_remote_code: of older versions
    "data": {"dir", "batch_size", "chunk_mb", "engine", "ray"},  # the manifest is compared instead
    "heads": {"dir", "checkpoint_every_n_steps"},
    "trainer": {
        "logger",
        "callbacks",
        "default_root_dir",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "log_every_n_steps",
        "profiler",
        "barebones",
        "devices",
        "num_nodes",
    },
}
"""Keys in which a resumed run may differ, because they change at most rounding. The number of processes is compared."""


@dataclass(frozen=True)
class RunDirectory:
    """The folder heads.dir of one run."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """The newest Lightning checkpoint."""
        return self.path / "last.ckpt"

    @property
    def metrics(self) -> Path:
        """Path of the metrics that the run writes at its end."""
        return self.path / "val_metrics.json"

    def alone(self) -> AbstractContextManager[None]:
        """The lock of heads.dir; rank 0 holds it for all processes of a run."""
        return only_writer(self.path, setting="heads.dir") if is_first_process() else nullcontext()

    def prepare(self, config: Config, *, resume: bool, processes: int = 1) -> tuple[str, str | None]:
        """Decide whether to resume, and write run.json (rank 0 only; other ranks reach the same decision).

        Args:
            config: the experiment.
            resume: whether to resume from an existing checkpoint.
            processes: number of processes of this run.

        Returns:
            The name of the run, and the checkpoint to resume from.

        Raises:
            ValueError: a broken checkpoint, or one of another config or an incompatible number of processes.
        """
        if requeued := next(self.path.glob("hpc_ckpt_*.ckpt"), None):
            raise ValueError(
                f"{requeued} was written by SLURM's requeueing; delete it, or Lightning would load it instead of "
                f"{self.checkpoint}"
            )
        described = _described(config)
        on_disk = self.read() if resume else {}
        has_checkpoint, saved = resume and self.checkpoint.is_file(), ""
        if has_checkpoint:
            check_whole(self.checkpoint)
            saved = run_of(self.checkpoint)
            if on_disk:
                _refuse_difference(on_disk, described, path=self.path)
                _refuse_processes(on_disk.get("processes"), processes, dropout=config.heads.dropout, path=self.path)
        is_resumed = has_checkpoint and (not on_disk or on_disk["run"] == saved)
        run = saved if is_resumed else on_disk["run"] if on_disk else uuid.uuid4().hex
        if is_first_process():
            self.path.mkdir(parents=True, exist_ok=True)
            clean_partial(self.path)
            text = json.dumps({"run": run, "processes": processes, **described}, indent=1) + "\n"
            write_atomic(self.path / "run.json", text.encode())
        return run, str(self.checkpoint) if is_resumed else None

    def read(self) -> dict[str, Any]:
        """run.json; empty if there is none."""
        path = self.path / "run.json"
        if not path.is_file():
            return {}
        remedy = "delete it to continue without comparing configs"
        on_disk = read_json(path, remedy=remedy, keys=("run", "config"))
        if not isinstance(on_disk["config"], dict):
            raise ValueError(f"{path}: config is {on_disk['config']!r}, expected an object; {remedy}")
        return on_disk


def _described(config: Config) -> dict[str, Any]:
    """The content of run.json beside the run's name; values that are not JSON (callbacks) become their type's name."""
    packages = ("torch", "pytorch-lightning", "transformers", "safetensors", "torchmetrics")
    described = {
        "config": asdict(config),
        "data": _digest_of_data(config.data.dir),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "command": sys.argv,
    }
    return json.loads(json.dumps(described, default=lambda value: type(value).__name__))  # type: ignore[no-any-return]


def _digest_of_data(directory: str) -> str | None:
    """A digest of the manifest without paths; None if there is no manifest."""
    if not (Path(directory) / "manifest.json").is_file():
        return None
    manifest = {name: value for name, value in read_manifest(directory).items() if name not in ("recorded", "split")}
    return digest(json.dumps(manifest, sort_keys=True))


def _refuse_difference(on_disk: dict[str, Any], described: dict[str, Any], *, path: Path) -> None:
    """Raise ValueError for the first setting that differs; settings that run.json lacks have their default."""
    remedy = "choose another heads.dir, or pass --resume false to start over in this one"
    written, data = _over(_DEFAULTS, on_disk["config"]), described["config"]["data"]["dir"]
    if None not in (on_disk.get("data"), described["data"]) and on_disk["data"] != described["data"]:
        raise ValueError(f"{path} has a run that was trained on other data than {data} contains now; {remedy}")
    for section in ("pair", "data", "heads", "trainer"):
        old, new = written[section] or {}, described["config"][section]
        for key in sorted((old.keys() | new.keys()) - _FREE_TO_CHANGE[section]):
            if old.get(key) != new.get(key):
                name, before, now = _innermost(f"{section}.{key}", old.get(key), new.get(key))
                raise ValueError(f"{path} has a run with {name} = {before!r}, but this config has {now!r}; {remedy}")


def _innermost(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The first nested setting that differs, such as pair.draft.path within pair.draft, with both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return name, old, new
    key = min(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return _innermost(f"{name}.{key}", old.get(key), new.get(key))


def _refuse_processes(written: int | None, processes: int, *, dropout: float, path: Path) -> None:
    """Raise ValueError if resuming a run of `written` processes on `processes` would change more than rounding."""
    remedy = "pass --resume false to start over"
    if written is None:
        raise ValueError(
            f"{path} has a run of an older version, whose heads.batch_size was per process; {remedy}, or add "
            '"processes": 1 to its run.json if it ran in one process'
        )
    if written != processes and dropout:
        raise ValueError(
            f"{path} has a run of {written} processes, but this one has {processes}, and heads.dropout {dropout:g} "
            f"depends on their number; set trainer.devices x trainer.num_nodes to {written}, or {remedy}"
        )


_REMOVED = {"extra_layers"}  # settings of older runs that changed no weight
_MODEL = ModelSource(path="")
_DEFAULTS = json.loads(json.dumps(asdict(Config(pair=PairConfig(target=_MODEL, draft=_MODEL)))))


def _over(defaults: Any, values: Any) -> Any:
    """`values` without removed settings, and with the keys that it lacks from `defaults`."""
    if not isinstance(values, dict):
        return values
    defaults = defaults if isinstance(defaults, dict) else {}
    return defaults | {key: _over(defaults.get(key), value) for key, value in values.items() if key not in _REMOVED}
