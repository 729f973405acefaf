"""Data by sliced models (`tp_plan`, under torchrun): the first process makes the data, the others hold their slices and
run the same forwards.

The leader does what one process does, and tells the others which job with sliced models it begins, on which shards.
They make the same shards from the same files and seeds, and write nothing. Logits come out of a forward alike in every
process, so that all of them draw the same tokens and go on to the same next forward. A job whose models are whole is
the leader's alone.

torchrun's RANK and WORLD_SIZE count slices here, not shares of the data: those are --rank and --world_size alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache

from torch import distributed

from configs.schema import PairConfig
from data_gen.pipeline.worker import Job, Worker, is_sliced
from data_gen.responses.conversation import ShardSpec
from lm import free_memory, load_config
from lm.parallel import check_slices, join, refuse_alone, sliced_models, slices_of

_WAIT = timedelta(days=365)
"""Longest wait for the leader's next word, which comes after stages that are its own; torchrun ends the others where it
dies.
"""


@contextmanager
def in_lockstep(pair: PairConfig) -> Iterator[bool]:
    """Yield True in the process that makes the data, and False in each that holds further slices, once it has followed
    to the end.

    Raises:
        ValueError: a model is to be sliced, and torchrun did not start this process, or it cannot be.
    """
    if not sliced_models(pair):
        yield True
        return
    refuse_alone(pair)
    slices = slices_of()
    assert slices is not None
    for source in (pair.target, pair.draft):
        if source.tp_plan is not None:  # before the manifest is settled
            check_slices(source, load_config(source), slices.num)
    join()
    is_leader = slices.rank == 0
    if not is_leader:
        _follow()
    yield is_leader
    if is_leader:
        _exchange(None)  # after an error torchrun ends the others, wherever they wait
    distributed.destroy_process_group()
    _group.cache_clear()


def begin(job: Job, specs: Sequence[ShardSpec]) -> None:
    """Let the other processes make these shards along, where a model of the job is sliced."""
    if is_sliced(job):
        _exchange((job, list(specs)))


def _follow() -> None:
    """Run the leader's jobs along until it says that there are no more."""
    while (word := _exchange(None)) is not None:
        job, specs = word
        worker = Worker(replace(job, writes=False))
        for spec in specs:
            worker.make(spec, lambda count: None)
        del worker
        free_memory()  # the next job loads models of its own


def _exchange(word: tuple[Job, list[ShardSpec]] | None) -> tuple[Job, list[ShardSpec]] | None:
    """The leader's word, in every process; what another passes is not looked at."""
    words = [word]
    distributed.broadcast_object_list(words, src=0, group=_group())
    return words[0]


@cache
def _group() -> distributed.ProcessGroup:
    """All processes, for words, which wait longer than a forward may."""
    return distributed.new_group(backend="gloo", timeout=_WAIT)
