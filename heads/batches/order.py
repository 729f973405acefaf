"""The order in which an epoch visits the data, and how processes share it.

Blocks of neighbouring responses are drawn at random into pools. Of each block, a long response stands beside a short
one, these pairs are shuffled, and the blocks of a pool take turns with a pair each: so batches have about equal numbers
of tokens, and no more than a pool is in memory, however large the data. The order is a function of (seed, epoch) and of
the responses' lengths alone, so it is the same after every restart, and for any number of processes.

Processes share blocks, so that each block is read by one of them: those of a pool, from the longest to the shortest, go
to ranks 0 1 … n-1 n-1 … 1 0 0 1 …, which gives each of 1, 2, 4, 8 or 16 ranks as many blocks and about as many tokens,
and of 3 a fifth more to the last one than to the others. More processes than a pool has blocks share the pairs of each
block as well. A batch is cut from the order as one process would cut it, and each process takes what it has of it, at
the ends of shards sometimes more or less than its part, or nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
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
    """One response, and the two numbers by which processes share responses."""

    block: Block
    place: int
    """Index from 0 within the block."""
    turn: int
    """Number of its block among those that take turns."""
    pair: int = 0
    """Number of its pair within the block."""


class Share(NamedTuple):
    """Number of this process, and of all of them."""

    rank: int = 0
    world_size: int = 1

    def has(self, item: Item) -> bool:
        """Whether a response is this process's: ranks go up and down.

        40 processes and pools of 16 blocks: pairs 0, 3, 6 of the blocks have places 0 … 15, pairs 1, 4, 7 have 16 … 31,
        pairs 2, 5 have 32 … 47; places 40 … 47 go to ranks 39 … 32.
        """
        parts = -(-self.world_size // POOL_SIZE)
        place = (item.turn + POOL_SIZE * (item.pair % parts)) % (2 * self.world_size)
        return self.rank == min(place, 2 * self.world_size - 1 - place)


def blocks(shard_sizes: Sequence[int]) -> list[Block]:
    """Every shard cut into runs of at most `BLOCK_SIZE` responses, in order."""
    return [
        Block(shard, start, min(start + BLOCK_SIZE, size))
        for shard, size in enumerate(shard_sizes)
        for start in range(0, size, BLOCK_SIZE)
    ]


def in_order(shard_sizes: Sequence[int]) -> Iterator[Item]:
    """Every response once, in the order in which it is stored."""
    return (
        Item(block, place, turn)
        for turn, block in enumerate(blocks(shard_sizes))
        for place in range(block.stop - block.start)
    )


def shuffled(lengths: Sequence[Sequence[int]], *, seed: int, epoch: int) -> Iterator[Item]:
    """Every response once; `lengths` are the tokens of each response of each shard."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    all_blocks = blocks([len(shard) for shard in lengths])
    order = [all_blocks[i] for i in torch.randperm(len(all_blocks), generator=generator).tolist()]
    for start in range(0, len(order), POOL_SIZE):
        pool = {block: lengths[block.shard][block.start : block.stop] for block in order[start : start + POOL_SIZE]}
        by_tokens = sorted(pool, key=lambda block: -sum(pool[block]))
        pairs = [_pairs(pool[block], generator) for block in by_tokens]
        for number, round_of_turns in enumerate(zip_longest(*pairs, fillvalue=())):
            for turn, places in enumerate(round_of_turns):
                yield from (Item(by_tokens[turn], place, turn, number) for place in places)


def batches(items: Iterator[Item], size: int, share: Share, *, first: int = 0) -> Iterator[list[Item]]:
    """Training: this process's part of each batch of `size` responses of all processes together; the last batch may be
    smaller. The `first` batches are passed over, as a restart needs.
    """
    return (list(filter(share.has, batch)) for batch in islice(_chunks(items, size), first, None))


def own_batches(items: Iterator[Item], size: int, share: Share) -> Iterator[list[Item]]:
    """Evaluation: batches of this process's blocks alone, of its part of `size` responses each.

    A process that has no block has an empty batch, since every process has to take part.
    """
    of_process = _chunks(filter(share.has, items), max(1, size // share.world_size))
    yield next(of_process, [])
    yield from of_process


def num_batches(num_items: int, size: int) -> int:
    """How many batches an epoch of training has."""
    return -(-num_items // size)


def _pairs(lengths: Sequence[int], generator: torch.Generator) -> list[list[int]]:
    """The places of a block's responses, the longest with the shortest and so on, in random order: five responses of
    9, 1, 5, 7 and 3 tokens make [0, 1], [3, 4] and [2].
    """
    places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    count = (len(places) + 1) // 2
    pairs = [
        [long, short] if long != short else [long]
        for long, short in zip(places[:count], reversed(places), strict=False)
    ]
    return [pairs[i] for i in torch.randperm(count, generator=generator).tolist()]


def _chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    return iter(lambda: list(islice(items, size)), [])
