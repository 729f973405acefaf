"""Prompt sets of every form that `datasets` reads, several at once."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from configs.command import config_of, parser_for
from configs.schema import DataConfig, PromptSource
from data_gen.pipeline.command import make
from data_gen.pipeline.stages import shards_of
from data_gen.prompts import sets as hub
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.sets import SPLITS, Split, load_prompts, set_of
from data_gen.stats import stats
from data_gen.store.manifest import read_manifest
from tests.data_gen.on_disk import errors_of, rows_of, with_data, write_lines

FRAME = pd.DataFrame([{"question": f"q{number}", "key": f"k{number}"} for number in range(6)])
COLUMNS = {"prompt": "question", "id": "key"}


def write_folder(path: Path) -> None:
    path.mkdir()
    FRAME.to_parquet(path / "train.parquet")
    FRAME.head(1).assign(key="own").to_parquet(path / "test.parquet")


FORMS: dict[str, Callable[[Path], object]] = {
    "set.csv": partial(FRAME.to_csv, index=False),
    "semicolon.csv": partial(FRAME.to_csv, index=False, sep=";"),
    "set.tsv": partial(FRAME.to_csv, index=False, sep="\t"),
    "set.json": partial(FRAME.to_json, orient="records", indent=1),
    "set.jsonl": partial(FRAME.to_json, orient="records", lines=True),
    "set.jsonl.gz": partial(FRAME.to_json, orient="records", lines=True),
    "set.parquet": FRAME.to_parquet,
    "directory": write_folder,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def loaded(prompts: Any, split: Split = "train", weights=(1, 0, 0), **sizes: int) -> list[Prompt]:
    return load_prompts(DataConfig(prompts=prompts, split_weights=weights, **sizes), split)


def all_of(*, num: int = 6, **source: Any) -> dict[str, str]:
    """Id -> text of every prompt of a set."""
    return {prompt.id: prompt.text for prompt in loaded(PromptSource(**source), num_train=num)}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_under_a_column_map(tmp_path, name):
    path = str(tmp_path / name)
    FORMS[name](Path(path))
    assert all_of(path=path, columns=COLUMNS) == dict(zip(FRAME.key, FRAME.question, strict=True))
    with pytest.raises(ValueError, match=r" there is no column 'ask' .*; it has key, question"):
        all_of(path=path, columns={"prompt": "ask"})
    if name == "directory":
        source = PromptSource(path=path, test_split="test", columns=COLUMNS)
        assert [prompt.id for prompt in loaded(source, "test", num_test=1)] == ["own"]


def test_conversations_in_parquet_are_read_as_those_in_json(tmp_path):
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "gone"}]
    sharegpt = [{"from": "human", "value": "v"}]
    for column, value, text in (("messages", messages, "u"), ("conversations", sharegpt, "v"), ("turns", ["w"], "w")):
        pd.DataFrame({column: [value]}).to_parquet(tmp_path / f"{column}.parquet")
        assert list(all_of(path=str(tmp_path / f"{column}.parquet"), num=1).values()) == [text]


LINES = {
    "{not json": "expected one JSON object",
    "[1]": "expected a JSON object, got list",
    '{"query": "x"}': r"expected one of the fields messages.*got query; map one .*columns: \{prompt: query\}",
    '{"messages": [{"role": "user"}]}': "expected a list of messages with the strings 'role' and 'content'",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "expected at least one user message",
    '{"turns": "one"}': "expected turns to be a list of strings, got 'one'",
    '{"prompt": 5}': "expected prompt to be a string, got 5",
    '{"prompt": null}': "expected prompt to be a string, got None",
    '{"id": "\\ud800", "prompt": "x"}': "expected the id to be text, not a lone surrogate",
    '{"prompt": "\xff"}': "the line is not UTF-8 text",
    '{"id": "0", "prompt": "again"}': "id '0' is used by an earlier record",
}
"""The second line of a JSONL file, and why it cannot be read."""


NO_TEXT = [
    ("jsonl", "PAR1", "is a Parquet file; end its name in .parquet"),
    ("jsonl", "\xff\xfe{", "is UTF-16 text; save it as UTF-8"),
    ("csv", "PK\x03\x04", "is a ZIP archive or an Office file"),
    ("jsonl.xz", "\xfd7zXZ\0", "is compressed by xz; decompress it"),
    ("json", "BZh9", "is compressed by bzip2"),
    ("jsonl.zst", "\x28\xb5\x2f\xfd", "is compressed by zstd"),
    ("jsonl", "\x7fELF", "is a binary file"),
    ("jsonl.gz", "\x1f\x8b\x08", "is a damaged gzip file"),
]
"""Ending of a file that is no text, its first bytes, and how it is named."""


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.parquet", "PAR1", r"prompt set .*a\.parquet: "),
        ("a.json", '[{"prompt": "x"}, 5]', r"a\.json record 1: expected a JSON object, got int"),
        ("a.json", '[{"prompt": "x"}', r"a\.json: expected an array of JSON objects; Expecting ',' delimiter"),
        ("a.csv", "prompt\nx\ny,z\n", r"a\.csv:3: expected 1 cells, as in the header, got 2"),
        ("a.csv", "other\n1\n", r"a\.csv:2: expected one of the fields"),
        ("a.csv", 'prompt\n"He said "hi" to me"\n', r"a\.csv:2: a quotation mark is not paired"),
        ("a.csv", "prompt,prompt\nx,y\n", r"a\.csv: the header names the column 'prompt' twice"),
        ("a.csv", "prompt\ncaf\xe9\n", r"a\.csv is not UTF-8 text"),
        ("a.jsonl", "", r"a\.jsonl contains no prompt"),
        ("a.csv", "", r"a\.csv contains no prompt"),
        *[(f"a.{ending}", magic + "\0\1", rf"a\.{ending} {reason}") for ending, magic, reason in NO_TEXT],
        *[("a.jsonl", f'{{"prompt": "fine"}}\n{line}', rf"a\.jsonl:2: {reason}") for line, reason in LINES.items()],
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=complaint) as error:
        all_of(path=str(tmp_path / name))
    assert "\n" not in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def known(monkeypatch, **source: Any) -> tuple[dict, dict[str, list[str]]]:
    """What `datasets` is asked for when a known set is read, with every part, and the texts of each split."""
    asked: dict = {"splits": []}

    def load_dataset(path, name, *, split, data_files):
        asked.update(path=path, name=name)
        asked["splits"].append(split)
        names = {"question": "q", "ask": "a", "key": ""}
        return [{name: f"{split} {letter}{number}" for name, letter in names.items()} for number in range(10)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    sizes = {"split_weights": (2, 1, 1), "num_train": 99, "num_dev": 99, "num_test": 99}
    config, texts = DataConfig(prompts=PromptSource(**source), **sizes), dict[str, list[str]]()
    for split in SPLITS:
        with suppress(ValueError):
            texts[split] = [prompt.text for prompt in load_prompts(config, split, may_be_fewer=True)]
    return asked, texts


def test_a_known_set_reads_the_part_and_the_columns_that_the_user_names(monkeypatch):
    asked, texts = known(monkeypatch, path="gsm8k")
    assert asked == {"path": "openai/gsm8k", "name": "main", "splits": ["test", "train"]}
    assert {name: len(found) for name, found in texts.items()} == {"train": 8, "dev": 2, "test": 10}, "as it prescribes"
    own = {"split": "validation", "name": "socratic", "columns": {"prompt": "ask"}}
    asked, texts = known(monkeypatch, path="gsm8k", **own)
    assert asked == {"path": "openai/gsm8k", "name": "socratic", "splits": ["validation"]}
    assert {name: len(found) for name, found in texts.items()} == {"train": 6, "dev": 2, "test": 2}
    assert all(text.startswith("validation a") for found in texts.values() for text in found)
    assert not set(texts["train"]) & set(texts["test"])
    _, texts = known(monkeypatch, path="gsm8k", test_split="validation")
    assert all(text.startswith("validation q") for text in texts["test"])
    asked, _ = known(monkeypatch, path="humaneval")
    assert asked["splits"] == ["test"]
    with pytest.raises(ValueError, match="no column 'absent'"):
        load_prompts(DataConfig(prompts=PromptSource(path="alpaca", columns={"prompt": "absent"})), "train")


def test_a_hub_set_out_of_reach_is_one_line_and_a_file_that_is_not_there_is_not_looked_for_on_the_hub(monkeypatch):
    def load_dataset(path, name, **options):
        raise ConnectionError(f"Couldn't reach {path!r}\non the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    complaint = r"prompt set org/name cannot be reached and is not in the cache: Couldn't reach 'org/name' on"
    with pytest.raises(FileNotFoundError, match=complaint):
        all_of(path="org/name", name="main", split="validation")
    for path in ("folder/gone.jsonl", "./folder/gone", "/folder/gone", "gone"):
        with pytest.raises(FileNotFoundError, match="does not exist and is not a known set; set it to stories, alpaca"):
            all_of(path=path)


def test_a_record_that_cannot_be_read_is_counted_and_the_run_continues(toy_config, tmp_path, capsys):
    lines = [json.dumps({"prompt": f"Say {number}"}) for number in range(38)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*lines[:5], "{broken", *lines[5:], '{"prompt": 5}']) + "\n")
    config = with_data(toy_config, prompts=str(path), split_weights=(1, 0, 0), num_train=4, num_test=0)
    make(config)
    found = [(problem["id"], problem["shard"]) for problem in errors_of(config)]
    assert found == [(f"{path}:6", None), (f"{path}:40", None)]
    shown = capsys.readouterr()
    warning = f"2 of 40 records cannot be read and are left out, the first at {path}:6: expected one JSON"
    assert shown.err.count(warning) == 1
    assert "2 of 40 records of data.prompts are unreadable" in shown.out
    with pytest.raises(ValueError, match=r"2 of 40 records of data\.prompts are .* above data\.max_error_share"):
        make(with_data(config, max_error_share=0.04))
    path.write_text("\n".join([*lines[:2], "[1]", "[2]"]))
    with pytest.raises(ValueError, match=r"prompts.jsonl:3: expected a JSON object, got list \(2 of 4 records"):
        make(with_data(config, dir=str(tmp_path / "other")))


@pytest.fixture
def two_sets(tmp_path) -> tuple[PromptSource, PromptSource]:
    """Sixty prompts and twenty, ids alike; the first is to give three times as many."""
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("large", "small")}
    for (name, path), count in zip(paths.items(), (60, 20), strict=True):
        write_lines(path, [{"id": number, "prompt": f"{name} {number}"} for number in range(count)])
    return PromptSource(path=str(paths["large"]), weight=3.0), PromptSource(path=str(paths["small"]))


def test_several_sets_are_drawn_by_their_weights_and_each_is_split_as_it_would_be_alone(two_sets):
    for count in (4, 10, 40):
        prompts = loaded(two_sets, weights=(4, 1, 0), num_train=count)
        assert abs(sum(prompt.set == "large" for prompt in prompts) - 0.75 * count) < 1
        assert len({prompt.id for prompt in prompts}) == count
        assert all(prompt.id.startswith(f"{prompt.set}/") for prompt in prompts)
    assert prompts[:9] == loaded(two_sets, weights=(4, 1, 0), num_train=9)
    together = loaded(two_sets, "dev", (1, 1, 0), num_dev=20)
    for source in two_sets:
        name = Path(source.path).stem
        alone = [prompt.id for prompt in loaded(source, "dev", (1, 1, 0), num_dev=10)]
        mixed = [prompt.id.removeprefix(f"{name}/") for prompt in together if prompt.set == name]
        assert mixed[:10] == alone[: len(mixed)]


def test_a_prompt_of_two_sets_is_in_one_split_of_one_set(tmp_path):
    for name, first in (("a", 0), ("b", 20)):
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": f"Tell {number}."} for number in range(first, first + 40)])
    sources = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    data = DataConfig(prompts=sources, split_weights=(2, 1, 1), num_train=60, num_dev=60, num_test=60)
    prompts = [prompt for split in SPLITS for prompt in load_prompts(data, split, may_be_fewer=True)]
    assert len({prompt.content for prompt in prompts}) == len(prompts) > 20


def test_a_list_of_one_is_that_one_and_sets_that_cannot_be_mixed_are_refused(two_sets):
    path = two_sets[0].path
    assert loaded((path,), num_train=9) == loaded(path, num_train=9)
    few = "num_train is 99, but .* has 80 train prompts in these proportions; set data.num_train to at most 80"
    for prompts, complaint in ((two_sets, few), ((two_sets[0],) * 2, "two sets named 'large'"), ((), "empty list")):
        with pytest.raises(ValueError, match=complaint):
            loaded(prompts, num_train=99)


def test_rows_tell_the_sets_apart(toy_config, two_sets):
    config = with_data(toy_config, prompts=two_sets, split_weights=(1, 0, 1), num_train=4, num_test=0)
    make(config)
    rows = rows_of(config)
    assert [row["set"] for row in rows] == [row["id"].split("/")[0] for row in rows]
    assert {row["set"] for row in rows} == {"large", "small"}
    sets = read_manifest(config.data.dir)["split"]["train"]["sets"]
    assert sets == {"large": 3, "small": 1}
    summary = stats(config, plots=False)
    assert {name: summary[f"set {name}"]["rows"] for name in sets} == sets


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.jsonl", "a.jsonl"),
        ('{"path": "a", "columns": {"prompt": "question"}}', PromptSource(path="a", columns={"prompt": "question"})),
        ('["a", {"path": "b", "weight": 2}]', ("a", PromptSource(path="b", weight=2.0))),
    ],
)
def test_a_yaml_names_one_set_or_several(value, expected):
    parser = parser_for(make)
    parsed = parser.parse_args(["--pair.target.path", "t", "--pair.draft.path", "d", "--data.prompts", value])
    assert config_of(parser, parsed).data.prompts == expected


def test_a_set_is_called_by_its_file_or_its_whole_hub_name():
    names = {"data/own.jsonl": "own", "org/chat-1.5": "chat-1.5", "org/chat-1.6": "chat-1.6", "alpaca": "alpaca"}
    assert {path: hub.set_name(path) for path in names} == names
    for path in ("/", ".", ""):
        with pytest.raises(ValueError, match=r"data.prompts is .*, which names no set"):
            hub.set_of(PromptSource(path=path))


def test_a_users_mapping_replaces_that_of_a_known_set():
    source = PromptSource(path="mt_bench", columns={"messages": "chat"})
    assert set_of(source).columns == {"id": "prompt_id", "messages": "chat"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "id,prompt\n0007,None\n010,NA\n1.50,7\n", {"0007": "None", "010": "NA", "1.50": "7"}),
        ("a.csv", "\ufeffid,prompt,note\nt,x\n,y,z\n", {"t": "x", "1": "y"}),  # a short row, and an empty id
        ("a.csv", 'id,prompt\n1,"a ""b""\nc"\n\n2,5" disk\n', {"1": 'a "b"\nc', "2": '5" disk'}),
        ("a.tsv", 'id\tprompt\n1\t"Hi" she said\n2\t"Why?\n', {"1": '"Hi" she said', "2": '"Why?'}),
        ("a.tsv", 'id\tprompt\n1\t"a\n2\tb"\n3\tc\n', {"1": '"a', "2": 'b"', "3": "c"}),
        ("a.tsv", 'id\tprompt\n1\t"a\tb ""c"""\n', {"1": 'a\tb "c"'}),
    ],
)
def test_cells_of_a_table_are_the_text_that_was_written(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert all_of(path=str(tmp_path / name), num=len(expected)) == expected


def test_a_gzip_file_is_read_whatever_its_name(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"prompt": "x"}'))
    assert all_of(path=str(tmp_path / "a.jsonl"), num=1) == {"0": "x"}


@pytest.mark.parametrize("name", ["p[1].parquet", "p*.parquet", "p[1].txt", "p*.txt", "d[1]", "d*"])
def test_a_path_with_brackets_or_stars_names_exactly_that_file_or_directory(name: str, tmp_path: Path):
    texts = {spelt: f"in {spelt}" for spelt in (name, name.replace("[1]", "1"), name.replace("*", "2"))}
    for spelt, text in texts.items():
        path = tmp_path / spelt
        frame = pd.DataFrame({"prompt": [text]})
        if path.suffix == ".txt":
            path.write_text(f"{text}\n")
        elif path.suffix:
            frame.to_parquet(path)
        else:
            path.mkdir()
            frame.to_json(path / "train.jsonl", orient="records", lines=True)
    assert [prompt.text for prompt in loaded(PromptSource(path=str(tmp_path / name)), num_train=1)] == [f"in {name}"]


def test_parquet_without_rows_is_refused_by_its_path(tmp_path: Path):
    FRAME.head(0).to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty\.parquet has no rows; fill it"):
        loaded(PromptSource(path=str(tmp_path / "empty.parquet")))
    with pytest.raises(ValueError, match=r"empty\.parquet has no rows; fill it"):
        loaded(PromptSource(path=str(tmp_path)))


def test_each_set_is_parsed_once_in_a_process_and_again_if_it_changed(tmp_path, monkeypatch):
    """`data` needs the prompts of every split, and each split those of the splits before it."""
    parsed = []
    read_records = hub.json_records
    monkeypatch.setattr(hub, "json_records", lambda file: parsed.append(Path(file).name) or read_records(file))
    paths = [tmp_path / f"{name}.jsonl" for name in ("a", "b")]
    for path in paths:
        write_lines(path, ({"id": f"{number}", "prompt": f"{path.stem} {number}"} for number in range(40)))
    config = DataConfig(prompts=tuple(map(str, paths)), num_train=20, num_dev=4, num_test=4)
    shards_of(config)
    assert sorted(parsed) == ["a.jsonl", "b.jsonl"]
    prompts, _ = hub.read(set_of(PromptSource(path=str(paths[1]))))
    prompts.clear()
    write_lines(paths[0], ({"id": f"{number}", "prompt": f"new {number}"} for number in range(40)))
    texts = [prompt.text for spec in shards_of(config) for prompt in spec.prompts]
    assert Counter(text.split()[0] for text in texts) == {"new": 14, "b": 14}
    assert sorted(parsed) == ["a.jsonl", "a.jsonl", "b.jsonl"]
