"""Batches of cached features, read ahead of the training step by a thread, resumable in the middle of an epoch.

`state_dict` counts the batches that the consumer has taken, not those read ahead: the same number in every process.
Lightning saves it in every checkpoint, and announces the epoch through `sampler.set_epoch` before it takes the first
batch; a resumed loader passes over what was taken, by the order alone, unread.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from heads.batches.features import Batch, Features, FeatureShard, join, none_of
from heads.batches.order import (
    POOL_SIZE,
    Block,
    Item,
    Share,
    Turn,
    batches,
    in_order,
    num_batches,
    own_batches,
    shuffled,
)

READ_AHEAD = 4
"""Batches made ready while the step runs."""
ALONE = Share()


class BlockReader:
    """Responses of several timings, cached block by block: of the last `POOL_SIZE` + 1 blocks, which is more than a
    process has of a pool.

    With several mixings per response, a response has that many neighbouring rows in a fed-time shard.
    """

    def __init__(self, shards: Mapping[str, Sequence[FeatureShard]], rows_per_item: dict[str, int]) -> None:
        self.shards, self.rows_per_item = shards, rows_per_item
        self._cache: OrderedDict[Block, dict[str, list[Features]]] = OrderedDict()

    def batch(self, items: Sequence[Item]) -> Batch:
        """The features of some responses, timing by timing."""
        if not items:
            return {timing: none_of(shards[0]) for timing, shards in self.shards.items()}
        rows: dict[str, list[Features]] = {timing: [] for timing in self.shards}
        for item in items:
            for timing, block in self._block(item.block).items():
                times = self.rows_per_item[timing]
                rows[timing] += block[item.place * times : (item.place + 1) * times]
        return {timing: join(parts) for timing, parts in rows.items()}

    def _block(self, block: Block) -> dict[str, list[Features]]:
        if block not in self._cache:
            while len(self._cache) > POOL_SIZE:
                self._cache.popitem(last=False)
            self._cache[block] = {
                timing: shards[block.shard].read(
                    block.start * self.rows_per_item[timing], block.stop * self.rows_per_item[timing]
                )
                for timing, shards in self.shards.items()
            }
        self._cache.move_to_end(block)
        return self._cache[block]


class BatchLoader:
    """An iterable of batches, as Lightning takes it in place of a DataLoader."""

    def __init__(
        self,
        read: Callable[[Sequence[Item]], Any],
        lengths: Sequence[Sequence[int]],
        *,
        batch_size: int,
        seed: int | None,
        share: Share = ALONE,
        chosen: Callable[[Item], bool] | None = None,
    ) -> None:
        """Args:
        read: makes a batch of some responses; called in a thread.
        lengths: tokens of each response of each shard.
        batch_size: responses per batch, of all processes together.
        seed: of the order; None: as stored, every epoch alike, each process its own blocks.
        share: of the processes that read the data together.
        chosen: leave out all other responses; only without a seed.
        """
        self.read, self.lengths, self.batch_size, self.seed, self.share = read, lengths, batch_size, seed, share
        self.chosen = chosen
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
        for batch in read_ahead(map(self.read, self._order()), READ_AHEAD):
            self._taken += 1  # before the consumer has it, since a checkpoint is written while it works on it
            yield batch

    def _order(self) -> Iterator[list[Item]]:
        """The batches of the epoch, from `_taken` on."""
        if self.seed is None:
            turns = in_order(list(map(len, self.lengths)))
            return own_batches(filter(self._is_chosen, turns), self.batch_size, self.share)
        turns = shuffled(self.lengths, seed=self.seed, epoch=self.epoch)
        return batches(turns, self.batch_size, self.share, first=self._taken)

    def _is_chosen(self, turn: Turn) -> bool:
        return self.chosen is None or self.chosen(turn.item)


def read_ahead(source: Iterator[Any], depth: int) -> Iterator[Any]:
    """The same elements, with up to `depth` of them made ready by a thread; what it raises is raised here."""
    end = object()
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        ready = deque(thread.submit(next, source, end) for _ in range(depth))
        while (element := ready.popleft().result()) is not end:
            ready.append(thread.submit(next, source, end))
            yield element
    finally:
        thread.shutdown(cancel_futures=True)


def pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory where there is a GPU, so that copies to it overlap with its work."""
    if not torch.cuda.is_available():
        return batch
    return apply_to_collection(batch, torch.Tensor, torch.Tensor.pin_memory)  # type: ignore[no-any-return]
