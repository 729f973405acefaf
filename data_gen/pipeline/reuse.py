"""`acceptance-heads responses`: responses of a data directory as a file, so that the dear part of data is made once.

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
from data_gen.pipeline.stages import exchanges_in, responded_in
from data_gen.prompts.prompt import json_lines
from data_gen.prompts.splits import SPLITS
from data_gen.responses.exchange import Exchange
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import read_rows
from store.progress import Bar
from store.shards import atomic_file, is_whole
from store.sums import check_sums

_COLUMNS = ("id", "prompt_ids", "response_ids", "finish_reason")


def responses(config: Config, *, out: str) -> None:
    """Write the responses in data.dir, with rows or without yet, as JSONL for `data.source file`; a file that is there
    gets what it lacks, at its end.

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
    """A record for each response of the whole shards, split by split."""
    found = {
        path.stem: path
        for path in (*responded_in(directory), *Path(directory, "rows").glob("*.parquet"))  # of both, the rows
        if is_whole(path)
    }
    paths = [path for split in SPLITS for name, path in sorted(found.items()) if name.startswith(f"{split}-")]
    check_sums(paths)
    for path in Bar(paths, unit="shards", desc="responses"):
        is_row = path.suffix == ".parquet"
        for record in read_rows(path, _COLUMNS).to_pylist() if is_row else map(Exchange._asdict, exchanges_in(path)):
            yield {name: record[name] for name in _COLUMNS if record[name] is not None}


def _hash(record: Mapping[str, Any]) -> int:
    return hash(tuple(record["response_ids"]))
