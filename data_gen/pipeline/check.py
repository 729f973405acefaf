"""`python -m data_gen check`: whether the data on disk is what was written, to the byte."""

from collections.abc import Iterator
from pathlib import Path

from configs.schema import Config
from data_gen.prompts.splits import SPLITS
from data_gen.store.manifest import read_manifest
from store.sums import problems_of, shards_in

_READ = ("rows", "features/*")
"""Folders whose shards belong together."""


def check(config: Config) -> None:
    """Compare every shard in data.dir with its sum, and name each that is broken; nothing is
    changed.

    Args:
        config: the experiment, of which data.dir alone counts.

    Raises:
        FileNotFoundError: nothing has been made there.
        ValueError: a shard is broken or missing.
    """
    directory = Path(config.data.dir)
    read_manifest(directory)
    paths = shards_in(directory)
    problems = dict(problems_of(paths, is_thorough=True))
    problems |= {
        path: f"{path} is missing or was not finished; run `acceptance-heads data` again" for path in absent(directory)
    }
    for folder in dict.fromkeys(path.parent for path in paths):
        whole = [path for path in paths if path.parent == folder and path not in problems]
        print(f"{folder}: {len(whole)} shards whole, {sum(path.stat().st_size for path in whole):,} bytes")
    if problems:
        print("\n".join(problems.values()))
        raise ValueError(
            f"{len(problems)} shards in {directory} are broken or missing, as listed; run `acceptance-heads data` with "
            "this config, which makes them again (with the same bytes on the same machine)"
        )
    print(f"Every one of {len(paths)} shards in {directory} is what was written, to the byte.")


def absent(directory: Path) -> Iterator[Path]:
    """Where a shard should be: another folder has one of its split and number, or of a later number."""
    folders = [folder for pattern in _READ for folder in sorted(directory.glob(pattern)) if folder.is_dir()]
    present = {path for path in shards_in(directory) if path.parent in folders}
    for split in SPLITS:
        indices = [int(path.stem.rpartition("-")[2]) for path in present if path.stem.startswith(f"{split}-")]
        for folder in folders:
            suffix = "parquet" if folder.name == "rows" else "safetensors"
            expected = (folder / f"{split}-{index:05d}.{suffix}" for index in range(max(indices, default=-1) + 1))
            yield from (path for path in expected if path not in present)
