"""Speed of data generation and training: `python -m benchmarks.pace --config configs/tiny.yaml [--rows 96] [--epochs 3]
[--repeats 3]`.

labelling   labels, both feature sets and their files, compared with the necessary forwards (bare)
reading     creating the data module, which checks every shard (open), and reading one epoch (epoch)
sweep       every head of depths 0-4 x reject weights 1, 3, 6, 12 in one run, compared with 20 runs (separate)

Arms of a group take turns, with one thread. Prints medians of this process's CPU time; the last line is JSON.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from configs.command import run
from configs.schema import Config
from data_gen.labels.labeller import Labeller
from data_gen.pipeline import stages
from data_gen.pipeline.command import make
from data_gen.pipeline.worker import Job, Worker
from data_gen.prompts.sets import load_prompts
from data_gen.responses.exchange import Exchange, ShardSpec, ask
from data_gen.store.manifest import git_commit
from evaluation.turns import in_turns
from heads.batches.module import FeatureData
from heads.training.command import build
from heads.training.trainer import quiet
from lm import forwards

DEPTHS = (0, 1, 2, 3, 4)
WEIGHTS = (1.0, 3.0, 6.0, 12.0)


def pace(config: Config, *, rows: int = 96, epochs: int = 3, repeats: int = 3) -> dict[str, Any]:
    """Measure all three.

    Args:
        rows: number of responses.
        epochs: epochs of every training run.
        repeats: measured turns of each arm, after one for warm-up.
    """
    quiet()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        data = replace(config.data, dir=str(Path(name) / "data"), num_train=rows, num_dev=rows // 8, num_test=0)
        heads = replace(config.heads, timings=("fed",), scalars=(False,), embeddings=(False,), states="cached")
        config = replace(config, pair=replace(config.pair, num_threads=1), data=data, heads=heads)
        make(config)
        report: dict[str, Any] = {"rows": rows, "target": config.pair.target.path}
        for arms in (labelling(config), reading(config), training(config, epochs)):
            for arm, median in seconds(arms, repeats).items():
                report[f"{arm}_cpu_s"] = median
                print(f"{arm:12} {median:9.3f} s", flush=True)
        shards = Path(data.dir, "states", "fed").glob("train-*.safetensors")
        num_bytes = sum(path.stat().st_size for path in shards)
    report["labelling_over_bare"] = report["bare_cpu_s"] / report["labelling_cpu_s"]
    report["gb_per_cpu_s"] = num_bytes / 1e9 / report["epoch_cpu_s"]
    report["sweep_over_separate"] = report["sweep_cpu_s"] / report["separate_cpu_s"]
    report["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(json.dumps(report | {"date": time.strftime("%Y-%m-%d"), "commit": git_commit()}))
    return report


def seconds(arms: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each arm; arms take turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _, order in in_turns(arms, range(repeats + 1)):
        for name in order:
            start_s = time.process_time()
            arms[name]()
            times[name].append(time.process_time() - start_s)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def labelling(config: Config) -> dict[str, Callable[[], Any]]:
    """Labelling of responses, and only the forwards that it needs."""
    worker = Worker(Job(pair=config.pair, data=config.data, stage="together"))
    spec = ShardSpec("train", 0, tuple(load_prompts(config.data, "train")))
    answers = ask(spec, worker.source, tokenizer=worker.tokenizer, data=worker.data, progress=lambda count: None)

    def label() -> None:
        labelled = worker.label_and_mix(spec, answers.exchanges, {}, lambda count: None)
        stages.write_files(spec, answers, labelled, worker.data)

    return {"bare": lambda: bare(worker.labeller, answers.exchanges, worker.data.batch_size), "labelling": label}


def bare(labeller: Labeller, exchanges: list[Exchange], size: int) -> None:
    """Forwards of draft and target with logits."""
    order = sorted(exchanges, key=lambda exchange: -len(exchange.prompt_ids) - len(exchange.response_ids))
    for start in range(0, len(order), size):
        prompts = [exchange.prompt_ids for exchange in order[start : start + size]]
        texts = [exchange.prompt_ids + exchange.response_ids for exchange in order[start : start + size]]
        for model in (labeller.draft, labeller.target):
            hidden = forwards.hidden_states(model, [ids[:-1] for ids in texts], [len(ids) - 1 for ids in prompts])
            for chunk in forwards.chunks(len(hidden), forwards.chunk_rows(labeller.vocab_size, labeller.chunk_mb)):
                forwards.logits_of(model, hidden[chunk], labeller.vocab_size)


def reading(config: Config) -> dict[str, Callable[[], Any]]:
    """Creating the data module, and reading an epoch of its batches."""
    data = FeatureData(config.data, config.heads, pair=config.pair)
    data.setup()
    loader = data.train_dataloader()
    return {
        "open": lambda: FeatureData(config.data, config.heads, pair=config.pair),
        "epoch": lambda: [len(batch["fed"].token) for batch in loader],
    }


def training(config: Config, epochs: int) -> dict[str, Callable[[], Any]]:
    """All heads in one run, and one run per head, without validation."""

    def fit(depths: tuple[int, ...], weights: tuple[float, ...]) -> None:
        heads = replace(config.heads, depths=depths, reject_weights=weights, specdec=False)
        sweep, data = build(replace(config, heads=heads))
        trainer = pl.Trainer(
            max_epochs=epochs,
            limit_val_batches=0,
            accelerator="cpu",
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(sweep, datamodule=data)

    return {
        "sweep": lambda: fit(DEPTHS, WEIGHTS),
        "separate": lambda: [fit((depth,), (weight,)) for depth in DEPTHS for weight in WEIGHTS],
    }


if __name__ == "__main__":
    run({"pace": pace}, default="pace")
