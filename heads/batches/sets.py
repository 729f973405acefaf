"""Which set of prompts each response comes from, where there are several."""

import pyarrow.parquet as pq

from data_gen.store.rows import read_rows
from store.shards import list_shards


def sets_of(directory: str, split: str) -> list[list[str]]:
    """The set of each response of each shard of one split.

    Raises:
        ValueError: rows without sets, which were made from one.
    """
    paths = list_shards(directory, split)
    if "set" not in pq.read_schema(paths[0]).names:
        raise ValueError(
            f"{paths[0]} has no column set, and data.prompts of {directory} is a list of sets; make the data again"
        )
    return [read_rows(path, ("set",)).column("set").to_pylist() for path in paths]
