"""Batches of cached features, read ahead by threads, resumable within an epoch.

Batches are returned in the order of the epoch, whichever thread finishes first. Threads suffice because most of the
time is a copy from the mapped file, which releases the GIL.

`state_dict` counts the batches that the consumer has taken, not those read ahead; the number is the same in every
process. Lightning saves it in every checkpoint and calls `sampler.set_epoch` before it takes the first batch. A resumed
loader skips those batches without reading them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from heads.batches.features import Batch, FeatureShard, Row, empty_features, gathered
from heads.batches.order import (
    POOL_SIZE,
    Block,
    Item,
    Share,
    batches,
    evaluation_batches,
    in_order,
    num_batches,
    shuffled,
)

READ_AHEAD = 4
"""Batches that are read during a step, each by a thread."""
_CACHED_BLOCKS = 2 * POOL_SIZE + 1
"""Blocks whose labels are cached: batches that are read at the same time can come from two pools."""


def block_reader(shards: Sequence[FeatureShard]) -> Callable[[Sequence[Item]], Batch]:
    """A thread-safe function that reads the features of some responses, into page-locked memory if there is a GPU.

    Labels are read by block and cached; hidden states are copied from the mapped file into the batch.
    """

    @lru_cache(_CACHED_BLOCKS)
    def block_rows(block: Block) -> dict[str, list[list[Row]]]:
        return shards[block.shard].read(block.start, block.stop)

    def read(items: Sequence[Item]) -> Batch:
        batch = {}
        for timing in shards[0].states:
            rows = [row for item in items for row in block_rows(item.block)[timing][item.offset]]
            batch[timing] = gathered(rows) if rows else empty_features(shards, timing)
        if not torch.cuda.is_available():
            return batch
        return apply_to_collection(batch, torch.Tensor, torch.Tensor.pin_memory)  # type: ignore[no-any-return]

    return read


class BatchLoader:
    """An iterable of batches, which Lightning accepts in place of a DataLoader."""

    def __init__(
        self,
        read: Callable[[Sequence[Item]], Any],
        lengths: Sequence[Sequence[int]],
        *,
        batch_size: int,
        seed: int | None,
        share: Share | None = None,
        is_included: Callable[[Item], bool] | None = None,
    ) -> None:
        """Args:
        read: makes a batch of some responses; must be thread-safe.
        lengths: the tokens of each response of each shard.
        batch_size: responses per batch, summed over processes.
        seed: seed of the order; None: stored order in every epoch, each process its own blocks.
        share: this process's part of the data; None: all of it.
        is_included: filter of responses, only without a seed; None: all responses.
        """
        self.read, self.lengths, self.batch_size, self.seed = read, lengths, batch_size, seed
        self.share, self.is_included = share or Share(), is_included
        self.num_items = sum(map(len, lengths))
        self.sampler, self.batch_sampler = self, None  # Lightning calls sampler.set_epoch
        self.epoch, self._taken = 0, 0
        self._resume: dict[str, int] | None = None

    def __len__(self) -> int:
        if self.seed is None:
            return sum(1 for _ in self._order())
        return num_batches(self.num_items, self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order depends; Lightning calls this before each."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume after the batches that were taken, if the next epoch is the interrupted one."""
        self._resume = dict(state)

    def __iter__(self) -> Iterator[Any]:
        # in a generator this runs when the first batch is taken, after set_epoch
        resume, self._resume = self._resume, None
        self._taken = resume["taken"] if resume and resume["epoch"] == self.epoch and resume["taken"] < len(self) else 0
        for batch in read_ahead(self.read, self._order(), READ_AHEAD):
            self._taken += 1  # before the yield, since a checkpoint is written while the consumer has the batch
            yield batch

    def _order(self) -> Iterator[list[Item]]:
        """The batches of the epoch, from `_taken` on."""
        if self.seed is None:
            # without a predicate `filter` keeps every response
            included = filter(self.is_included, in_order(list(map(len, self.lengths))))
            return evaluation_batches(included, self.batch_size, self.share)
        items = shuffled(self.lengths, seed=self.seed, epoch=self.epoch)
        return batches(items, self.batch_size, self.share, first=self._taken)


def read_ahead(read: Callable[[Any], Any], source: Iterator[Any], depth: int) -> Iterator[Any]:
    """`map(read, source)`, with up to `depth` results computed ahead by as many threads."""
    threads = ThreadPoolExecutor(depth, thread_name_prefix="read-ahead")
    try:
        ready = deque(threads.submit(read, element) for element in islice(source, depth))
        while ready:
            result = ready.popleft().result()
            ready.extend(threads.submit(read, element) for element in islice(source, 1))
            yield result
    finally:
        threads.shutdown(cancel_futures=True)
