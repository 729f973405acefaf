"""`acceptance-heads responses`: the responses of finished rows as a file, so that the dear part of data is made once.

With `data.source file` and `data.responses FILE` another run labels them anew: for another draft, another
`mixing_ratio`, other timings, or another `Sampling` of the labels, over the positions of these responses. No target
writes anything then; it only labels.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.paths import local_path
from configs.schema import Config
from data_gen.prompts.prompt import json_lines
from data_gen.prompts.splits import SPLITS
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import read_rows
from store.progress import Bar
from store.shards import atomic_file, is_whole
from store.sums import check_sums

_COLUMNS = ("id", "prompt_ids", "response_ids", "finish_reason")


def responses(config: Config, *, out: str) -> None:
    """Write the responses of the rows in data.dir as JSONL for `data.source file`; a file that is there gets what it
    lacks, at its end.

    Args:
        config: the experiment that made the rows.
        out: the path of the JSONL file.

    Raises:
        ValueError: `out` holds another response to a row's prompt, or a shard is damaged.
    """
    path = local_path(out, "--out")
    read_manifest(config.data.dir)
    written = _hashes_in(path)
    num_added = 0
    with atomic_file(path) as file:
        if written:
            with path.open("rb") as old:
                shutil.copyfileobj(old, file)
        for record in _records(config.data.dir):
            known = written.get(record["id"])
            if known is None:
                file.write(json.dumps(record).encode() + b"\n")
                num_added += 1
            elif known != _hash(record):
                raise ValueError(
                    f"{path} holds another response to {record['id']} than the rows in {config.data.dir}; choose "
                    "another --out"
                )
    print(
        f"{path}: {len(written) + num_added:,} responses, {num_added:,} of them added now; use: --data.source file "
        f"--data.responses {path}"
    )


def _hashes_in(path: Path) -> dict[str, int]:
    """Hashes of the responses that an earlier call wrote, by the id of their row."""
    if not path.is_file():
        return {}
    hashes = {}
    for number, record in json_lines(path):
        if not record.keys() >= {"id", "prompt_ids", "response_ids"}:
            raise ValueError(
                f"{path}:{number} was not written by this command, which adds to files of its own alone; choose "
                "another --out"
            )
        hashes[record["id"]] = _hash(record)
    return hashes


def _records(directory: str) -> Iterator[dict[str, Any]]:
    """A record for each row of the whole shards, split by split."""
    paths = [
        path
        for split in SPLITS
        for path in sorted(Path(directory, "rows").glob(f"{split}-*.parquet"))
        if is_whole(path)
    ]
    check_sums(paths)
    for path in Bar(paths, unit="shards", desc="responses"):
        for row in read_rows(path, _COLUMNS).to_pylist():
            yield {name: value for name, value in row.items() if value is not None}


def _hash(record: Mapping[str, Any]) -> int:
    return hash(tuple(record["response_ids"]))
