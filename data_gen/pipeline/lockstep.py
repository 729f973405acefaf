"""Data by sliced models (`tp_plan`, under torchrun): every process holds a slice and runs the same forwards.

The first process, the leader, broadcasts each job with sliced models and its shards. The others make the same shards
from the same files and seeds, and write nothing. Every process gets the same logits, so all draw the same tokens and
run the same next forward. Jobs without sliced models run in the leader only.

torchrun's RANK and WORLD_SIZE count slices here. Shares of the data are set by --rank and --world_size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache

from torch import distributed

from configs.schema import PairConfig
from data_gen.pipeline.worker import Job, Worker
from data_gen.responses.exchange import ShardSpec
from lm import free_memory, load_config
from lm.parallel import check_slices, join, sliced_models, slices_of

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
            check_slices(source, load_config(source), num_slices)
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
        worker = Worker(replace(job, writes=False))
        for spec in specs:
            worker.make(spec, lambda count: None)
        del worker
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
