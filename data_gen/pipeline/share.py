"""One process's share of a run: shards of one rank, and the stages that it is to make of them.

Rank R of N makes shards R, R + N, R + 2N, … of the run's list, which is the same in every process. Nothing but the
index of a shard reaches its bytes (`data_gen.pipeline.stages`), so N processes write what one would. Each holds the
lock of its rank for as long as it runs, and the directory's own lock while it settles the manifest and while it
accounts for all shards, which is done by the process that finds them whole.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from data_gen.responses.conversation import ShardSpec
from store.lock import LOCK, holder_of, only_writer

_TURN_S = 300.0
"""Other ranks are waited for so long, each of which reads the prompts in its turn."""
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
"""Variables of torchrun and of srun. (A batch script outside srun has a SLURM_PROCID, but no step.)"""


class Share(NamedTuple):
    """Rank and number of processes of a run."""

    rank: int
    world_size: int

    def of(self, specs: Sequence[ShardSpec]) -> list[ShardSpec]:
        """The shards that this process makes."""
        return list(specs[self.rank :: self.world_size])

    @property
    def is_whole(self) -> bool:
        """Whether one process makes everything."""
        return self.world_size == 1

    def writing(self, directory: str) -> AbstractContextManager[None]:
        """The lock of this rank, or of the directory for a process that makes everything."""
        name = LOCK if self.is_whole else f"{LOCK}-{self.rank}-of-{self.world_size}"
        return only_writer(directory, setting="data.dir", name=name)

    def turn(self, directory: str) -> AbstractContextManager[None]:
        """The directory's own lock, for what one process does at a time."""
        return nullcontext() if self.is_whole else only_writer(directory, setting="data.dir", wait_s=_TURN_S)

    def refuse_others(self, directory: str) -> None:
        """Raise ValueError where processes write there that cut the shards otherwise."""
        for path in sorted(Path(directory).glob(f"{LOCK}-*-of-*")):
            of_path = path.name.rpartition("-")[2]
            if of_path != str(self.world_size) and (holder := holder_of(path)):
                name = path.name.removeprefix(f"{LOCK}-").replace("-", " ")
                raise ValueError(
                    f"{directory} is in use by rank {name}, {holder}; wait until it ends, stop it, give this process "
                    f"--world_size {of_path} too, or choose another data.dir"
                )


def share_of(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Share:
    """The share of this process: as given, or as torchrun or srun say in its environment, or everything.

    Raises:
        ValueError: one of the two is missing, or the rank is not below world_size.
    """
    if rank is None and world_size is None:
        for names in _LAUNCHERS:
            if all(environment.get(name, "").isdigit() for name in names):
                rank, world_size = (int(environment[name]) for name in names)
                break
        else:
            return Share(0, 1)
    if rank is None or world_size is None:
        given, lacking = ("--world_size", "--rank") if rank is None else ("--rank", "--world_size")
        raise ValueError(f"{given} is given without {lacking}; give both: --rank 0 --world_size 4 is the first of four")
    if not 0 <= rank < world_size:
        raise ValueError(f"--rank is {rank} and --world_size {world_size}; ranks are 0 to world_size - 1")
    return Share(rank, world_size)
