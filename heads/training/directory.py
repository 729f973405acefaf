"""heads.dir: which run stands there, and how the next one begins.

heads.dir/run.json            name of the run, resolved config, number of processes, versions, command line
heads.dir/last.ckpt           the newest checkpoint, with the name of its run; also after each validation, on SIGTERM
                              and Ctrl-C
heads.dir/logs/               CSV and TensorBoard
heads.dir/val_metrics.json    everything measured, with the name of its run, tables.md the same for reading, plots/*.png
heads.dir/exported/NAME/      heads, by `acceptance-heads export`

A run that starts over takes a new name; files of an earlier run stay until they are overwritten. A checkpoint is only
resumed, and metrics are only exported, under the name of their own run.
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
    "pair": {"gpus", "num_threads", "trust_remote_code"},  # the last one is of older runs
    "data": {"dir", "batch_size", "chunk_mb", "engine", "ray"},  # its manifest is compared
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
"""Keys in which a resumed run may differ: they change its weights in the rounding at most. Processes are compared by
their number.
"""


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
        return only_writer(self.path, setting="heads.dir") if is_first_process() else nullcontext()

    def prepare(self, config: Config, *, resume: bool, processes: int = 1) -> tuple[str, str | None]:
        """Settle whether there is a checkpoint to go on from, and write run.json.

        Of several processes of one run the first writes; the others come to the same decision from what they read.

        Args:
            config: the experiment.
            resume: whether to go on from a checkpoint that is there.
            processes: the number of processes of this run.

        Returns:
            The name of the run, and the checkpoint that it goes on from.

        Raises:
            ValueError: there is a checkpoint of another config, a broken one, or one of another number of processes
                that this number would not go on from alike.
        """
        if requeued := next(self.path.glob("hpc_ckpt_*.ckpt"), None):
            raise ValueError(
                f"Lightning would load {requeued}, left by SLURM's requeueing, instead of its run; delete it"
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
        goes_on = has_checkpoint and (not on_disk or on_disk["run"] == saved)
        run = saved if goes_on else on_disk["run"] if on_disk else uuid.uuid4().hex
        if is_first_process():
            self.path.mkdir(parents=True, exist_ok=True)
            clean_partial(self.path)
            text = json.dumps({"run": run, "processes": processes, **described}, indent=1) + "\n"
            write_atomic(self.path / "run.json", text.encode())
        return run, str(self.checkpoint) if goes_on else None

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


def _described(config: Config) -> dict[str, Any]:
    """The settings in run.json, as JSON values; an object, such as a callback of the trainer, by its type's name."""
    packages = ("torch", "pytorch-lightning", "transformers", "safetensors", "torchmetrics")
    described = {
        "config": asdict(config),
        "data": _digest_of_data(config.data.dir),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "command": sys.argv,
    }
    return json.loads(json.dumps(described, default=lambda value: type(value).__name__))  # type: ignore[no-any-return]


def _digest_of_data(directory: str) -> str | None:
    """A digest of everything that the data was made with, wherever it is now; None where there is no manifest."""
    if not (Path(directory) / "manifest.json").is_file():
        return None
    made = {name: value for name, value in read_manifest(directory).items() if name not in ("recorded", "split")}
    return digest(json.dumps(made, sort_keys=True))


def _refuse_difference(on_disk: dict[str, Any], described: dict[str, Any], *, path: Path) -> None:
    """Raise ValueError for the first key in which two configs differ; a key missing in run.json has its default."""
    written, data = _over(_DEFAULTS, on_disk["config"]), described["config"]["data"]["dir"]
    if None not in (on_disk.get("data"), described["data"]) and on_disk["data"] != described["data"]:
        raise ValueError(
            f"{path} holds a run on other data than {data} has now; choose another heads.dir, delete that one, or pass "
            "--resume false to start over in it"
        )
    for section in ("pair", "data", "heads", "trainer"):
        old, new = written[section] or {}, described["config"][section]
        for key in sorted((old.keys() | new.keys()) - _FREE_TO_CHANGE[section]):
            if old.get(key) != new.get(key):
                name, there, here = _innermost(f"{section}.{key}", old.get(key), new.get(key))
                raise ValueError(
                    f"{path} holds a run with {name} = {there!r}, and this config says {here!r}; choose another "
                    "heads.dir, delete that one, or pass --resume false to start over in it"
                )


def _innermost(name: str, there: Any, here: Any) -> tuple[str, Any, Any]:
    """The first setting within two differing ones, such as pair.draft.path within pair.draft, and both its values."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return name, there, here
    key = min(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
    return _innermost(f"{name}.{key}", there.get(key), here.get(key))


def _refuse_processes(written: int | None, processes: int, *, dropout: float, path: Path) -> None:
    """Raise ValueError unless a run of `written` processes ends, on `processes`, in the same steps and up to rounding
    weights.
    """
    remedy = "pass --resume false to start over in it"
    if written is None:
        raise ValueError(
            f"{path} holds a run from before heads.batch_size was that of all processes together; {remedy} or, if it "
            'ran in one process, add "processes": 1 to its run.json'
        )
    if written != processes and dropout:
        raise ValueError(
            f"{path} holds a run of {written} processes, this one has {processes}, and with heads.dropout {dropout:g} "
            "what a step drops depends on their number; set trainer.devices and trainer.num_nodes to "
            f"{written} in all, or {remedy}"
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
