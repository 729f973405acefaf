"""`acceptance-heads check`: whether the data on disk is unchanged, byte for byte; and `acceptance-heads
responses`: its responses, the expensive part of the data, as a file.

With `data.source: file` and `data.responses: FILE`, another run labels these responses again: for another draft,
`mixing_ratio`, timing, or `Sampling`. The target then only labels and generates nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from configs.load import accepts_yaml
from configs.paths import local_path
from configs.schema import Config
from data_gen.pipeline.stages import answers_in
from data_gen.prompts.files import Fields, json_lines
from data_gen.prompts.sets import SPLITS
from data_gen.store.manifest import Manifest, num_prompts, read_manifest
from store.progress import Bar
from store.shards import DATA_FOLDERS, STATE_FOLDERS, atomic_file, broken_shards, check_sums, is_whole, shards_in

_COLUMNS = ("id", "prompt_ids", "response_ids", "finish_reason")


@accepts_yaml
def check(config: Config) -> None:
    """Run `acceptance-heads check`; `configs.making` documents its flags."""
    directory = Path(config.data.dir)
    missing = absent(directory, read_manifest(directory))
    made = shards_in(directory, DATA_FOLDERS)
    cached = shards_in(directory, STATE_FOLDERS)
    paths = [*made, *cached]
    problems = dict(broken_shards(made, reads_all=True)) | dict(broken_shards(cached, command="train", reads_all=True))
    problems |= {path: f"{path} is missing or incomplete; run `acceptance-heads data` again" for path in missing}
    for folder in dict.fromkeys(path.parent for path in paths):
        whole = [path for path in paths if path.parent == folder and path not in problems]
        print(f"{folder}: {len(whole)} shards intact, {sum(path.stat().st_size for path in whole):,} bytes")
    if problems:
        print("\n".join(problems.values()))
        raise ValueError(
            f"{len(problems)} shards in {directory} are damaged or missing (listed above); run `acceptance-heads data` "
            "with this config to make them again, or `train` for those in states/"
        )
    print(f"All {len(paths)} shards in {directory} are intact.")


def absent(directory: Path, manifest: Manifest) -> list[Path]:
    """Paths of shards that the manifest counts, or another folder has, and that are missing."""
    suffixes = {"rows": "parquet", "labels": "safetensors"}
    present = set(shards_in(directory, suffixes))
    names = []
    for split in SPLITS:
        counts = [int(path.stem.partition("-")[2]) + 1 for path in present if path.stem.startswith(f"{split}-")]
        counts.append(-(-num_prompts(manifest, split) // manifest.get("rows_per_shard", 1)))
        names += [f"{split}-{index:05d}" for index in range(max(counts))]
    paths = [directory / folder / f"{name}.{suffix}" for folder, suffix in suffixes.items() for name in names]
    return [path for path in paths if path not in present]


@accepts_yaml
def responses(config: Config, *, out: str) -> None:
    """Run `acceptance-heads responses`; `configs.making` documents its flags."""
    path = local_path(out, "--out")
    written: dict[tuple[str, int], int] = {}
    num_added = 0
    read_manifest(config.data.dir)
    with atomic_file(path) as file:
        for where, record in json_lines(path) if path.is_file() else ():
            if not record.keys() >= {"id", "prompt_ids", "response_ids"}:
                raise ValueError(f"{where} was not written by this command; choose another --out")
            written[_key(record)] = hash(tuple(record["response_ids"]))
            file.write(json.dumps(record).encode() + b"\n")
        for record in _records(config.data.dir):
            if _key(record) not in written:
                file.write(json.dumps(record).encode() + b"\n")
                num_added += 1
            elif written[_key(record)] != hash(tuple(record["response_ids"])):
                raise ValueError(
                    f"{path} and {config.data.dir} have different responses to {record['id']}; choose another --out"
                )
    print(
        f"{path}: {len(written) + num_added:,} responses, {num_added:,} of them new; to use them: --data.source file "
        f"--data.responses {path}"
    )


def _key(record: Fields) -> tuple[str, int]:
    """What identifies a prompt: train and test may use the same id."""
    return record["id"], hash(tuple(record["prompt_ids"]))


def _records(directory: str) -> Iterator[Fields]:
    folder = Path(directory)
    paths = [*folder.glob("stages/respond/*.safetensors"), *folder.glob("rows/*.parquet")]
    path_of = {path.stem: path for path in paths if is_whole(path)}  # rows win
    in_order = [path_of[name] for split in SPLITS for name in sorted(path_of) if name.startswith(f"{split}-")]
    check_sums(in_order)
    for path in Bar(in_order, unit="shards", desc="responses"):
        for exchange in answers_in(path).exchanges:
            yield {name: value for name in _COLUMNS if (value := getattr(exchange, name)) is not None}
