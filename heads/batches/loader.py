"""Batches of features in the order of an epoch, read ahead by threads, resumable within an epoch.

1. Blocks of neighbouring responses are assigned to pools at random; only one pool is in memory.
2. In each block, long responses are paired with short ones and the pairs shuffled.
3. The blocks of a pool take turns, one pair each, so batches have about equal numbers of tokens.

The order depends only on (seed, epoch) and on the lengths of the responses, so it is the same after a restart and for
any number of processes. Each process takes an equal part of every batch; if a batch is small, a part can be empty.

Threads read ahead, and suffice because most of the time is a copy from the mapped file, which releases the GIL. A
loader's state counts the batches that the consumer has taken, not those read ahead. Lightning saves it in every
checkpoint and calls `sampler.set_epoch` before it takes the first batch; a resumed loader skips those batches unread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, islice, zip_longest
from typing import TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from data_gen.labels.states import StateTiming
from heads.batches.features import Batch, FeatureShard, Row, gathered

BLOCK_SIZE = 16
"""Responses that are read together."""
POOL_SIZE = 16
"""Blocks that are shuffled together."""
READ_AHEAD = 4
"""Batches that are read during a step, each by a thread."""
_CACHED_BLOCKS = 2 * POOL_SIZE + 1
"""Blocks whose labels are cached: batches that are read at the same time can come from two pools."""


Source = TypeVar("Source")
Result = TypeVar("Result")
Item = tuple[int, int]
"""Where a response is: its shard, and its row there."""


def stored_order(lengths: Sequence[Sequence[int]]) -> list[Item]:
    """Every response once, in stored order; `lengths` are the tokens of each response of each shard."""
    return [(shard, row) for shard, of_shard in enumerate(lengths) for row in range(len(of_shard))]


def shuffled(lengths: Sequence[Sequence[int]], *, seed: int, epoch: int) -> Iterator[Item]:
    """Every response once, in the order of an epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)

    def tokens(item: Item) -> int:
        shard, row = item
        return lengths[shard][row]

    def pairs(block: Sequence[Item]) -> list[list[Item]]:
        """The longest response with the shortest and so on; 9, 1, 5, 7 and 3 tokens: [9, 1], [7, 3], [5], shuffled."""
        by_tokens = sorted(block, key=tokens, reverse=True)
        count = (len(block) + 1) // 2
        paired = [list(dict.fromkeys(pair)) for pair in zip(by_tokens[:count], reversed(by_tokens), strict=False)]
        return [paired[i] for i in torch.randperm(count, generator=generator).tolist()]

    blocks = [
        [(shard, row) for row in range(start, min(start + BLOCK_SIZE, len(of_shard)))]
        for shard, of_shard in enumerate(lengths)
        for start in range(0, len(of_shard), BLOCK_SIZE)
    ]
    order = [blocks[i] for i in torch.randperm(len(blocks), generator=generator).tolist()]
    for start in range(0, len(order), POOL_SIZE):
        pool = sorted(order[start : start + POOL_SIZE], key=lambda block: sum(map(tokens, block)), reverse=True)
        for turns in zip_longest(*map(pairs, pool), fillvalue=()):
            yield from chain.from_iterable(turns)


def batches(
    items: Iterable[Item], size: int, *, rank: int = 0, world_size: int = 1, first: int = 0
) -> Iterator[list[Item]]:
    """The part of process `rank` of each batch of `size` responses, from batch `first` on; the last may be smaller."""
    remaining = iter(items)
    for batch in islice(iter(lambda: list(islice(remaining, size)), []), first, None):
        part = -(-len(batch) // world_size)
        yield batch[rank * part : (rank + 1) * part]


Rows = dict[StateTiming, list[Row]]
"""Timing of hidden states -> some rows."""


def block_reader(shards: Sequence[FeatureShard]) -> Callable[[Sequence[Item]], Rows]:
    """A thread-safe function that reads the rows of some responses; labels are read by block and cached."""

    @lru_cache(_CACHED_BLOCKS)
    def block_rows(shard: int, block: int) -> Rows:
        return shards[shard].read(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)

    def row_of(item: Item, timing: StateTiming) -> Row:
        shard, row = item
        return block_rows(shard, row // BLOCK_SIZE)[timing][row % BLOCK_SIZE]

    def read(items: Sequence[Item]) -> Rows:
        rows = {timing: [row_of(item, timing) for item in items] for timing in shards[0].states}
        if not items:  # a row without tokens has the shapes and dtypes of the others
            first = next((number, 0) for number, shard in enumerate(shards) if shard.lengths)
            rows = {timing: [row_of(first, timing).without_tokens()] for timing in rows}
        return rows

    return read


def stored_features(rows: Rows) -> Batch:
    """The features of rows whose hidden states are stored, in page-locked memory if there is a GPU."""
    batch: Batch = {timing: gathered(of_timing) for timing, of_timing in rows.items()}
    if not torch.cuda.is_available():
        return batch
    return apply_to_collection(batch, torch.Tensor, torch.Tensor.pin_memory)  # type: ignore[no-any-return]


class BatchLoader:
    """An iterable of batches, which Lightning accepts instead of a DataLoader."""

    def __init__(
        self,
        read: Callable[[Sequence[Item]], Rows],
        lengths: Sequence[Sequence[int]],
        *,
        batch_size: int,
        seed: int | None,
        process: tuple[int, int] = (0, 1),
        features: Callable[[Rows], Batch] | None = None,
        is_included: Callable[[Item], bool] = lambda item: True,
    ) -> None:
        """Args:
        read: reads the rows of some responses; must be thread-safe.
        lengths: the tokens of each response of each shard.
        batch_size: responses per batch, summed over processes.
        seed: seed of the order; None: stored order in every epoch.
        process: its rank, and the number of processes.
        features: makes a batch of rows when it is taken, in the consumer's thread; None: `stored_features` makes it
            ahead, in a thread that reads.
        is_included: filter of responses, only without a seed.
        """
        self.read = read
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.features = features
        self.process = process
        self.items = list(filter(is_included, stored_order(lengths)))
        self.sampler = self  # Lightning calls sampler.set_epoch
        self.batch_sampler = None
        self.epoch = 0
        self._taken = 0
        self._resume: dict[str, int] | None = None

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of its responses, drafted or not."""
        return sum(self.lengths[shard][row] for shard, row in self.items)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order depends; Lightning calls this before each."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume after the batches that were taken, if the next epoch is the interrupted one."""
        self._resume = dict(state)

    def __iter__(self) -> Iterator[Batch]:
        # in a generator this runs when the first batch is taken, after set_epoch
        resume = self._resume
        self._resume = None
        self._taken = resume["taken"] if resume and resume["epoch"] == self.epoch and resume["taken"] < len(self) else 0
        order = self.items if self.seed is None else shuffled(self.lengths, seed=self.seed, epoch=self.epoch)
        rank, world_size = self.process
        parts = batches(order, self.batch_size, rank=rank, world_size=world_size, first=self._taken)
        if self.features is None:
            ready = read_ahead(lambda items: stored_features(self.read(items)), parts, READ_AHEAD)
        else:
            ready = map(self.features, read_ahead(self.read, parts, READ_AHEAD))
        for batch in ready:
            self._taken += 1  # before the yield, since a checkpoint is written while the consumer has the batch
            yield batch


def read_ahead(read: Callable[[Source], Result], source: Iterator[Source], depth: int) -> Iterator[Result]:
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
