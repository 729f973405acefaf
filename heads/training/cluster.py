"""Training under a batch system: a signal stops the run, and the same command resumes it from its checkpoint.

SIGUSR1, which SLURM and Grid Engine can send before a time limit, stops the run as SIGTERM does, with a checkpoint.
SLURM or the job script decides whether the job is queued again. Lightning's SLURM checkpoints (hpc_ckpt_N.ckpt) are
disabled, because they can be written in the middle of a step.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pytorch_lightning.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment


def environments(plugins: Sequence[Any]) -> list[ClusterEnvironment]:
    """The environment to add to a trainer's plugins: under SLURM, SLURM's without requeueing.

    Raises:
        ValueError: a plugin that requeues, or srun was started with --ntasks only.
    """
    configured = [plugin for plugin in plugins if isinstance(plugin, ClusterEnvironment)]
    if any(isinstance(plugin, SLURMEnvironment) and plugin.auto_requeue for plugin in configured):
        raise ValueError(
            "trainer.plugins has a SLURMEnvironment with auto_requeue, whose checkpoints cannot be resumed; set its "
            "auto_requeue to false, or remove it"
        )
    if configured or TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:
        raise ValueError(f"SLURM: {error}") from error


@contextmanager
def stopped_by_sigusr1() -> Iterator[None]:
    """Treat SIGUSR1 as SIGTERM while the block runs."""
    if threading.current_thread() is not threading.main_thread():  # Python sets signal handlers only there
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
