"""A run under a batch system: a signal stops it, the same command starts it again, and it goes on from its checkpoint.

Lightning has checkpoints of its own for SLURM (hpc_ckpt_N.ckpt, written wherever in a step SIGUSR1 comes). They are
turned off here: heads.dir/last.ckpt lies between two steps and bears the name of its run. SIGUSR1, which SLURM and Grid
Engine can send ahead of a time limit, stops the run as SIGTERM does, with a checkpoint. Whether the job is queued again
is SLURM's to decide, or the job script's.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pytorch_lightning.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment


def environments(plugins: Sequence[Any]) -> list[ClusterEnvironment]:
    """The environment to add to a trainer's plugins: SLURM's without requeueing, where Lightning would choose SLURM's.

    Raises:
        ValueError: the plugins have one that requeues, or srun was started with --ntasks alone.
    """
    given = [plugin for plugin in plugins if isinstance(plugin, ClusterEnvironment)]
    if any(isinstance(plugin, SLURMEnvironment) and plugin.auto_requeue for plugin in given):
        raise ValueError(
            "trainer.plugins has a SLURMEnvironment with auto_requeue, which writes checkpoints that no run goes on "
            "from; give it auto_requeue: false, or leave it out"
        )
    if given or TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:
        raise ValueError(f"SLURM: {error}") from error


@contextmanager
def stopped_by_sigusr1() -> Iterator[None]:
    """Within: SIGUSR1 does what SIGTERM does."""
    if threading.current_thread() is not threading.main_thread():  # where Python lets no handler be set
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
