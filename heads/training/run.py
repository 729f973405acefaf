"""A training run: what is built from a config, what Lightning is told, and what stands in heads.dir.

heads.dir/run.json            resolved config, versions, command line
heads.dir/last.ckpt           every `checkpoint_every_n_steps`, after each validation, on SIGTERM and Ctrl-C
heads.dir/logs/               CSV and TensorBoard
heads.dir/val_metrics.json    everything measured, tables.md the same for reading, plots/*.png
heads.dir/exported/NAME/      heads, by `python -m heads export`
"""

import json
import logging
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from jaxtyping import Float
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import Config
from data_gen.store.json_files import read_json
from data_gen.store.shards import clean_partial
from heads.batches.module import FeatureData
from heads.batches.online import DraftFeatures, RowData
from heads.measures.plots import save_plots
from heads.measures.tables import tables, write_metrics
from heads.training.checkpoints import WholeCheckpoints, check_whole
from heads.training.sweep import Sweep
from lm import load_model, load_pair

_PAPER_EPOCHS = 3
_FREE_TO_CHANGE = {
    "heads": {"dir", "checkpoint_every_n_steps"},
    "trainer": {"logger", "callbacks", "default_root_dir", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"}
    | {"log_every_n_steps", "profiler", "barebones"},
}
"""Keys in which a resumed run may differ: they do not change its weights."""


@dataclass(frozen=True)
class RunDirectory:
    """heads.dir."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """The newest Lightning checkpoint."""
        return self.path / "last.ckpt"

    def prepare(self, config: Config, *, resume: bool) -> str | None:
        """Write run.json; the checkpoint to go on from, or None.

        Raises:
            ValueError: there is a checkpoint of another config, or one that is cut short.
        """
        described = json.loads(json.dumps(describe(config)))
        goes_on = self.checkpoint.is_file() and resume
        if goes_on:
            check_whole(self.checkpoint)
        if goes_on and (self.path / "run.json").is_file():
            _refuse_difference(
                read_json(self.path / "run.json", remedy="delete it to go on without comparing configs"), described, path=self.path
            )
        self.path.mkdir(parents=True, exist_ok=True)
        clean_partial(self.path)
        (self.path / "run.json").write_text(json.dumps(described, indent=1) + "\n")
        return str(self.checkpoint) if goes_on else None

    def trainer(self, config: Config) -> pl.Trainer:
        """The Trainer of a config.

        Raises:
            ValueError: what Lightning refuses (no such device, arguments that exclude each other), and weights in half precision.
        """
        precision = config.trainer.get("precision")
        if precision in ("bf16-true", "16-true"):
            raise ValueError(
                f"trainer.precision is {precision}: steps of {config.heads.learning_rate:g} are lost in weights of 16 bits; use "
                f"{str(precision).replace('true', 'mixed')}"
            )
        try:
            return pl.Trainer(**self.trainer_arguments(config))
        except MisconfigurationException as error:
            raise ValueError(f"trainer: {error}") from error

    def trainer_arguments(self, config: Config) -> dict[str, Any]:
        """The `trainer` section, with what it leaves open filled in: three epochs (the paper's), loggers, checkpoints."""
        arguments = {name: value for name, value in config.trainer.items() if value is not None}
        if "max_epochs" not in arguments and arguments.get("max_steps", -1) == -1:
            arguments["max_epochs"] = _PAPER_EPOCHS
        if arguments.get("logger", True) is True and not arguments.get("barebones"):
            arguments["logger"] = [
                CSVLogger(self.path / "logs", "csv"),
                TensorBoardLogger(self.path / "logs", name="tb", version=""),
            ]
        place: dict[str, Any] = {"dirpath": self.path, "filename": "last", "enable_version_counter": False}
        every = ModelCheckpoint(**place, every_n_train_steps=config.heads.checkpoint_every_n_steps, save_on_exception=True)
        has_checkpoints = arguments.get("enable_checkpointing", True) and not arguments.get("barebones")
        checkpoints = [every, ModelCheckpoint(**place, every_n_epochs=1)] if has_checkpoints else []
        arguments["callbacks"] = [*_listed(arguments.get("callbacks")), *checkpoints]
        plugins = _listed(arguments.get("plugins"))
        arguments["plugins"] = plugins if any(isinstance(plugin, CheckpointIO) for plugin in plugins) else [*plugins, WholeCheckpoints()]
        return {"num_sanity_val_steps": 0, "enable_model_summary": False, "default_root_dir": str(self.path)} | arguments


def build(config: Config) -> tuple[Sweep, FeatureData]:
    """The module and the data of a config, checked against each other.

    Raises:
        FileNotFoundError, ValueError: from the data, or a draft that is not the one that the data was made with.
    """
    data: FeatureData
    draft = embedding = None
    if config.heads.features == "online":
        data, pair = RowData(config.data, config.heads, pair=config.pair), load_pair(config.pair)
        data.draft = draft = DraftFeatures(pair.draft, vocab_size=pair.vocab_size, timings=data.timings)
    else:
        data = FeatureData(config.data, config.heads, pair=config.pair)
    facts = {"hidden_size": data.hidden_size, "scalar_stats": _scalar_stats(data), "provenance": _provenance(config, data)}
    if any(config.heads.embeddings):
        draft_model = load_model(config.pair.draft, trust_remote_code=config.pair.trust_remote_code)
        embedding = input_embedding(draft_model, data.hidden_size)
    return Sweep(asdict(config.heads), facts, draft=draft, embedding=embedding), data


def input_embedding(draft: PreTrainedModel, hidden_size: int) -> Float[Tensor, "vocab hidden"]:
    """The draft's input embedding, for heads that read it."""
    embedding = draft.get_input_embeddings().get_parameter("weight").detach().float().cpu().clone()
    if embedding.shape[1] != hidden_size:
        raise ValueError(
            f"the draft's embeddings are {embedding.shape[1]} wide and its hidden states {hidden_size}; heads.embeddings needs them equal, "
            "set it to [false]"
        )
    return embedding


def report(sweep: Sweep, directory: RunDirectory) -> dict[str, Any]:
    """Write val_metrics.json, tables.md and the plots; print the tables. Returns the results by split."""
    write_metrics(directory.path / "val_metrics.json", sweep.results, history=sweep.history)
    text = "\n".join(tables(result, sweep.specs, split=split) for split, result in sweep.results.items())
    (directory.path / "tables.md").write_text(text)
    plots = save_plots(directory.path / "plots", sweep.results["dev"], history=sweep.history, specs=sweep.specs)
    print(tables(sweep.results["dev"], sweep.specs, split="dev"))
    print("\n".join(str(path) for path in (directory.path / "val_metrics.json", directory.path / "tables.md", *plots)))
    return sweep.results


def describe(config: Config) -> dict[str, Any]:
    """run.json: what this run is."""
    packages = ("torch", "pytorch-lightning", "transformers", "safetensors", "torchmetrics")
    return {
        "config": {name: _plain(value) for name, value in asdict(config).items()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "command": sys.argv,
    }


def quiet() -> None:
    """Silence Lightning's start-up lines; warnings stay."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _refuse_difference(there: dict[str, Any], here: dict[str, Any], *, path: Path) -> None:
    for section in ("pair", "data", "heads", "trainer"):
        old, new = there["config"][section], here["config"][section]
        for key in sorted((old.keys() | new.keys()) - _FREE_TO_CHANGE.get(section, set())):
            if old.get(key) != new.get(key):
                raise ValueError(
                    f"{path} holds a run with {section}.{key} = {old.get(key)!r}, and this config says {new.get(key)!r}; choose another "
                    "heads.dir, delete that one, or pass --resume false to start over in it"
                )


def _scalar_stats(data: FeatureData) -> dict[str, list[list[float]]]:
    """Mean and deviation of each scalar that the sweep reads, over the first training shard, by timing."""
    stats: dict[str, list[list[float]]] = {}
    for timing in data.timings:
        scalars = data.first_rows(timing).columns(data.scalars).double()
        stats[timing] = [scalars.mean(0).tolist(), scalars.std(0, correction=0).clamp_min(1e-6).tolist()]
    return stats


def _provenance(config: Config, data: FeatureData) -> dict[str, Any]:
    manifest, recorded = data.manifest, data.manifest.get("recorded", {})
    trainer = {key: config.trainer[key] for key in ("max_epochs", "max_steps", "precision") if config.trainer.get(key) not in (None, -1)}
    return {
        "mixing_ratio": manifest["mixing_ratio"],
        "draft": {"path": recorded.get("draft_path"), **manifest["draft"]},
        "target": {"path": recorded.get("target_path"), **manifest["target"]},
        "sampling": manifest["sampling"],
        "training": {
            "prompts": manifest["prompts"],
            "responses": data.num_responses("train"),
            "learning_rate": config.heads.learning_rate,
            "sequences_per_batch": config.heads.batch_size,
            **({"max_epochs": _PAPER_EPOCHS} if not trainer else {}),
            **trainer,
        },
    }


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _plain(value: Any) -> Any:
    """JSON values; anything else (a callback in the trainer section) by its type."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__name__
