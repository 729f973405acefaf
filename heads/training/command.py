"""The command `train`: every head of the grid in one run, which resumes from its last checkpoint.

Where the config sets no learning rate and no number of epochs, they follow from the data. SpecDec++ trains for three
epochs at 5e-5, on millions of tokens at width 4096. For a few hundred responses of a small draft that is far too little
(AUROC 0.5). Adam changes each weight by about the learning rate per step and a head of width d sums d of them, so the
rate is proportional to 1 / d. Small data sets are read for more epochs.
"""

import math
import signal
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor

from configs.hints import say_next
from configs.load import load_config
from configs.schema import Config, PairConfig
from data_gen.store.manifest import read_manifest, refuse_older
from heads.batches.module import FeatureData, is_first_process
from heads.grid import grid
from heads.measures.plots import save_plots
from heads.measures.report import by_set, tables, verdict, write_metrics
from heads.model.published import license_of
from heads.training.directory import RunDirectory, versions
from heads.training.start import fit_own_signals
from heads.training.sweep import Sweep
from heads.training.trainer import make_trainer, quiet, stopped_by_sigusr1
from lm import FeatureDraft, load_model, load_pair
from lm.features.released import released_layout_of
from store.json_files import Json
from store.shards import list_shards, read_sidecar, write_atomic

_RATE_TIMES_WIDTH = 1.5
_HIGHEST_RATE = 1e-2
_STEPS = 400
"""Optimiser steps that suffice at that rate."""
_EPOCHS = (3, 30)
"""Minimum, the paper's, and maximum."""
_CPU = torch.device("cpu")
_NO_CHECKPOINT = (
    "no checkpoint was written (trainer.fast_dev_run, barebones, or enable_checkpointing: false), so there is "
    "nothing to export; remove that setting to train"
)


def train(config: Config | str | PurePath, *, resume: bool = True) -> Json:
    """Run `acceptance-heads train`; `configs.making` documents its flags."""
    quiet()
    config = settled_training(load_config(config, trainer=pl.Trainer))
    directory = RunDirectory(Path(config.heads.dir))
    with directory.alone(), stopped_by_sigusr1():
        trainer = make_trainer(config)
        name, checkpoint = directory.prepare(config, resume=resume, processes=trainer.world_size)
        pl.seed_everything(config.heads.seed, verbose=False)
        sweep, data = build(config, run=name)
        try:
            trainer.fit(sweep, datamodule=data, ckpt_path=checkpoint, weights_only=True)
            trainer.test(sweep, datamodule=data, verbose=False)
        except MisconfigurationException as error:
            raise ValueError(f"trainer: {error}") from error
        except SIGTERMException as error:  # Lightning's own exit code is 0, as if the run were done
            print("stopped by a signal; run the same command again to continue from its checkpoint", file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM) from error  # the convention of shells
        except SystemExit:
            if trainer.interrupted:  # Lightning turns Ctrl-C into a silent exit
                raise KeyboardInterrupt from None
            raise
        if trainer.is_global_zero:
            report(sweep, directory)
            if directory.checkpoint.is_file():
                say_next(config, "export")
            else:
                print(_NO_CHECKPOINT)
        return sweep.results


def settled_training(config: Config) -> Config:
    """The experiment with defaults filled in for learning rate, epochs and data sizes; prints the chosen values."""
    grid(config.heads)  # report invalid settings before any data is read
    manifest = read_manifest(config.data.dir, keys=("draft",))
    refuse_older(manifest, config.data.dir)
    heads = config.heads
    trainer = dict(config.trainer)
    choices = []
    if heads.learning_rate is None:
        width = manifest["draft"]["hidden_size"]
        heads = replace(heads, learning_rate=min(_HIGHEST_RATE, float(f"{_RATE_TIMES_WIDTH / width:.2g}")))
        choices.append(f"heads.learning_rate {heads.learning_rate:g} for a draft of width {width:,}")
    if trainer.get("max_epochs") is None and trainer.get("max_steps", -1) in (None, -1):
        sidecars = [read_sidecar(path, keys=("rows",)) for path in list_shards(config.data.dir, "train", "labels")]
        num = max(1, min(sum(sidecar["rows"] for sidecar in sidecars), heads.num_train or sys.maxsize))
        trainer["max_epochs"] = epochs_of(num, heads.batch_size)
        choices.append(f"trainer.max_epochs {trainer['max_epochs']} for {num:,} responses")
    if choices and is_first_process():
        print(f"chosen automatically: {', '.join(choices)}")
    return replace(config, heads=heads, trainer=trainer)


def epochs_of(num_responses: int, batch_size: int) -> int:
    """Epochs that give about `_STEPS` optimiser steps."""
    return min(max(math.ceil(_STEPS * batch_size / max(1, num_responses)), _EPOCHS[0]), _EPOCHS[1])


def build(config: Config, *, run: str | None = None) -> tuple[Sweep, FeatureData]:
    """The LightningModule and the data module of a config, for the run of this name."""
    config = settled_training(config)
    shapes = grid(config.heads)
    data = FeatureData(config.data, config.heads, pair=config.pair)
    facts = {
        "run": run,
        "hidden_size": data.hidden_size,
        "provenance": _provenance(config, data),
        "signals": fit_own_signals(data, dict.fromkeys(shape.timing for shape in shapes)),
    }
    embedding = None
    if any(shape.inputs.embedding for shape in shapes):
        embedding = _input_embedding(config.pair, data.hidden_size)
    allows_tf32 = config.trainer.get("precision") is None
    return Sweep(asdict(config.heads), facts, embedding=embedding, allows_tf32=allows_tf32), data


def report(sweep: Sweep, directory: RunDirectory) -> None:
    """Write val_metrics.json, tables.md and the plots; print the verdict."""
    write_metrics(directory.metrics, sweep.results, run=sweep.facts["run"], history=sweep.history)
    texts = [tables(result, sweep.specs, split=name) for name, result in sweep.results.items() if "/" not in name]
    write_atomic(directory.path / "tables.md", "\n".join([*texts, by_set(sweep.results, sweep.specs)]).encode())
    plots = save_plots(directory.path / "plots", sweep.results["dev"], history=sweep.history, specs=sweep.specs)
    print(verdict(sweep.results["dev"], sweep.specs))
    print(f"all metrics: {directory.path / 'tables.md'}, {directory.metrics}; {len(plots)} plots: {plots[0].parent}")


def _input_embedding(pair: PairConfig, hidden_size: int) -> Float[Tensor, "vocab hidden"]:
    """The draft's input embeddings; a draft that reads the target's states is loaded with its target."""
    try:
        draft = load_pair(pair).drafting if released_layout_of(pair.draft) else load_model(pair.draft, device=_CPU)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; heads with heads.embeddings [true] read its embeddings; without it, set "
            "heads.embeddings to [false]"
        ) from error
    layer = draft.embedding if isinstance(draft, FeatureDraft) else draft.get_input_embeddings()
    embedding = layer.get_parameter("weight").detach().float().cpu().clone()
    if embedding.shape[1] != hidden_size:
        raise ValueError(
            f"the draft's embeddings have width {embedding.shape[1]} and its hidden states {hidden_size}, but "
            "heads.embeddings needs equal widths; set it to [false]"
        )
    return embedding


def _provenance(config: Config, data: FeatureData) -> Json:
    manifest = data.manifest
    recorded = manifest.get("recorded", {})
    models = {name: {"path": recorded.get(f"{name}_path"), **manifest[name]} for name in ("draft", "target")}
    settings = {key: config.trainer.get(key) for key in ("max_epochs", "max_steps", "precision")}
    training: Json = {
        "prompts": manifest["prompts"],
        "responses": data.num_responses("train"),
        "learning_rate": config.heads.learning_rate,
        "sequences_per_batch": config.heads.batch_size,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
    }
    training |= {key: value for key, value in settings.items() if value not in (None, -1)}
    training |= {key: manifest[key] for key in ("template", "draft_length") if manifest.get(key)}
    return {
        # data of feature drafts is not mixed
        "mixing_ratio": None if manifest.get("draft_length") else manifest["mixing_ratio"],
        **models,
        "sampling": manifest["sampling"],
        "training": training,
        "license": license_of(models["draft"]),
    }
