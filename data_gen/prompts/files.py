"""Records of JSONL, JSON, CSV and TSV files: each record, or the reason why it cannot be read.

`datasets` would refuse a whole file for one malformed record. It would also give cells of a CSV file a type: it
reads the id 0007 as 7, and the prompt None as an absent one.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from itertools import zip_longest
from pathlib import Path
from typing import Any

Fields = dict[str, Any]
"""One record, as JSON has it."""
Record = tuple[str, str, Fields | ValueError]
"""Location of a record, its number from 0 (the default id), and the record or the error instead."""
_GZIP = b"\x1f\x8b"
_MAGIC = {
    b"BZh": "is compressed by bzip2; decompress it",
    b"\xfd7zXZ\x00": "is compressed by xz; decompress it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; decompress it",
    b"PK\x03\x04": "is a ZIP archive or an Office file; unpack it, or save it as CSV",
    b"PAR1": "is a Parquet file; end its name in .parquet",
    b"ARROW1": "is an Arrow file; end its name in .arrow",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}
"""First bytes of a file that is no text in UTF-8 -> what it is, and the remedy."""
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile)
_MAX_CELL = 2**31 - 1


def json_lines(path: str | Path) -> Iterator[tuple[str, Fields]]:
    """(location, object) of every record of `json_records`; ValueError for one that is not a JSON object."""
    for where, _, record in json_records(path):
        if isinstance(record, ValueError):
            raise ValueError(f"{where}: {record}") from record
        yield where, record


def json_records(path: str | Path) -> Iterator[Record]:
    """Every line of a file that is not blank, or every entry of a .json file that is one array."""
    with open_lines(path) as file:
        start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if str(path).removesuffix(".gz").endswith(".json") and start.startswith(b"["):
            for index, value in enumerate(_array_in(file, path)):
                yield f"{path} record {index}", str(index), _object_of(value)
            return
        for index, line in enumerate(file):
            if line.strip():
                yield f"{path}:{index + 1}", str(index), _object_in(line)


def _array_in(file: BufferedIOBase, path: str | Path) -> list[object]:
    try:
        return list(json.load(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected an array of JSON objects; {error}") from error


def _object_in(line: bytes) -> Fields | ValueError:
    try:
        return _object_of(json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError:
        return ValueError("the line is not UTF-8 text; save the file in that encoding")
    except (ValueError, RecursionError) as error:
        return ValueError(f"expected one JSON object on the line; {error}")


def _object_of(value: object) -> Fields | ValueError:
    return value if isinstance(value, dict) else ValueError(f"expected a JSON object, got {type(value).__name__}")


def table_records(path: str | Path) -> Iterator[Record]:
    """Every row of a CSV or TSV file with a header. All cells are text; an empty one is None. A TSV file in which
    quotation marks do not pair has no quoted cells. The separator of a CSV file is found in its header.

    Raises:
        ValueError: no UTF-8 text, an unpaired quotation mark in a CSV file, or a header that names a column twice.
    """
    is_tsv = str(path).removesuffix(".gz").endswith(".tsv")
    csv.field_size_limit(_MAX_CELL)
    is_plain = is_tsv and not _has_paired_quotes(path)
    try:
        with open_lines(path) as file:
            rows = csv.reader(
                _text(file),
                delimiter="\t" if is_tsv else _separator(path),
                quoting=csv.QUOTE_NONE if is_plain else csv.QUOTE_MINIMAL,
                strict=True,
            )
            names = next(rows, [])
            if repeated := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{path}: the header names the column {repeated[0]!r} twice; rename one")
            for index, cells in enumerate(row for row in rows if row):
                yield f"{path}:{rows.line_num}", str(index), _row(names, cells)
    except csv.Error as error:
        raise ValueError(
            f"{path}:{rows.line_num}: a quotation mark is not paired ({error}); inside a quoted cell write it twice"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; save the file in that encoding") from error


def _row(names: list[str], cells: list[str]) -> Fields | ValueError:
    if len(cells) > len(names):
        return ValueError(f"expected {len(names)} cells, as in the header, got {len(cells)}")
    return {name: cell or None for name, cell in zip_longest(names, cells)}


def _has_paired_quotes(path: str | Path) -> bool:
    """True if the quotation marks of a TSV file enclose whole cells. A cell may then span lines, except where
    each line is a row of the header's length by itself.
    """
    try:
        with open_lines(path) as file:
            lines = [line for line in _text(file) if line.strip()]
        rows = list(csv.reader(lines, delimiter="\t", strict=True))
    except (csv.Error, ValueError):  # what `table_records` reports
        return False
    num_tabs = {line.count("\t") for line in lines}
    return len({len(row) for row in rows}) <= 1 and (len(num_tabs) > 1 or len(rows) == len(lines))


def _separator(path: str | Path) -> str:
    """The separator of a CSV file; some programs write semicolons."""
    with open_lines(path) as file:
        header = file.readline()
    return ";" if header.count(b";") > header.count(b",") else ","


def _text(file: BufferedIOBase) -> Iterator[str]:
    """The lines of a file with their ends; the first without a byte order mark."""
    for number, line in enumerate(file):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8")


@contextmanager
def open_lines(path: str | Path) -> Iterator[BufferedIOBase]:
    """A file for reading lines, decompressed if it begins as a gzip file; ValueError for one that is no text, or
    damaged.
    """
    with open(path, "rb") as file:
        start = file.read(1024)
    is_gzip = start.startswith(_GZIP)
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    if kind is None and b"\x00" in start and not is_gzip:
        kind = "is a binary file; save it as JSONL, CSV or Parquet"
    if kind is not None:
        raise ValueError(f"{path} {kind}")
    try:
        with gzip.open(path, "rb") if is_gzip else open(path, "rb") as lines:
            yield lines
    except _BROKEN as error:
        raise ValueError(f"{path} is a damaged gzip file ({error}); fetch or copy it again") from error


def states_of(path: Path) -> Iterator[str]:
    """Path, inode, size and times of a file, or of each file in a directory; none for what is not on this machine."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            stat = file.stat()
            yield f"{file.absolute()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
