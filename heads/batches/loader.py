"""Batches of cached features, read ahead of the training step by threads, resumable in the middle of an epoch.

Each thread makes a batch of its own, and batches are handed on in the order of the epoch, whichever is ready first: so
nothing but the order, which is drawn without reading, decides what is in a batch. Threads do, because what takes time
is a copy out of the file's pages, during which Python's lock is free.

`state_dict` counts the batches that the consumer has taken, not those read ahead: the same number in every process.
Lightning saves it in every checkpoint, and announces the epoch through `sampler.set_epoch` before it takes the first
batch; a resumed loader passes over what was taken, by the order alone, unread.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from heads.batches.features import Batch, FeatureShard, Row, gathered, none_of
from heads.batches.order import (
    POOL_SIZE,
    Block,
    Item,
    Share,
    batches,
    in_order,
    num_batches,
    own_batches,
    shuffled,
)

READ_AHEAD = 4
"""Batches made ready while the step runs, each by a thread."""
_BLOCKS_KEPT = 2 * POOL_SIZE + 1
"""Blocks of which labels are kept: batches that are made at once can come from two pools."""


def block_reader(
    shards: Mapping[str, Sequence[FeatureShard]], rows_per_item: Mapping[str, int]
) -> Callable[[Sequence[Item]], Batch]:
    """A function that reads the features of some responses, in page-locked memory where there is a GPU, so that copies
    to it overlap with its work; threads may call it at once.

    Labels are read block by block and kept for a while; hidden states are copied from the mapped file into the batch.
    With several mixings per response, a response has that many neighbouring rows in a fed-time shard.
    """

    @lru_cache(_BLOCKS_KEPT)
    def block_rows(block: Block) -> dict[str, list[Row]]:
        return {
            timing: of_timing[block.shard].read(block.start * rows_per_item[timing], block.stop * rows_per_item[timing])
            for timing, of_timing in shards.items()
        }

    def read(items: Sequence[Item]) -> Batch:
        rows: dict[str, list[Row]] = {timing: [] for timing in shards}
        for item in items:
            for timing, block in block_rows(item.block).items():
                times = rows_per_item[timing]
                rows[timing] += block[item.place * times : (item.place + 1) * times]
        batch = {timing: gathered(parts) if parts else none_of(shards[timing]) for timing, parts in rows.items()}
        if not torch.cuda.is_available():
            return batch
        return apply_to_collection(batch, torch.Tensor, torch.Tensor.pin_memory)  # type: ignore[no-any-return]

    return read


class BatchLoader:
    """An iterable of batches, as Lightning takes it in place of a DataLoader."""

    def __init__(
        self,
        read: Callable[[Sequence[Item]], Any],
        lengths: Sequence[Sequence[int]],
        *,
        batch_size: int,
        seed: int | None,
        share: Share | None = None,
        chosen: Callable[[Item], bool] | None = None,
    ) -> None:
        """Args:
        read: a function that makes a batch of some responses; called in several threads at once.
        lengths: the tokens of each response of each shard.
        batch_size: responses per batch, of all processes together.
        seed: the seed of the order; None: as stored, every epoch alike, each process its own blocks.
        share: this process's part of the data; None: all of it.
        chosen: whether a response is read; None: all are. Only without a seed.
        """
        self.read, self.lengths, self.batch_size, self.seed = read, lengths, batch_size, seed
        self.share, self.chosen = share or Share(), chosen
        self.num_items = sum(map(len, lengths))
        self.sampler, self.batch_sampler = self, None  # where Lightning looks for set_epoch
        self.epoch, self._taken = 0, 0
        self._resume: dict[str, int] | None = None

    def __len__(self) -> int:
        if self.seed is None:
            return sum(1 for _ in self._order())
        return num_batches(self.num_items, self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Lightning's call before an epoch; the order depends on it."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Position of the consumer."""
        return {"epoch": self.epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that were taken, if the next epoch to be asked for is the one that was
        interrupted.
        """
        self._resume = dict(state)

    def __iter__(self) -> Iterator[Any]:
        # A generator: its first line runs when the first batch is taken, after set_epoch.
        resume, self._resume = self._resume, None
        self._taken = resume["taken"] if resume and resume["epoch"] == self.epoch and resume["taken"] < len(self) else 0
        for batch in read_ahead(self.read, self._order(), READ_AHEAD):
            self._taken += 1  # before the consumer has it, since a checkpoint is written while it works on it
            yield batch

    def _order(self) -> Iterator[list[Item]]:
        """The batches of the epoch, from `_taken` on."""
        if self.seed is None:
            # without a predicate `filter` keeps every response
            chosen = filter(self.chosen, in_order(list(map(len, self.lengths))))
            return own_batches(chosen, self.batch_size, self.share)
        items = shuffled(self.lengths, seed=self.seed, epoch=self.epoch)
        return batches(items, self.batch_size, self.share, first=self._taken)


def read_ahead(read: Callable[[Any], Any], source: Iterator[Any], depth: int) -> Iterator[Any]:
    """What `read` makes of each element, in order, with up to `depth` made ready by as many threads; what it raises is
    raised here.
    """
    threads = ThreadPoolExecutor(depth, thread_name_prefix="read-ahead")
    try:
        ready = deque(threads.submit(read, element) for element in islice(source, depth))
        while ready:
            made = ready.popleft().result()
            ready.extend(threads.submit(read, element) for element in islice(source, 1))
            yield made
    finally:
        threads.shutdown(cancel_futures=True)
