"""The order in which an epoch visits the data, and how processes share it.

1. Blocks of neighbouring responses are assigned to pools at random; only one pool is in memory.
2. In each block, long responses are paired with short ones and the pairs shuffled.
3. The blocks of a pool take turns, one pair each, so batches have about equal numbers of tokens.

The order depends only on (seed, epoch) and on the lengths of the responses, so it is the same after a restart and for
any number of processes.

Each block is read by one process. Blocks of a pool, from the longest to the shortest, go to ranks 0 1 … n-1 n-1 … 1 0 0
1 …: 1, 2, 4, 8 or 16 ranks get equally many blocks and about as many tokens each; the last of 3 gets a fifth more. If
there are more processes than blocks in a pool, they also share the pairs of each block. Each process takes its part of
every batch, which can be larger or smaller than average, or empty.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import torch

BLOCK_SIZE = 16
"""Responses that are read together."""
POOL_SIZE = 16
"""Blocks that are shuffled together."""


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
    return (
        Item(block, offset, turn)
        for turn, block in enumerate(blocks(shard_sizes))
        for offset in range(block.stop - block.start)
    )


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


def num_batches(num_items: int, size: int) -> int:
    """Number of training batches in an epoch."""
    return -(-num_items // size)


def _pairs(lengths: Sequence[int], generator: torch.Generator) -> list[list[int]]:
    """Indices of a block's responses, the longest with the shortest and so on, in random order: five responses of 9, 1,
    5, 7 and 3 tokens give [0, 1], [3, 4] and [2].
    """
    indices = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    count = (len(indices) + 1) // 2
    pairs = [
        [long, short] if long != short else [long]
        for long, short in zip(indices[:count], reversed(indices), strict=False)
    ]
    return [pairs[i] for i in torch.randperm(count, generator=generator).tolist()]


def _chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    return iter(lambda: list(islice(items, size)), [])
