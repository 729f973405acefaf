"""heads.dir: which run stands there, and how the next one begins.

heads.dir/run.json            name of the run, resolved config, number of processes, versions, command line
heads.dir/last.ckpt           the newest checkpoint, with the name of its run; also after each validation, on SIGTERM
                              and Ctrl-C
heads.dir/logs/               CSV and TensorBoard
heads.dir/val_metrics.json    everything measured, with the name of its run, tables.md the same for reading, plots/*.png
heads.dir/exported/NAME/      heads, by `python -m heads export`

A run that starts over takes a new name, and what an earlier one left stays until it is written over. Names tell the two
apart at any moment: a checkpoint is gone on from, and metrics go into an export, only under the name of their own run.
"""

import json
import platform
import sys
import uuid
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_lightning.utilities.rank_zero import rank_zero_only

from configs.schema import Config, ModelSource, PairConfig
from heads.training.checkpoints import check_whole, run_of
from heads.training.cluster import report_requeue_checkpoints
from store.json_files import read_json
from store.lock import only_writer
from store.shards import clean_partial, write_atomic

_FREE_TO_CHANGE = {
    "pair": {"gpus", "num_threads"},
    "data": {"batch_size", "chunk_mb", "engine", "ray"},
    "heads": {"dir", "checkpoint_every_n_steps"},
    "trainer": {
        "logger",
        "callbacks",
        "default_root_dir",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    }
    | {"log_every_n_steps", "profiler", "barebones", "devices", "num_nodes"},
}
"""Keys in which a resumed run may differ: they change its weights in the rounding at most. Processes are compared by
their number.
"""


class Start(NamedTuple):
    """Name and checkpoint that a run begins with."""

    run: str
    """Its name."""
    checkpoint: str | None
    """Checkpoint that it goes on from."""


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
        """Metrics that the run measured at its end."""
        return self.path / "val_metrics.json"

    def alone(self) -> AbstractContextManager[None]:
        """The lock of heads.dir; of several processes of one run the first holds it for all."""
        return only_writer(self.path, setting="heads.dir") if _is_first() else nullcontext()

    def prepare(self, config: Config, *, resume: bool, processes: int = 1) -> Start:
        """Settle whether there is a checkpoint to go on from, and write run.json.

        Of several processes of one run the first writes; the others come to the same decision from what they read.

        Args:
            config: the experiment.
            resume: go on from a checkpoint that is there.
            processes: how many there are of this run.

        Raises:
            ValueError: there is a checkpoint of another config, a broken one, or one of another number of processes
                that this number would not go on from alike.
        """
        described = json.loads(json.dumps(describe(config)))
        on_disk = self.read() if resume else {}
        saved = self._saved() if resume else None
        if on_disk and saved is not None:
            _refuse_difference(on_disk, described, path=self.path)
            _refuse_processes(on_disk.get("processes"), processes, dropout=config.heads.dropout, path=self.path)
        goes_on = saved is not None and (not on_disk or on_disk["run"] == saved.run)
        run = saved.run if saved is not None and goes_on else on_disk["run"] if on_disk else uuid.uuid4().hex
        if _is_first():
            self.path.mkdir(parents=True, exist_ok=True)
            clean_partial(self.path)
            write_atomic(
                self.path / "run.json",
                (json.dumps({"run": run, "processes": processes, **described}, indent=1) + "\n").encode(),
            )
            report_requeue_checkpoints(self.path)
        return Start(run, str(self.checkpoint) if goes_on else None)

    def read(self) -> dict[str, Any]:
        """run.json; empty if there is none."""
        path = self.path / "run.json"
        if not path.is_file():
            return {}
        remedy = "delete it to go on without comparing configs"
        on_disk = read_json(path, remedy=remedy, keys=("run", "config"))
        if not isinstance(on_disk["config"], dict):
            raise ValueError(f"{path}: config is {on_disk['config']!r}, where an object belongs; {remedy}")
        return on_disk

    def _saved(self) -> Start | None:
        """The checkpoint that is there, under the name of its own run."""
        if not self.checkpoint.is_file():
            return None
        check_whole(self.checkpoint)
        return Start(run_of(self.checkpoint), str(self.checkpoint))


def _is_first() -> bool:
    """Is this the first of the run's processes?"""
    return getattr(rank_zero_only, "rank", 0) == 0


def describe(config: Config) -> dict[str, Any]:
    """The run's settings, as run.json states them beside the name."""
    packages = ("torch", "pytorch-lightning", "transformers", "safetensors", "torchmetrics")
    return {
        "config": {name: _plain(value) for name, value in asdict(config).items()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "command": sys.argv,
    }


def _refuse_difference(there: dict[str, Any], here: dict[str, Any], *, path: Path) -> None:
    """Raise ValueError for the first key in which two configs differ; what run.json was written without has its
    default.
    """
    written = _over(_DEFAULTS, there["config"])
    for section in ("pair", "data", "heads", "trainer"):
        old, new = written[section] or {}, here["config"][section]
        for key in sorted((old.keys() | new.keys()) - _FREE_TO_CHANGE[section]):
            if old.get(key) != new.get(key):
                raise ValueError(
                    f"{path} holds a run with {section}.{key} = {old.get(key)!r}, and this config says "
                    f"{new.get(key)!r}; choose another "
                    "heads.dir, delete that one, or pass --resume false to start over in it"
                )


def _refuse_processes(there: int | None, here: int, *, dropout: float, path: Path) -> None:
    """Raise ValueError unless a run of `there` processes ends, on `here`, in the same steps and up to rounding
    weights.
    """
    remedy = "pass --resume false to start over in it"
    if there is None:
        raise ValueError(
            f"{path} holds a run from before heads.batch_size was that of all processes together; {remedy} or, if it "
            "ran in "
            'one process, add "processes": 1 to its run.json'
        )
    if there != here and dropout:
        raise ValueError(
            f"{path} holds a run of {there} processes, this one has {here}, and with heads.dropout {dropout:g} what a "
            "step "
            f"drops depends on their number; set trainer.devices and trainer.num_nodes to {there} in all, or {remedy}"
        )


_MODEL = ModelSource(path="")
_DEFAULTS = json.loads(json.dumps(asdict(Config(pair=PairConfig(target=_MODEL, draft=_MODEL)))))


def _over(defaults: Any, values: Any) -> Any:
    """`values`, with the keys that it lacks from `defaults`."""
    if not isinstance(values, dict) or not isinstance(defaults, dict):
        return values
    return defaults | {key: _over(defaults.get(key), value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    """JSON values; anything else (a callback in the trainer section) by its type."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__name__
