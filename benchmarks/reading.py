"""How fast training reads features, and how far its steps are from their matrix products:

    python -m benchmarks.reading --gigabytes 2.5 --against ../other-checkout

Features of a 7B draft's shape are made up in a temporary folder (bfloat16, 4,096 wide, responses of 64 to 512 tokens of
which 85 % are drafted, 128 a shard), and lie in the page cache. In turns, each in a fresh process, once with the code
of this checkout and once with that of each other one:

    open     the data module is made, which checks every shard
    epoch    its training batches are taken, by a consumer that does nothing else
    reopen   the data module is made by another process

Bytes are those of the shards' files, and each figure stands per second of a clock and per second of the process's
processors. Then, with this checkout's code, `Trainer.fit` of heads: the step's own matrix products follow each step, by
torch.mm at its shapes with its weights, so that both meet the same machine. The grid of the paper (20 heads) at a
width of which its weights fit the memory of a small machine, and one head of depth 4 at twice that width. The last
line is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.where import measured_where
from configs.schema import Config, DataConfig, HeadsConfig, ModelSource, PairConfig
from evaluation.turns import in_turns
from heads.batches.module import FeatureData
from heads.training.run import build
from heads.training.trainer import quiet

SHARD_ROWS, WIDTH, GRID_WIDTH, HEAD_WIDTH = 128, 4096, 1024, 2048
DRAFTED = 0.85
PAPER: dict[str, Any] = {"depths": (0, 1, 2, 3, 4), "reject_weights": (1.0, 3.0, 6.0, 12.0)}
ONE: dict[str, Any] = {"depths": (4,), "reject_weights": (1.0,)}
_SILENT: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def reading(*, gigabytes: float, against: list[Path], repeats: int, steps: int, folder: Path | None) -> dict[str, Any]:
    """Print the figures and return what the last line holds.

    Args:
        gigabytes: size of the made-up features.
        against: other checkouts of the project.
        repeats: number of turns of each checkout; medians are reported.
        steps: training steps that are timed of each kind, after one that warms up; 0: none.
        folder: where the data is made, and removed afterwards.
    """
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = make_data(Path(place, "wide"), width=WIDTH, num_bytes=int(gigabytes * 1e9))
        report["features_bytes"] = made
        figures: dict[str, list[dict[str, float]]] = {str(path): [] for path in (Path.cwd(), *against)}
        for _, order in in_turns(figures, range(repeats)):
            for checkout in order:
                for kept in Path(place, "wide").rglob("checked.json"):
                    kept.unlink()
                found = _in_process(checkout, "epoch", Path(place, "wide"))
                figures[checkout].append(found | _in_process(checkout, "reopen", Path(place, "wide")))
        for checkout, turns in figures.items():
            name = "here" if checkout == str(Path.cwd()) else Path(checkout).name
            report[name] = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
            print(name, *(f"  {key:28} {value:9.3f}" for key, value in report[name].items()), sep="\n")
        for name, width, heads in (("grid", GRID_WIDTH, PAPER), ("one_head", HEAD_WIDTH, ONE)) if steps else ():
            directory = Path(place, name)
            make_data(directory, width=width, num_bytes=SHARD_ROWS * 300 * 2 * width)
            arguments = json.dumps(heads | {"steps": steps})
            report[name] = _in_process(str(Path.cwd()), "steps", directory, arguments)
            print(name, *(f"  {key:28} {value:9.3f}" for key, value in report[name].items()), sep="\n")
    report |= {"num_threads": torch.get_num_threads(), **measured_where(), "command": " ".join(sys.argv)}
    print(json.dumps(report))
    return report


def make_data(directory: Path, *, width: int, num_bytes: int) -> int:
    """Write features and a manifest of a made-up pair; the bytes of the training shards."""
    folder, written = directory / "features" / "fed", 0
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "dev"):
        index, limit = 0, num_bytes if split == "train" else 1
        total = 0
        while total < limit:
            total += _write_shard(folder / f"{split}-{index:05d}.safetensors", width, generator)
            index += 1
        written = max(written, total)
    model = {"revision": None, "fingerprint": None, "dtype": "bfloat16", "hidden_size": width}
    sampling = {"temperature": 1.0, "top_k": None, "top_p": None}
    manifest = {"sampling": sampling, "mixing_ratio": 0.15, "mixes": 1, "prompts": "made-up"}
    manifest |= {name: {"name": f"made-up/{name}", **model} for name in ("target", "draft")}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return written


def _write_shard(path: Path, width: int, generator: torch.Generator) -> int:
    lengths = torch.randint(64, 513, (SHARD_ROWS,), generator=generator)
    count = int(lengths.sum())
    floats = ("acceptance_prob", "target_prob", "acceptance_rate", "entropy", "log_q", "log_token_prob")
    tensors: dict[str, Tensor] = {name: torch.rand(count, generator=generator) for name in floats}
    tensors |= {
        "hidden": torch.randn(count, width, generator=generator).bfloat16(),
        "token": torch.zeros(count, dtype=torch.int32),
        "is_drafted": torch.rand(count, generator=generator) < DRAFTED,
        "row_offsets": torch.cat([torch.zeros(1), lengths.cumsum(0)]).long(),
    }
    save_file(tensors, path)
    digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    facts = {"shard": path.stem, "rows": SHARD_ROWS, "tokens": count, "bytes": path.stat().st_size, "sha256": digest}
    path.with_name(f"{path.name}.json").write_text(json.dumps(facts))
    return path.stat().st_size


def _config(directory: Path, **heads: Any) -> Config:
    settings: dict[str, Any] = {"timings": ("fed",), "scalars": (False,), "specdec": False, "learning_rate": 1e-4}
    return Config(
        pair=PairConfig(target=ModelSource(path="made-up/target"), draft=ModelSource(path="made-up/draft")),
        data=DataConfig(dir=str(directory), split_weights=(40, 10, 2), features=("fed",), num_test=0),
        heads=HeadsConfig(dir=str(directory / "run"), **settings | heads),
    )


def _in_process(checkout: str, kind: str, directory: Path, arguments: str = "{}") -> dict[str, Any]:
    """What a fresh process with a checkout's code found."""
    # this very file, with everything that it imports from the checkout that the process starts in
    code = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(Path(__file__).resolve()), "--measure", kind, str(directory), arguments]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=checkout, check=False)
    if answer.returncode:
        raise RuntimeError(answer.stderr)
    found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found


class _Clock:
    """Seconds of a clock and of this process's processors since it was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = -time.perf_counter(), -time.process_time()

    def stopped(self) -> "_Clock":
        self.wall, self.cpu = self.wall + time.perf_counter(), self.cpu + time.process_time()
        return self

    def rates(self, name: str, num_bytes: int) -> dict[str, float]:
        """Seconds, and bytes per second of either kind."""
        self.stopped()
        return {
            f"{name}_s": self.wall,
            f"{name}_gb_per_s": num_bytes / self.wall / 1e9,
            f"{name}_gb_per_cpu_s": num_bytes / self.cpu / 1e9,
        }


def measure_open(directory: Path, *, name: str = "reopen") -> dict[str, float]:
    """What it takes to make the data module, checks included."""
    config, num_bytes = _config(directory), _training_bytes(directory)
    clock = _Clock()
    FeatureData(config.data, config.heads, pair=config.pair)
    return clock.rates(name, num_bytes)


def measure_epoch(directory: Path) -> dict[str, float]:
    """Opening, and one epoch after a first that fills caches and memory."""
    config, num_bytes = _config(directory), _training_bytes(directory)
    found = measure_open(directory, name="open")
    loader = FeatureData(config.data, config.heads, pair=config.pair).train_dataloader()
    for epoch in range(2):
        loader.set_epoch(epoch)
        clock = _Clock()
        num_tokens = sum(len(batch["fed"].token) for batch in loader)
        found |= clock.rates("epoch", num_bytes)
    return found | {"epoch_tokens": num_tokens}


def _training_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("train-*.safetensors"))


class _Beside(pl.Callback):
    """What each step took, and its matrix products right after it: (seconds of a clock, seconds of processors)."""

    def __init__(self) -> None:
        self.pairs: list[tuple[_Clock, _Clock]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = _Clock()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self._clock.stopped()
        self.pairs.append((step, _products(batch["fed"].hidden.float(), pl_module)))
        self._clock = _Clock()


@torch.no_grad()
def _products(hidden: Tensor, sweep: Any) -> _Clock:
    """The products of one step: of each block z = h W^T, the gradients g^T h and, but for the first, g W."""
    spare, other = torch.randn_like(hidden), torch.randn_like(hidden)
    square = hidden.new_zeros(hidden.shape[1], hidden.shape[1])
    clock = _Clock()
    for _, stack in sweep.items():
        for head in range(len(stack.specs)):
            for block in range(stack.shape.depth):
                weight = stack.weights[f"blocks.{block}.weight"][head]
                torch.mm(hidden, weight.T, out=spare)
                torch.mm(spare.T, hidden, out=square)
                if block:
                    torch.mm(spare, weight, out=other)
    return clock.stopped()


def measure_steps(directory: Path, *, steps: int, batch_size: int = 8, **heads: Any) -> dict[str, float]:
    """Medians of steps and products; the first step, which fills caches, is left out."""
    tuples = {name: tuple(value) for name, value in heads.items()}
    sweep, data = build(_config(directory, batch_size=batch_size, **tuples))
    beside = _Beside()
    trainer = pl.Trainer(
        max_steps=steps + 1, limit_val_batches=0, accelerator="cpu", devices=1, callbacks=[beside], **_SILENT
    )
    trainer.fit(sweep, datamodule=data)
    found: dict[str, float] = {}
    for name in ("wall", "cpu"):
        pairs = [(getattr(step, name), getattr(products, name)) for step, products in beside.pairs[1:]]
        found |= {
            f"step_{name}_s": statistics.median(step for step, _ in pairs),
            f"products_{name}_s": statistics.median(products for _, products in pairs),
            f"step_over_products_{name}": statistics.median(step / products for step, products in pairs),
        }
    return found


_MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "epoch": measure_epoch,
    "reopen": measure_open,
    "steps": measure_steps,
}


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--against", type=Path, nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", nargs=3, metavar=("KIND", "DIRECTORY", "ARGUMENTS"))
    return parser.parse_args()


if __name__ == "__main__":
    quiet()
    warnings.filterwarnings("ignore")
    given = _parsed()
    if given.measure:
        kind, directory, arguments = given.measure
        print(json.dumps(_MEASURES[kind](Path(directory), **json.loads(arguments))))
    else:
        del given.measure
        given.against = [path.resolve() for path in given.against]
        reading(**vars(given))
