"""One process's share of a run: rank R of N makes shards R, R + N, R + 2N, … of the run's list.

A shard's bytes depend only on its index (`data_gen.pipeline.stages`), so N processes write what one would. Each process
holds the lock of its rank while it works, and the directory's lock briefly: to settle the manifest, and when its share
is done. The last process to finish counts all prompts.
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
"""Longest wait for the directory's lock, which others hold for a moment, longer on a slow disk."""
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
"""Variables of rank, world size and local rank. A batch script outside srun has no step."""


class Share(NamedTuple):
    """Rank and number of processes of a run."""

    rank: int
    world_size: int
    local_rank: int = 0
    """Index among the processes of this machine."""
    launcher: str | None = None
    """The launcher whose variables define the share; None: flags or defaults do."""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}" + (f" (from {self.launcher})" if self.launcher else "")

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
        """The lock that this process holds while it works: of its rank, or of the directory if it makes everything."""
        return only_writer(directory, setting="data.dir", name=self._lock)

    def turn(self, directory: str) -> AbstractContextManager[None]:
        """The directory's lock, for what one process does at a time."""
        return nullcontext() if self.is_whole else only_writer(directory, setting="data.dir", wait_s=_TURN_S)

    @contextmanager
    def last_turn(self, directory: str, work: ExitStack) -> Iterator[int]:
        """A turn after the share is done. Yields the number of other running processes.

        `work` holds the lock of this rank, which is released first: of two processes that end at once, the second sees
        none.
        """
        with self.turn(directory):
            if not self.is_whole:
                work.close()
            yield sum(holder_of(path) is not None for path in self._others(directory))

    def refuse_others(self, directory: str, data: DataConfig) -> None:
        """Raise ValueError if running processes divide the shards differently; the caller has its turn."""
        numbers = f"data.num_train, num_dev and num_test {data.num_train}, {data.num_dev} and {data.num_test}"
        requested = f"--world_size {self.world_size} and {numbers}"
        for path in self._others(directory):
            holder = holder_of(path) or {}
            if holder.get("requested", requested) != requested:
                rank, _, world_size = path.name.removeprefix(f"{LOCK}-").split("-")
                raise ValueError(
                    f"{directory} is in use by rank {rank} of {world_size}, {in_words(holder)}, with "
                    f"{holder['requested']} instead of {requested}; wait until it ends, stop it, give all processes "
                    "the same numbers, or choose another data.dir"
                )
        if not self.is_whole:
            state(Path(directory) / self._lock, requested=requested)

    def on_its_gpu(self, pair: PairConfig) -> PairConfig:
        """The section with models moved from the first GPU to this process's GPU, if the machine has several."""
        num_gpus = torch.cuda.device_count()
        if self.local_rank == 0 or num_gpus < 2:
            return pair
        device = f"cuda:{self.local_rank % num_gpus}"
        target, draft = (
            replace(source, device_map=device) if source.device_map is None and source.tp_plan is None else source
            for source in (pair.target, pair.draft)
        )
        return replace(pair, target=target, draft=draft)

    def _others(self, directory: str) -> list[Path]:
        return [path for path in sorted(Path(directory).glob(f"{LOCK}-*-of-*")) if path.name != self._lock]


def share_of(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Share:
    """The share of this process: as given, or from the variables of torchrun or srun, or everything; ValueError for
    half of a share or a rank that is not below world_size.
    """
    if rank is None and world_size is None:
        for launcher, (*names, local) in _LAUNCHERS.items():
            if all(environment.get(name) for name in names):
                return _launched({name: environment.get(name, "0") for name in (*names, local)}, launcher)
        return Share(0, 1)
    if rank is None or world_size is None:
        present, missing = ("--world_size", "--rank") if rank is None else ("--rank", "--world_size")
        raise ValueError(f"{present} is given without {missing}; give both, such as --rank 0 --world_size 4")
    if not 0 <= rank < world_size:
        raise ValueError(f"--rank is {rank} and --world_size {world_size}; --rank must be from 0 to world_size - 1")
    return Share(rank, world_size)


def _launched(variables: Mapping[str, str], launcher: str) -> Share:
    if all(map(str.isdecimal, variables.values())):
        rank, world_size, local_rank = map(int, variables.values())
        if rank < world_size:
            return Share(rank, world_size, local_rank, launcher)
    found = " and ".join(f"{name} is {value!r}" for name, value in variables.items())
    raise ValueError(
        f"{found} in the environment, which is not a valid rank and world size; unset them, or pass --rank 0 "
        "--world_size 1 to make everything in this process"
    )
