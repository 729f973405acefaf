"""Exactly the files and directories that a prompt source names: `datasets` takes brackets and stars in a path
for a pattern of names.
"""

import glob
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def exact_source(path: str, files: str | None, builders: Mapping[str, str]) -> dict[str, str | None]:
    """Arguments path, data_files and perhaps data_dir of `datasets.load_dataset`.

    Args:
        path: a builder, a directory or a hub id.
        files: the file or URL to read with a builder.
        builders: suffix of a file -> its builder.

    Raises:
        ValueError: a Parquet file without rows, on which pyarrow fails.
    """
    _refuse_empty(Path(files or path))
    if files is not None:
        return {"path": path, "data_files": glob.escape(files) if Path(files).is_file() else files}
    escaped = glob.escape(path)
    if escaped == path or not Path(path).is_dir():
        return {"path": path, "data_files": None}
    # `load_dataset` finds the builder of a plain directory by its most frequent suffix, too
    suffixes = (file.name.removesuffix(".gz").rpartition(".")[2] for file in Path(path).rglob("*.*"))
    found = Counter(builders[f".{suffix}"] for suffix in suffixes if f".{suffix}" in builders)
    if not found:
        raise ValueError(f"{path} has no file that ends in {', '.join(builders)}; check data.prompts")
    [(builder, _)] = found.most_common(1)
    return {"path": builder, "data_files": None, "data_dir": escaped}


def _refuse_empty(path: Path) -> None:
    from pyarrow import ArrowInvalid, parquet  # takes a while to import

    files = [file for file in (path, *sorted(path.rglob("*"))) if file.suffix == ".parquet"]
    for file in files:
        num_rows = None
        with suppress(ArrowInvalid, OSError):  # `datasets` reports a broken file
            num_rows = parquet.read_metadata(file).num_rows
        if num_rows == 0:
            raise ValueError(f"{file} has no rows; fill it, or remove it")
