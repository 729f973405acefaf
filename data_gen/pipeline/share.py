"""Several processes make one run: shares of the shards, and slices of a model.

Rank R of N makes shards R, R + N, R + 2N, … of the run's list. Each process holds the lock of its rank while it
works, and the directory's lock briefly: to settle the manifest, and when its share is done. The last process to
finish counts all prompts.

With sliced models (`tp_plan`, under torchrun) every process holds a slice and runs the same forwards. The first
process, the leader, broadcasts each job with sliced models and its shards. The others make the same shards from
the same files and seeds, and write nothing. Every process gets the same logits, so all draw the same tokens and
run the same next forward. Jobs without sliced models run in the leader only. torchrun's RANK and WORLD_SIZE then
count slices, and shares are set by --rank and --world_size.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, TypeVar

import torch
from torch import distributed

from configs.schema import DataConfig, PairConfig
from data_gen.pipeline.worker import Job, Worker
from data_gen.responses.exchange import ShardSpec
from lm import model_config
from lm.pair import free_memory
from lm.parallel import check_slices, join, sliced_models, slices_of
from store.lock import HANDOVER_S, LOCK, holder_of, only_writer

_TURN_S = 300.0
"""Longest wait for the directory's lock, which others hold for a moment, longer on a slow disk."""
_SLOW_START_S = 60.0
_POLL_S = 1.0
Spec = TypeVar("Spec")
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

    def of(self, specs: Sequence[Spec]) -> list[Spec]:
        """The shards that this process makes."""
        return list(specs[self.rank :: self.world_size])

    @property
    def is_whole(self) -> bool:
        """Whether one process makes everything."""
        return self.world_size == 1

    @contextmanager
    def first_turn(self, data: DataConfig, work: ExitStack) -> Iterator[None]:
        """Run the block while no other process has its turn. `work` gets the lock that this process holds until
        its share is done: of its rank, or of the directory if it makes everything. ValueError if running
        processes divide the shards differently; the lock of a rank has the division in its name.
        """
        division = f"of-{self.world_size}-{data.num_train}-{data.num_dev}-{data.num_test}"
        with ExitStack() as turn:
            self._enter(work if self.is_whole else turn, data.dir)
            for path in _locks_of_ranks(data.dir):
                if not path.name.endswith(division) and (holder := holder_of(path)) is not None:
                    rank, _, *numbers = path.name.removeprefix(f"{LOCK}-").split("-")
                    raise ValueError(
                        f"{data.dir} is in use by rank {rank}, {holder}, with --world_size and "
                        f"data.num_train, num_dev, num_test {', '.join(numbers)} instead of "
                        f"{', '.join(division.split('-')[1:])}; wait until it ends, stop it, give all processes the "
                        "same numbers, or choose another data.dir"
                    )
            if not self.is_whole:
                work.enter_context(only_writer(data.dir, setting="data.dir", name=f"{LOCK}-{self.rank}-{division}"))
            yield

    @contextmanager
    def last_turn(self, directory: str, work: ExitStack) -> Iterator[int]:
        """A turn after the share is done. Yields the number of other running processes.

        `work` holds the lock of this rank, which is released first: of two processes that end at once, the
        second sees none.
        """
        with ExitStack() as turn:
            if not self.is_whole:
                self._enter(turn, directory)
                work.close()
            yield sum(holder_of(path) is not None for path in _locks_of_ranks(directory))

    def wait_for_others(self, directory: str, is_complete: Callable[[], bool]) -> None:
        """Wait until the processes that torchrun or srun started beside this one have made their shards too, so
        that what these launchers run next finds them; or until none has run for `_SLOW_START_S`.
        """
        ended_s = monotonic()
        while self.launcher is not None and not is_complete() and monotonic() < ended_s + _SLOW_START_S:
            if any(holder_of(path) is not None for path in _locks_of_ranks(directory)):
                ended_s = monotonic()
            sleep(_POLL_S)

    def _enter(self, stack: ExitStack, directory: str) -> None:
        wait_s = HANDOVER_S if self.is_whole else _TURN_S
        stack.enter_context(only_writer(directory, setting="data.dir", wait_s=wait_s))

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


def _locks_of_ranks(directory: str) -> list[Path]:
    return sorted(Path(directory).glob(f"{LOCK}-*-of-*"))


def share_of(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Share:
    """The share of this process: as given, or from the variables of torchrun or srun, or everything; ValueError
    for half of a share or a rank that is not below world_size.
    """
    given: dict[str, object] = {"--rank": rank, "--world_size": world_size}
    launcher = None
    if rank is None and world_size is None:
        launched = [name for name, (*two, _) in _LAUNCHERS.items() if all(environment.get(name) for name in two)]
        if not launched:
            return Share(0, 1)
        launcher = launched[0]
        given = {name: environment.get(name, "0") for name in _LAUNCHERS[launcher]}
    texts = list(map(str, given.values()))
    if all(map(str.isdecimal, texts)) and int(texts[0]) < int(texts[1]):
        return Share(int(texts[0]), int(texts[1]), int(texts[2]) if launcher else 0, launcher)
    raise ValueError(
        f"{' and '.join(f'{name} is {number}' for name, number in given.items())}, which is not a rank and a number of "
        "processes; pass both, with --rank from 0 to world_size - 1, such as --rank 0 --world_size 1 for everything"
    )


_WAIT = timedelta(days=365)
"""Longest wait for the leader's next job; torchrun ends the others if it dies."""


@contextmanager
def in_lockstep(pair: PairConfig) -> Iterator[bool]:
    """Yield True in the process that makes the data; the others follow it first. ValueError: it cannot be sliced."""
    if not (sliced := sliced_models(pair)):
        yield True
        return
    rank, num_slices = slices_of(f"pair.{sliced[0]}")
    for source in (pair.target, pair.draft):
        if source.tp_plan is not None:  # before the manifest is written
            check_slices(source, model_config(source), num_slices)
    join()
    if rank == 0:
        yield True
        _exchange(None)  # after an error torchrun ends the others
    else:
        _follow()
        yield False
    distributed.destroy_process_group()
    _group.cache_clear()


def begin(job: Job, specs: Sequence[ShardSpec]) -> None:
    """Start the job in the other processes too, if one of its models is sliced."""
    if job.is_sliced:
        _exchange((job, list(specs)))


def _follow() -> None:
    while (work := _exchange(None)) is not None:
        job, specs = work
        Worker(replace(job, writes=False)).run(specs, progress=lambda count: None, begins=lambda name: None)
        free_memory()  # the next job loads other models


def _exchange(work: tuple[Job, list[ShardSpec]] | None) -> tuple[Job, list[ShardSpec]] | None:
    """The leader's job, in every process; the argument of the others is ignored."""
    works = [work]
    distributed.broadcast_object_list(works, src=0, group=_group())
    return works[0]


@cache
def _group() -> distributed.ProcessGroup:
    """All processes, with a longer time-out than that of forwards."""
    return distributed.new_group(backend="gloo", timeout=_WAIT)
