"""Train every head of the grid in one run: `python train.py --config configs/tiny.yaml`. Run again, it goes on from its last checkpoint."""

import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from configs.command import run
from configs.schema import Config
from heads.training.directory import RunDirectory
from heads.training.run import build, report
from heads.training.trainer import make_trainer, quiet


def train(config: Config, *, resume: bool = True) -> dict[str, Any]:
    """Train the sweep of a config, test it on dev and test, write tables, plots and metrics.

    Args:
        resume: go on from heads.dir's last checkpoint, if there is one; a run of another config there is refused. Off: start over.
    """
    directory = RunDirectory(Path(config.heads.dir))
    with directory.alone():
        trainer = make_trainer(config)
        start = directory.prepare(config, resume=resume)
        pl.seed_everything(config.heads.seed, verbose=False)
        sweep, data = build(config, run=start.run, device=trainer.strategy.root_device)
        try:
            trainer.fit(sweep, datamodule=data, ckpt_path=start.checkpoint, weights_only=True)
            trainer.test(sweep, datamodule=data, verbose=False)
        except MisconfigurationException as error:
            raise ValueError(f"trainer: {error}") from error
        return report(sweep, directory) if trainer.is_global_zero else sweep.results


def main() -> None:
    """The command line."""
    quiet()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    run({"train": train}, default="train", trainer=pl.Trainer)


if __name__ == "__main__":
    main()
