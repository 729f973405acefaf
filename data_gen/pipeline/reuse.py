"""`acceptance-heads responses`: export the responses of a data directory, the expensive part of the data, to a file.

With `data.source: file` and `data.responses: FILE`, another run labels these responses again: for another draft,
`mixing_ratio`, timing, or `Sampling`. The target then only labels and generates nothing.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.paths import local_path
from configs.schema import Config
from data_gen.pipeline.stages import exchanges_in, responded_in
from data_gen.prompts.prompt import json_lines
from data_gen.prompts.splits import SPLITS
from data_gen.responses.exchange import Exchange
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import read_rows
from store.progress import Bar
from store.shards import atomic_file, check_sums, is_whole

_COLUMNS = ("id", "prompt_ids", "response_ids", "finish_reason")


def responses(config: Config, *, out: str) -> None:
    """Write the responses in data.dir as JSONL for `data.source: file`; an existing file is extended.

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
                    f"{path} and {config.data.dir} have different responses to {record['id']}; choose another --out"
                )
    print(
        f"{path}: {len(written) + num_added:,} responses, {num_added:,} of them new; to use them: --data.source file "
        f"--data.responses {path}"
    )


def _hashes_in(path: Path) -> dict[str, int]:
    """Row id -> hash of the response, for a file that an earlier call wrote."""
    if not path.is_file():
        return {}
    hashes = {}
    for number, record in json_lines(path):
        if not record.keys() >= {"id", "prompt_ids", "response_ids"}:
            raise ValueError(
                f"{path}:{number} was not written by this command, which extends only its own files; choose another "
                "--out"
            )
        hashes[record["id"]] = _hash(record)
    return hashes


def _records(directory: str) -> Iterator[dict[str, Any]]:
    """A record for each response of the complete shards, split by split."""
    path_of = {
        path.stem: path
        for path in (*responded_in(directory), *Path(directory, "rows").glob("*.parquet"))  # rows win
        if is_whole(path)
    }
    paths = [path for split in SPLITS for name, path in sorted(path_of.items()) if name.startswith(f"{split}-")]
    check_sums(paths)
    for path in Bar(paths, unit="shards", desc="responses"):
        is_row = path.suffix == ".parquet"
        for record in read_rows(path, _COLUMNS).to_pylist() if is_row else map(Exchange._asdict, exchanges_in(path)):
            yield {name: record[name] for name in _COLUMNS if record[name] is not None}


def _hash(record: Mapping[str, Any]) -> int:
    return hash(tuple(record["response_ids"]))
