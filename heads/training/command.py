"""The command `train`: every head of the grid in one run. Run again, it goes on from its last checkpoint."""

import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

from configs.schema import Config
from heads.training.cluster import stopped_by_sigusr1
from heads.training.directory import RunDirectory
from heads.training.recipe import settled
from heads.training.run import build, report
from heads.training.trainer import make_trainer, quiet

_STOPPED = 128 + signal.SIGTERM
"""A shell's exit code of a process that SIGTERM has ended."""


def train(config: Config, *, resume: bool = True) -> dict[str, Any]:
    """Train the sweep of a config, test it on dev and test, write tables, plots and metrics.

    Args:
        config: the experiment; its run stands in heads.dir.
        resume: go on from heads.dir's last checkpoint, if there is one; a run of another config there is refused. Off:
            start over.
    """
    quiet()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    config = settled(config)
    directory = RunDirectory(Path(config.heads.dir))
    with directory.alone(), stopped_by_sigusr1():
        trainer = make_trainer(config)
        name, checkpoint = directory.prepare(config, resume=resume, processes=trainer.world_size)
        pl.seed_everything(config.heads.seed, verbose=False)
        sweep, data = build(config, run=name, device=trainer.strategy.root_device)
        try:
            trainer.fit(sweep, datamodule=data, ckpt_path=checkpoint, weights_only=True)
            trainer.test(sweep, datamodule=data, verbose=False)
        except MisconfigurationException as error:
            raise ValueError(f"trainer: {error}") from error
        except SIGTERMException as error:  # Lightning's own exit code is 0, as if the run were done
            print(
                "stopped by a signal; what was written is whole, the same command goes on from there", file=sys.stderr
            )
            raise SystemExit(_STOPPED) from error
        except SystemExit:
            if trainer.interrupted:  # Lightning makes an exit without a word of a stop by hand
                raise KeyboardInterrupt from None
            raise
        return report(sweep, directory) if trainer.is_global_zero else sweep.results
