"""Prompt sets: known ones by name, others by hub id, and local files and directories.

A known set is one entry of `SETS`. JSON is read here, line by line or as one array, since `datasets` refuses a whole
file for one malformed record.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import PromptSource
from data_gen.prompts.prompt import Prompt, json_records, open_lines, prompts_of, say_once
from data_gen.prompts.splits import Split


@dataclass(frozen=True, kw_only=True)
class PromptSet(PromptSource):
    """The location of a set, and how its records are read."""

    data_files: str | None = None
    """The files to read, if a repository holds plain files."""
    shares: tuple[int, int, int] | None = None
    """Fixed shares of train, dev and test; None: those of the run."""


SETS = {
    "alpaca": PromptSet(path="tatsu-lab/alpaca"),
    "gsm8k": PromptSet(path="openai/gsm8k", name="main", test_split="test", shares=(4, 1, 0)),
    "humaneval": PromptSet(path="openai/openai_humaneval", split="test", shares=(0, 0, 1)),
    "mt_bench": PromptSet(
        path="HuggingFaceH4/mt_bench_prompts", shares=(0, 0, 1), columns={"turns": "prompt", "id": "prompt_id"}
    ),
    # 480 prompts: 160 to choose thresholds by, 320 to test with
    "spec_bench": PromptSet(
        path="json",
        data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        shares=(0, 1, 2),
    ),
}
"""The path of a prompt source -> the set."""
_BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}
"""Suffix of a file -> its builder in `datasets`; all others are JSONL."""
_DEFAULT_PART = PromptSource(path="").split
"""The value of `split` that means the default part of a known set."""
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_FORMS = (
    f"stories, {', '.join(SETS)}, a file (JSONL, .json, {', '.join(_BUILDERS)}), a directory of such files, or "
    "org/name of a set on the hub"
)


def set_of(source: PromptSource) -> PromptSet:
    """The set that a source names.

    Raises:
        FileNotFoundError: not a known set, file, directory or hub id.
    """
    path = Path(source.path)
    if not path.name:
        raise ValueError(f"data.prompts is {source.path!r}, which names no set; set it to {_FORMS}")
    if path.is_file():  # a file may have the name of a set
        return PromptSet(**vars(source) | {"path": _BUILDERS.get(_ending(path), "json"), "data_files": source.path})
    if source.path in SETS and not path.is_dir():
        return _overridden(SETS[source.path], source)
    is_hub_id = _HUB_ID.fullmatch(source.path) and path.suffix not in (*_BUILDERS, ".jsonl", ".json")
    if path.is_dir() or is_hub_id:
        return PromptSet(**vars(source))
    raise FileNotFoundError(
        f"data.prompts is {source.path!r}, which does not exist and is not a known set; set it to {_FORMS}"
    )


def set_name(path: str) -> str:
    """The name of a set: its file name without suffix, or the last part of a path or hub id."""
    name = path.removesuffix(".gz")
    return Path(name).stem if Path(name).suffix in (*_BUILDERS, ".jsonl", ".json") else Path(path).name


def _ending(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _overridden(known: PromptSet, source: PromptSource) -> PromptSet:
    """A known set with the user's settings instead of its defaults.

    The set's test part belongs to its default part; another part is split, unless the user names a test part too.
    """
    prompt_set = replace(known, name=source.name or known.name, columns={**known.columns, **source.columns})
    if source.split not in (_DEFAULT_PART, known.split):
        prompt_set = replace(prompt_set, split=source.split, test_split=None, shares=None)
    return prompt_set if source.test_split is None else replace(prompt_set, test_split=source.test_split)


def load(prompt_set: PromptSet, split: Split) -> list[Prompt]:
    """The prompts of `read`; unreadable records are left out, and counted once on stderr."""
    prompts, problems = read(prompt_set, split)
    if problems:
        num, (where, reason) = len(problems) + len(prompts), next(iter(problems.items()))
        say_once(
            f"{len(problems)} of {num:,} records cannot be read and are left out, the first at {where}: {reason}; "
            "`data` lists them in errors.jsonl"
        )
    if not prompts:
        raise ValueError(f"{prompt_set.data_files or prompt_set.path} contains no prompt; check data.prompts")
    return prompts


def read(prompt_set: PromptSet, split: Split) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts from which `split` is taken (the set's test part for test if it has one, else the part that all
    splits share), and its unreadable records: where -> reason.

    Raises:
        FileNotFoundError: the hub cannot be reached and the set is not in its cache.
        ValueError: an unreadable file, or one with at least half of its records unreadable.
    """
    part = prompt_set.test_split if split == "test" and prompt_set.test_split is not None else prompt_set.split
    if prompt_set.path == "json" and prompt_set.data_files is not None and Path(prompt_set.data_files).is_file():
        return prompts_of(_json_records(Path(prompt_set.data_files)), prompt_set.columns)
    where = f"{prompt_set.data_files or prompt_set.path} [{part}]"
    numbered = enumerate(_records(prompt_set, part))
    records = ((f"{where} record {index}", str(index), record) for index, record in numbered)
    return prompts_of(records, prompt_set.columns)


def _json_records(path: Path) -> Iterator[tuple[str, str, dict[str, Any] | ValueError]]:
    """(file and line or record, the record's number from 0, record) of JSONL, or of a file that is one array."""
    try:
        if _ending(path) != ".json" or not _begins_with(path, b"["):
            for number, record in json_records(path):
                yield f"{path}:{number}", str(number - 1), record
            return
        with open_lines(path) as file:
            records = json.load(file)
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: expected an array of JSON objects; {error}") from error
    for number, record in enumerate(records):
        problem = ValueError(f"expected a JSON object, got {type(record).__name__}")
        yield f"{path} record {number}", str(number), record if isinstance(record, dict) else problem


def _begins_with(path: Path, sign: bytes) -> bool:
    with open_lines(path) as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(sign)


def _records(prompt_set: PromptSet, part: str) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset  # takes seconds to import
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # the final error reports the retries
    name = f"prompt set {prompt_set.data_files or prompt_set.path}"
    options = {"sep": _separator(Path(str(prompt_set.data_files)))} if prompt_set.path == "csv" else {}
    try:
        return list(
            load_dataset(prompt_set.path, prompt_set.name, split=part, data_files=prompt_set.data_files, **options)
        )
    except OSError as error:
        raise FileNotFoundError(
            f"{name} cannot be reached and is not in the cache: {_line(error)}; set data.prompts to {_FORMS}"
        ) from error
    except (ValueError, DatasetsError) as error:
        raise ValueError(f"{name}: {_line(error.__cause__ or error)}") from error


def _separator(path: Path) -> str:
    """The separator of a CSV or TSV file; some programs write semicolons."""
    if _ending(path) == ".tsv":
        return "\t"
    with open_lines(path) as file:
        header = file.readline()
    return ";" if header.count(b";") > header.count(b",") else ","


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
