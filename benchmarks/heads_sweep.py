"""What the sweep saves: `python -m benchmarks.heads_sweep --config configs/tiny.yaml`, after `python -m data_gen`.

One interleaved run over the first `num_train` responses of the config's data:

    sweep     every head of depths 0-4 x reject weights 1, 3, 6, 12 in one Lightning run on cached features
    separate  the same heads as 20 runs of their own on the same cached features
    official  the shape of SpecDec++'s work: the draft's forward for every batch of every epoch of every head, besides
        the heads' steps
    products  the sweep's matrix products alone, by torch.mm at the shapes of one batch

and the feature pass, which counts with the sweep: one forward of the draft over the data. Beside the second ratio
stands the bound by FLOPs: (draft forward once + heads) / (draft forward per epoch and head + heads). Peak memory is
that of fresh processes that train on 1, 2 and 4 copies of the shards. The last line is one JSON document.
"""

import json
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytorch_lightning as pl
import torch

from benchmarks.where import short_commit
from configs.command import run
from configs.schema import Config, HeadsConfig
from evaluation.turns import in_turns
from heads.batches.online import RowData
from heads.training.run import build
from heads.training.trainer import quiet
from lm import load_pair
from lm.forwards import hidden_states

DEPTHS, WEIGHTS = (0, 1, 2, 3, 4), (1.0, 3.0, 6.0, 12.0)


def heads_sweep(
    config: Config, *, num_train: int = 512, epochs: int = 3, repeats: int = 3, memory: bool = True
) -> dict[str, object]:
    """Print the table and return what the last line holds.

    Args:
        num_train: responses.
        epochs: of every run.
        repeats: of the interleaved measurement; medians are reported.
        memory: also measure the peak memory over 1, 2 and 4 times the data.
    """
    config = replace(config, heads=replace(_cached(config.heads), num_train=num_train))
    arms: dict[str, Callable[[], float]] = {
        "sweep": lambda: _fit(config, epochs, DEPTHS, WEIGHTS),
        "separate": lambda: sum(_fit(config, epochs, (depth,), (weight,)) for depth in DEPTHS for weight in WEIGHTS),
        "feature_pass": lambda: _feature_pass(config),
        "products": lambda: _products(config, epochs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _, order in in_turns(arms, range(repeats)):
        for name in order:
            seconds[name].append(arms[name]())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    sweep = median["sweep"] + median["feature_pass"]
    official = median["separate"] + median["feature_pass"] * epochs * len(DEPTHS) * len(WEIGHTS)
    report: dict[str, object] = {
        **{f"{name}_s": round(value, 3) for name, value in median.items()},
        **{f"{name}_all_s": [round(value, 3) for value in values] for name, values in seconds.items()},
        "ratio_to_separate": round(sweep / median["separate"], 4),
        "ratio_to_official": round(sweep / official, 4),
        "ratio_to_products": round(median["sweep"] / median["products"], 3),
        **_flop_bounds(config, epochs),
        "peak_memory_mb": _peak_memory(config) if memory else None,
        "num_train": num_train,
        "epochs": epochs,
        "num_threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": short_commit(),
        "command": " ".join(sys.argv),
    }
    for name, value in report.items():
        print(f"{name:22} {value}")
    print(json.dumps(report))
    return report


def _cached(heads: HeadsConfig) -> HeadsConfig:
    """The paper's inputs: fed-time, hidden state alone."""
    return replace(heads, timings=("fed",), scalars=(False,), embeddings=(False,), specdec=False, features="cached")


def _fit(config: Config, epochs: int, depths: tuple[int, ...], weights: tuple[float, ...]) -> float:
    """Seconds of one Lightning run without validation, from opening the data on."""
    config = replace(config, heads=replace(config.heads, depths=depths, reject_weights=weights))
    started = time.perf_counter()
    sweep, data = build(config)
    silent = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(max_epochs=epochs, limit_val_batches=0, accelerator="cpu", **silent)
    trainer.fit(sweep, datamodule=data)
    return time.perf_counter() - started


def _feature_pass(config: Config) -> float:
    """Seconds of the draft's forward over every batch of rows once."""
    rows = list(RowData(config.data, config.heads, pair=config.pair).loader("train"))
    draft = load_pair(config.pair).draft
    started = time.perf_counter()
    for batch in rows:
        hidden_states(draft, [row.prompt_ids + row.draft_ids for row in batch], [len(row.prompt_ids) for row in batch])
    return time.perf_counter() - started


def _products(config: Config, epochs: int) -> float:
    """Seconds of the sweep's matrix products of all batches, each by torch.mm on its own."""
    _, data = build(config)
    seconds = 0.0
    for batch in data.loader("train"):
        hidden = batch["fed"].hidden.float()
        weight, spare = torch.randn(hidden.shape[1], hidden.shape[1]), torch.empty_like(hidden)
        started = time.perf_counter()
        for depth in DEPTHS:
            for block in range(depth):
                for _ in WEIGHTS:
                    torch.mm(hidden, weight, out=spare)
                    torch.mm(spare.T, hidden)
                    if block:
                        torch.mm(hidden, weight, out=spare)
        seconds += time.perf_counter() - started
    return seconds * epochs


def _flop_bounds(config: Config, epochs: int) -> dict[str, float]:
    """(feature pass once + heads) / (draft per epoch and head + heads), in FLOPs: for this draft and for a 7B one with
    hidden size 4096.
    """
    pair = load_pair(config.pair)
    hidden_size = pair.draft.config.get_text_config().hidden_size
    num_draft_parameters = sum(p.numel() for p in pair.draft.parameters())

    def bound(parameters: float, hidden: int) -> float:
        forward, num_heads = 2 * parameters, len(DEPTHS) * len(WEIGHTS)
        heads = len(WEIGHTS) * sum(3 * 2 * hidden * hidden * depth for depth in DEPTHS) * epochs
        return round((forward + heads) / (forward * epochs * num_heads + heads), 5)

    return {
        "flop_bound_to_official": bound(num_draft_parameters, hidden_size),
        "flop_bound_to_official_7b": bound(6.7e9, 4096),
    }


def _peak_memory(config: Config) -> list[float]:
    """Peak resident MB of a fresh process that trains one epoch on 1, 2 and 4 copies of the training shards."""
    peaks = []
    for copies in (1, 2, 4):
        with tempfile.TemporaryDirectory() as place:
            directory = _copied(Path(config.data.dir), Path(place), copies)
            command = [sys.executable, "-m", "benchmarks.heads_sweep", "--only_memory", str(directory), *sys.argv[1:]]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks.append(float(answer.stdout.strip().splitlines()[-1]))
    return peaks


def _copied(source: Path, place: Path, copies: int) -> Path:
    """The data directory with its training shards repeated."""
    shutil.copytree(source, place / "data")
    folder = place / "data" / "features" / "fed"
    shards = sorted(folder.glob("train-*.safetensors"))
    for index in range(len(shards), copies * len(shards)):
        name = f"train-{index:05d}.safetensors"
        for suffix in ("", ".json"):
            shutil.copy(f"{shards[index % len(shards)]}{suffix}", folder / f"{name}{suffix}")
    return place / "data"


def memory_of_one_epoch(
    config: Config, *, only_memory: str, num_train: int = 0, epochs: int = 1, repeats: int = 1, memory: bool = False
) -> None:
    """Train one epoch on the data in a directory and print the peak resident MB."""
    _fit(replace(config, data=replace(config.data, dir=only_memory), heads=_cached(config.heads)), 1, DEPTHS, WEIGHTS)
    print(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))


if __name__ == "__main__":
    quiet()
    warnings.filterwarnings("ignore")
    run({"bench": memory_of_one_epoch if "--only_memory" in sys.argv else heads_sweep}, default="bench")
