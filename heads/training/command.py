"""The command `train`: every head of the grid in one run, which resumes from its last checkpoint."""

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
"""Exit code of a process that SIGTERM ended, by the convention of shells."""


def train(config: Config, *, resume: bool = True) -> dict[str, Any]:
    """Train every head of a config, measure them on dev and test, and write tables, plots and metrics.

    Args:
        config: the experiment; the run is written to heads.dir.
        resume: continue from the last checkpoint in heads.dir, if there is one of the same config; false: start over.
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
                "stopped by a signal; run the same command again to continue from the last checkpoint", file=sys.stderr
            )
            raise SystemExit(_STOPPED) from error
        except SystemExit:
            if trainer.interrupted:  # Lightning turns Ctrl-C into a silent exit
                raise KeyboardInterrupt from None
            raise
        return report(sweep, directory) if trainer.is_global_zero else sweep.results
