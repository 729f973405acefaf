"""`acceptance-heads check`: whether the data on disk is unchanged, byte for byte."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.schema import Config
from data_gen.prompts.splits import SPLITS
from data_gen.store.manifest import num_prompts, read_manifest
from store.shards import problems_of, shards_in

_READ = ("rows", "labels", "features/*")
"""Folders whose shards belong together."""


def check(config: Config) -> None:
    """Compare every shard in data.dir with its checksum and list those that are damaged; nothing is changed.

    Args:
        config: the experiment; only data.dir is read.

    Raises:
        FileNotFoundError: the directory has no data.
        ValueError: a shard is damaged or missing.
    """
    directory = Path(config.data.dir)
    manifest = read_manifest(directory)
    paths = shards_in(directory)
    problems = dict(problems_of(paths, is_thorough=True))
    problems |= {
        path: f"{path} is missing or incomplete; run `acceptance-heads data` again"
        for path in absent(directory, manifest)
    }
    for folder in dict.fromkeys(path.parent for path in paths):
        whole = [path for path in paths if path.parent == folder and path not in problems]
        print(f"{folder}: {len(whole)} shards intact, {sum(path.stat().st_size for path in whole):,} bytes")
    if problems:
        print("\n".join(problems.values()))
        raise ValueError(
            f"{len(problems)} shards in {directory} are damaged or missing (listed above); run `acceptance-heads data` "
            "with this config to make them again"
        )
    print(f"All {len(paths)} shards in {directory} are intact.")


def absent(directory: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Paths of missing shards: the manifest counts their prompts, or another folder has a shard of that number or a
    later one.
    """
    made = [folder for pattern in _READ for folder in sorted(directory.glob(pattern)) if folder.is_dir()]
    features = manifest.get("features")  # absent: imported rows alone
    named = [directory / "features" / name for name in features or ()] + [directory / "labels"] * (features is not None)
    folders = list(dict.fromkeys([directory / "rows", *named, *made]))
    present = {path for path in shards_in(directory) if path.parent in folders}
    for split in SPLITS:
        num_made = max((int(path.stem[-5:]) + 1 for path in present if path.stem.startswith(f"{split}-")), default=0)
        num = max(num_made, -(-num_prompts(manifest, split) // manifest.get("rows_per_shard", 1)))
        for folder in folders:
            suffix = "parquet" if folder.name == "rows" else "safetensors"
            expected = (folder / f"{split}-{index:05d}.{suffix}" for index in range(num))
            yield from (path for path in expected if path not in present)
