"""The order in which an epoch visits the data: blocks of neighbouring responses shuffled, then responses within a pool of blocks.

A response is read with its block, in one run of the file, and no more than a pool is in memory, however large the data. The order is a
function of (seed, epoch) and of the sizes of the shards alone, so it is the same on every process and after every restart.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


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


def blocks(shard_sizes: Sequence[int], block_size: int) -> list[Block]:
    """Every shard cut into runs of at most `block_size` responses, in order."""
    return [
        Block(shard, start, min(start + block_size, size)) for shard, size in enumerate(shard_sizes) for start in range(0, size, block_size)
    ]


def in_order(all_blocks: Sequence[Block]) -> Iterator[Item]:
    """Every response once, as stored."""
    return (Item(block, place) for block in all_blocks for place in range(block.stop - block.start))


def shuffled(all_blocks: Sequence[Block], pool_size: int, *, seed: int, epoch: int) -> Iterator[Item]:
    """Every response once; responses are shuffled over pools of `pool_size` blocks, which are themselves drawn at random."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(all_blocks), generator=generator).tolist()
    for start in range(0, len(order), pool_size):
        pool = list(in_order([all_blocks[i] for i in order[start : start + pool_size]]))
        yield from (pool[i] for i in torch.randperm(len(pool), generator=generator).tolist())


def batches(items: Iterator[Item], size: int, *, rank: int = 0, world_size: int = 1, first: int = 0) -> Iterator[list[Item]]:
    """This process's share of each batch of `size` responses per process; the last batch may be smaller.

    Processes get equal shares: a last batch that does not divide is filled up with its own first responses.

    Args:
        first: batches to pass over, after a restart.
    """
    for number, batch in enumerate(_chunks(items, size * world_size)):
        if number >= first:
            filled = batch + [batch[i % len(batch)] for i in range(-len(batch) % world_size)]
            yield filled[rank::world_size]


def num_batches(num_items: int, size: int, world_size: int = 1) -> int:
    """How many batches an epoch has."""
    return -(-num_items // (size * world_size))


def _chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
