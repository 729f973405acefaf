"""Batches of features in the order of an epoch, read ahead by threads, resumable within an epoch.

1. Blocks of neighbouring responses are assigned to pools at random; only one pool is in memory.
2. In each block, long responses are paired with short ones and the pairs shuffled.
3. The blocks of a pool take turns, one pair each, so batches have about equal numbers of tokens.

The order depends only on (seed, epoch) and on the lengths of the responses, so it is the same after a restart and for
any number of processes.

Each block is read by one process. Blocks of a pool, from the longest to the shortest, go to ranks 0 1 … n-1 n-1 … 1 0 0
1 …: 1, 2, 4, 8 or 16 ranks get equally many blocks and about as many tokens each; the last of 3 gets a fifth more. If
there are more processes than blocks in a pool, they also share the pairs of each block. Each process takes its part of
every batch, which can be larger or smaller than average, or empty.

Threads read ahead, and suffice because most of the time is a copy from the mapped file, which releases the GIL. A
loader's state counts the batches that the consumer has taken, not those read ahead. Lightning saves it in every
checkpoint and calls `sampler.set_epoch` before it takes the first batch; a resumed loader skips those batches unread.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from heads.batches.features import Batch, FeatureShard, Row, gathered

BLOCK_SIZE = 16
"""Responses that are read together."""
POOL_SIZE = 16
"""Blocks that are shuffled together."""
READ_AHEAD = 4
"""Batches that are read during a step, each by a thread."""
_CACHED_BLOCKS = 2 * POOL_SIZE + 1
"""Blocks whose labels are cached: batches that are read at the same time can come from two pools."""


class Block(NamedTuple):
    """Responses start … stop - 1 of one shard."""

    shard: int
    start: int
    stop: int


class Item(NamedTuple):
    """One response, and the two numbers by which processes share responses."""

    block: Block
    offset: int
    """Index within the block."""
    turn: int
    """Index of the block within its pool."""
    pair: int = 0
    """Index of its pair within the block."""


class Share(NamedTuple):
    """The rank of this process and the number of processes."""

    rank: int = 0
    world_size: int = 1

    def has(self, item: Item) -> bool:
        """Whether this process reads a response: slots are dealt to ranks 0 … n-1 and then n-1 … 0.

        40 processes and pools of 16 blocks: pairs 0, 3, 6 of the blocks have slots 0 … 15, pairs 1, 4, 7 have 16 … 31,
        pairs 2, 5 have 32 … 47; slots 40 … 47 go to ranks 39 … 32.
        """
        parts = -(-self.world_size // POOL_SIZE)
        slot = (item.turn + POOL_SIZE * (item.pair % parts)) % (2 * self.world_size)
        return self.rank == min(slot, 2 * self.world_size - 1 - slot)


def blocks(shard_sizes: Sequence[int]) -> list[Block]:
    """Every shard cut into blocks of at most `BLOCK_SIZE` responses, in order."""
    return [
        Block(shard, start, min(start + BLOCK_SIZE, size))
        for shard, size in enumerate(shard_sizes)
        for start in range(0, size, BLOCK_SIZE)
    ]


def in_order(shard_sizes: Sequence[int]) -> Iterator[Item]:
    """Every response once, in stored order."""
    turns = enumerate(blocks(shard_sizes))
    return (Item(block, offset, turn) for turn, block in turns for offset in range(block.stop - block.start))


def shuffled(lengths: Sequence[Sequence[int]], *, seed: int, epoch: int) -> Iterator[Item]:
    """Every response once, in the order of an epoch; `lengths` are the tokens of each response of each shard."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    all_blocks = blocks([len(shard) for shard in lengths])
    order = [all_blocks[i] for i in torch.randperm(len(all_blocks), generator=generator).tolist()]
    for start in range(0, len(order), POOL_SIZE):
        pool = {block: lengths[block.shard][block.start : block.stop] for block in order[start : start + POOL_SIZE]}
        by_tokens = sorted(pool, key=lambda block: -sum(pool[block]))
        pairs = [_pairs(pool[block], generator) for block in by_tokens]
        for number, round_of_turns in enumerate(zip_longest(*pairs, fillvalue=())):
            for turn, offsets in enumerate(round_of_turns):
                yield from (Item(by_tokens[turn], offset, turn, number) for offset in offsets)


def batches(items: Iterator[Item], size: int, share: Share, *, first: int = 0) -> Iterator[list[Item]]:
    """This process's part of each training batch of `size` responses; the last batch may be smaller. The first `first`
    batches are skipped.
    """
    return (list(filter(share.has, batch)) for batch in islice(_chunks(items, size), first, None))


def evaluation_batches(items: Iterator[Item], size: int, share: Share) -> Iterator[list[Item]]:
    """Batches of this process's blocks, each its share of `size` responses.

    A process without blocks has one empty batch, because every process must take part.
    """
    of_process = _chunks(filter(share.has, items), max(1, size // share.world_size))
    yield next(of_process, [])
    yield from of_process


def _pairs(lengths: Sequence[int], generator: torch.Generator) -> list[list[int]]:
    """Indices of a block's responses, the longest with the shortest and so on, in random order: five responses of 9, 1,
    5, 7 and 3 tokens give [0, 1], [3, 4] and [2].
    """
    indices = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    count = (len(indices) + 1) // 2
    pairs = [list(dict.fromkeys(pair)) for pair in zip(indices[:count], reversed(indices), strict=False)]
    return [pairs[i] for i in torch.randperm(count, generator=generator).tolist()]


def _chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    return iter(lambda: list(islice(items, size)), [])


def block_reader(shards: Sequence[FeatureShard]) -> Callable[[Sequence[Item]], Batch | dict[str, list[Row]]]:
    """A thread-safe function that reads the features of some responses, into page-locked memory if there is a GPU; or
    their rows, if the draft computes the hidden states.

    Labels are read by block and cached; hidden states are copied from the mapped file into the batch.
    """

    @lru_cache(_CACHED_BLOCKS)
    def block_rows(block: Block) -> dict[str, list[list[Row]]]:
        return shards[block.shard].read(block.start, block.stop)

    def read(items: Sequence[Item]) -> Batch | dict[str, list[Row]]:
        batch = {}
        parts = {
            timing: [row for item in items for row in block_rows(item.block)[timing][item.offset]]
            for timing in shards[0].states
        }
        if shards[0].texts:
            return parts
        for timing, rows in parts.items():
            some = rows or next(shard for shard in shards if shard.row_lengths).read(0, 1)[timing][0]
            features = gathered(some)
            batch[timing] = features if rows else apply_to_collection(features, torch.Tensor, lambda values: values[:0])
        if not torch.cuda.is_available():
            return batch
        return apply_to_collection(batch, torch.Tensor, torch.Tensor.pin_memory)  # type: ignore[no-any-return]

    return read


class BatchLoader:
    """An iterable of batches, which Lightning accepts instead of a DataLoader."""

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
        return sum(1 for _ in self._order()) if self.seed is None else -(-self.num_items // self.batch_size)

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
            included = filter(self.is_included or (lambda item: True), in_order(list(map(len, self.lengths))))
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
