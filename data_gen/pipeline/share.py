"""One process's share of a run: every world_size-th shard, from the one of its rank on.

Rank R of N makes shards R, R + N, R + 2N, … of the run's list, which is the same in every process. Nothing but the
index of a shard reaches its bytes (`data_gen.pipeline.stages`), so N processes write what one would. Each holds the
lock of its rank for as long as it works, and the directory's own lock for two moments: while it settles the manifest,
and when it has done its share. The process that then finds no other at work accounts for all prompts.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from configs.schema import DataConfig, PairConfig
from data_gen.responses.conversation import ShardSpec
from store.lock import LOCK, holder_of, in_words, only_writer, state

_TURN_S = 300.0
"""Other processes' turns are waited for so long; each is a moment, and longer on a slow disk."""
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
"""Variables of rank, number of processes, and place among those of the machine. (A batch script outside srun has a
SLURM_PROCID, but no step.)
"""


class Share(NamedTuple):
    """Rank and number of processes of a run."""

    rank: int
    world_size: int
    local_rank: int = 0
    """Place among the processes of this machine, as far as a launcher says so."""
    launcher: str | None = None
    """Whose variables say all this; None: the flags do, or nobody."""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}" + (f" ({self.launcher}'s)" if self.launcher else "")

    def of(self, specs: Sequence[ShardSpec]) -> list[ShardSpec]:
        """The shards that this process makes."""
        return list(specs[self.rank :: self.world_size])

    @property
    def is_whole(self) -> bool:
        """Whether one process makes everything."""
        return self.world_size == 1

    @property
    def _lock(self) -> str:
        return LOCK if self.is_whole else f"{LOCK}-{self.rank}-of-{self.world_size}"

    def writing(self, directory: str) -> AbstractContextManager[None]:
        """The lock of this rank, or of the directory for a process that makes everything."""
        return only_writer(directory, setting="data.dir", name=self._lock)

    def turn(self, directory: str) -> AbstractContextManager[None]:
        """The directory's own lock, for what one process does at a time."""
        return nullcontext() if self.is_whole else only_writer(directory, setting="data.dir", wait_s=_TURN_S)

    @contextmanager
    def last_turn(self, directory: str, work: ExitStack) -> Iterator[int]:
        """A turn when the share is done. Yields the number of other processes at work; `work` holds the lock of this
        rank, which is given back first: of two that end at once, the second finds none.
        """
        with self.turn(directory):
            if not self.is_whole:
                work.close()
            yield sum(holder_of(path) is not None for path in self._others(directory))

    def refuse_others(self, directory: str, data: DataConfig) -> None:
        """Raise ValueError where processes write there that share the shards otherwise; the caller has its turn."""
        asked = f"{data.num_train}, {data.num_dev} and {data.num_test}"
        for path in self._others(directory):
            if (holder := holder_of(path)) is None:
                continue
            rank, _, world_size = path.name.removeprefix(f"{LOCK}-").split("-")
            who = f"{directory} is in use by rank {rank} of {world_size}, {in_words(holder)}"
            if world_size != str(self.world_size):
                raise ValueError(
                    f"{who}; wait until it ends, stop it, give this process --world_size {world_size} too, or choose "
                    "another data.dir"
                )
            if holder.get("asked", asked) != asked:
                raise ValueError(
                    f"{who}, whose data.num_train, num_dev and num_test are {holder['asked']}, and here they are "
                    f"{asked}, so that the two would share the shards otherwise; give all processes the same, or wait"
                )
        if not self.is_whole:
            state(Path(directory) / self._lock, asked=asked)

    def on_its_gpu(self, pair: PairConfig) -> PairConfig:
        """The section with models that would go to the first GPU on the one of this process, of several on this
        machine.
        """
        num_gpus = torch.cuda.device_count()
        if self.local_rank == 0 or num_gpus < 2:
            return pair
        own = f"cuda:{self.local_rank % num_gpus}"
        target, draft = (
            replace(source, device_map=own) if source.device_map is None and source.tp_plan is None else source
            for source in (pair.target, pair.draft)
        )
        return replace(pair, target=target, draft=draft)

    def _others(self, directory: str) -> list[Path]:
        return [path for path in sorted(Path(directory).glob(f"{LOCK}-*-of-*")) if path.name != self._lock]


def share_of(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Share:
    """The share of this process: as given, or as torchrun or srun say in its environment, or everything.

    Raises:
        ValueError: one of the two is missing, or the rank is not below world_size.
    """
    if rank is None and world_size is None:
        return next(filter(None, (_launched(launcher, environment) for launcher in _LAUNCHERS)), Share(0, 1))
    if rank is None or world_size is None:
        given, lacking = ("--world_size", "--rank") if rank is None else ("--rank", "--world_size")
        raise ValueError(f"{given} is given without {lacking}; give both: --rank 0 --world_size 4 is the first of four")
    if not 0 <= rank < world_size:
        raise ValueError(f"--rank is {rank} and --world_size {world_size}; ranks are 0 to world_size - 1")
    return Share(rank, world_size)


def _launched(launcher: str, environment: Mapping[str, str]) -> Share | None:
    """The share that a launcher's variables state; None where it did not start this process."""
    *names, local = _LAUNCHERS[launcher]
    if not all(environment.get(name) for name in names):
        return None
    try:
        rank, world_size, local_rank = (int(environment.get(name, "0")) for name in (*names, local))
    except ValueError:
        rank, world_size, local_rank = -1, 0, 0
    if not 0 <= rank < world_size:
        said = " and ".join(f"{name} is {environment[name]!r}" for name in names)
        raise ValueError(
            f"{said} in the environment of this process, and ranks are 0 to the number of processes - 1; unset them, "
            "or give --rank and --world_size (0 and 1: this process makes everything)"
        )
    return Share(rank, world_size, local_rank, launcher)
