"""The order in which an epoch visits the data, and how processes share it.

Blocks of neighbouring responses are drawn at random into pools. Of each block, a long response stands beside a short one, these pairs are
shuffled, and the blocks of a pool take turns with a pair each: so batches have about equal numbers of tokens, and no more than a pool is in
memory, however large the data. The order is a function of (seed, epoch) and of the responses' lengths alone, so it is the same after every
restart, and for 1, 2, 4, 8 and 16 processes.

Processes share blocks, so that each block is read by one of them: those of a pool, from the longest to the shortest, go to ranks
0 1 … n-1 n-1 … 1 0 0 1 …, which gives each rank as many blocks and about as many tokens. A batch of all processes is cut from the order as
one process would cut it, and each takes what it has of it, at the ends of shards sometimes more or less than its part, or nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

BLOCK_SIZE = 16
"""Responses that are read in one run."""
POOL_SIZE = 16
"""Blocks that are shuffled together, and so in memory together."""


class Block(NamedTuple):
    """Responses start … stop - 1 of one shard."""

    shard: int
    start: int
    stop: int


class Item(NamedTuple):
    """One response: its block and its place in it."""

    block: Block
    place: int
    """From 0, within the block."""


class Share(NamedTuple):
    """Which process this is, of how many."""

    rank: int = 0
    world_size: int = 1

    def has(self, turn: int) -> bool:
        """Whether the block of this turn is this process's: ranks go up and down."""
        place = turn % (2 * self.world_size)
        return self.rank == min(place, 2 * self.world_size - 1 - place)


class Turn(NamedTuple):
    """One response, and the turn of its block, by which processes share blocks."""

    turn: int
    item: Item


def blocks(shard_sizes: Sequence[int]) -> list[Block]:
    """Every shard cut into runs of at most `BLOCK_SIZE` responses, in order."""
    return [
        Block(shard, start, min(start + BLOCK_SIZE, size)) for shard, size in enumerate(shard_sizes) for start in range(0, size, BLOCK_SIZE)
    ]


def in_order(shard_sizes: Sequence[int]) -> Iterator[Turn]:
    """Every response once, as stored."""
    return (Turn(turn, Item(block, p)) for turn, block in enumerate(blocks(shard_sizes)) for p in range(block.stop - block.start))


def shuffled(lengths: Sequence[Sequence[int]], world_size: int = 1, *, seed: int, epoch: int) -> Iterator[Turn]:
    """Every response once; `lengths` are the tokens of each response of each shard."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    all_blocks = blocks([len(shard) for shard in lengths])
    order = [all_blocks[i] for i in torch.randperm(len(all_blocks), generator=generator).tolist()]
    size = -(-POOL_SIZE // world_size) * world_size  # so that processes have equal shares of each pool
    for start in range(0, len(order), size):
        pool = {block: lengths[block.shard][block.start : block.stop] for block in order[start : start + size]}
        by_tokens = sorted(pool, key=lambda block: -sum(pool[block]))
        pairs = [_pairs(block, pool[block], generator) for block in by_tokens]
        for number in range(max(map(len, pairs))):
            yield from (Turn(turn, item) for turn, own in enumerate(pairs) for item in (own[number] if number < len(own) else []))


def batches(turns: Iterator[Turn], size: int, share: Share, *, first: int = 0) -> Iterator[list[Item]]:
    """Training: this process's part of each batch of `size` responses per process; the last batch may be smaller.

    Args:
        first: batches to pass over, after a restart.
    """
    for number, batch in enumerate(_chunks(turns, size * share.world_size)):
        if number >= first:
            yield [item for turn, item in batch if share.has(turn)]


def own_batches(turns: Iterator[Turn], size: int, share: Share) -> Iterator[list[Item]]:
    """Evaluation: batches of this process's blocks alone; an empty one if it has none, since every process has to take part."""
    found = False
    for batch in _chunks((turn for turn in turns if share.has(turn.turn)), size):
        found = True
        yield [item for _, item in batch]
    if not found:
        yield []


def num_batches(num_items: int, size: int, world_size: int = 1) -> int:
    """How many batches an epoch of training has."""
    return -(-num_items // (size * world_size))


def _pairs(block: Block, lengths: Sequence[int], generator: torch.Generator) -> list[list[Item]]:
    """The responses of a block, the longest with the shortest and so on, in random order."""
    places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    count = (len(places) + 1) // 2
    pairs = [[long, short] if long != short else [long] for long, short in zip(places[:count], reversed(places), strict=False)]
    return [[Item(block, place) for place in pairs[i]] for i in torch.randperm(count, generator=generator).tolist()]


def _chunks(turns: Iterator[Turn], size: int) -> Iterator[list[Turn]]:
    return iter(lambda: list(islice(turns, size)), [])
