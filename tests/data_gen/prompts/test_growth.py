"""A set of prompts grows: no prompt changes its split, and shards of the earlier prompts stay byte for byte."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import DataConfig
from data_gen.pipeline.command import make
from data_gen.pipeline.stages import settled
from data_gen.prompts.sets import SPLITS, load_prompts, split_by
from tests.data_gen.on_disk import files_of, with_data


def write(path: Path, numbers: range, *, every: str = "Say it {}.") -> str:
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": every.format(i)}) + "\n" for i in numbers))
    return str(path)


def pools(config: DataConfig) -> dict[str, list[str]]:
    """Ids of all prompts of each split that has any."""
    data, every = settled(config, say=None), dict.fromkeys(SPLITS, 10**9)
    if 0 in (data.split_weights or ()):
        every = {split: num for split, num in every.items() if data.split_weights[SPLITS.index(split)]}
    ids: dict[str, list[str]] = {split: [] for split in SPLITS}
    for split, num in every.items():
        prompts = load_prompts(replace(data, **{f"num_{split}": num}), split, may_be_fewer=True)
        ids[split] = [prompt.id for prompt in prompts]
    return ids


def first_run(config: DataConfig) -> None:
    """Leave the manifest of a first run."""
    data = settled(config, say=None)
    facts = {"seed": data.seed, "split_weights": data.split_weights}
    Path(data.dir).mkdir(exist_ok=True)
    (Path(data.dir) / "manifest.json").write_text(json.dumps(facts | {"split_by": split_by(data)}))


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"num_train": 200, "num_dev": 20, "num_test": 10}, (40, 10, 2)),
        ({"num_train": None, "num_dev": 100, "num_test": 80}, (220, 100, 80)),
        ({"num_train": None, "num_dev": 100, "num_test": 0}, (300, 100, 0)),
        ({"num_train": 10, "num_dev": 0, "num_test": 0, "split_weights": (1, 0, 0)}, (1, 0, 0)),
        ({"num_train": 9, "num_dev": 1, "num_test": 1, "split_ids": "ids.json"}, None),
    ],
)
def test_added_prompts_join_every_split_in_its_share_and_move_no_prompt(settings, shares, tmp_path, monkeypatch):
    def grow(number: int) -> str:
        lists = {name: [f"p{i}" for i in range(start, number, 5)] for start, name in enumerate(("dev", "test"))}
        Path("ids.json").write_text(json.dumps(lists))
        return write(tmp_path / "prompts.jsonl", range(number))

    monkeypatch.chdir(tmp_path)
    config = DataConfig(dir=str(tmp_path / "data"), prompts=grow(400), **settings)
    before = pools(config)
    first_run(config)
    assert pools(config) == before
    for number in (440, 4000):  # grown twice
        grow(number)
        after = pools(config)
        assert sum(map(len, after.values())) == number
        for split in SPLITS:
            assert after[split][: len(before[split])] == before[split]
    numbers = [int(name.removeprefix("p")) for name in after["train"][len(before["train"]) :]]
    assert numbers == sorted(numbers), "added prompts keep their own order"
    for split, share in zip(SPLITS, shares or (3, 1, 1), strict=True):
        share /= sum(shares or (3, 1, 1))
        num = len(after[split]) - len(before[split])
        assert abs(num - 3600 * share) <= 5 * (3600 * share * (1 - share)) ** 0.5  # false alarm: below 1e-6


def test_an_added_duplicate_is_left_out_and_the_earlier_prompt_stays(tmp_path):
    path = write(tmp_path / "prompts.jsonl", range(40))
    config = DataConfig(dir=str(tmp_path / "data"), prompts=path, num_train=None, num_dev=10, num_test=10)
    before = pools(config)
    first_run(config)
    with Path(path).open("a") as file:  # ids that come before those of the earlier prompts
        file.writelines(json.dumps({"id": f"a{i}", "prompt": f"Say it {i}."}) + "\n" for i in range(41))
    after = pools(config)
    counts = Counter(name for part in after.values() for name in part)
    assert counts == Counter([*(f"p{i}" for i in range(40)), "a40"])
    assert {split: [name for name in part if name != "a40"] for split, part in after.items()} == before


def test_data_grows_with_its_file_and_full_shards_stay(toy_config, tmp_path, capsys):
    path = write(tmp_path / "prompts.jsonl", range(12))
    config = with_data(toy_config, prompts=path, num_train=None, num_dev=2, num_test=2, split_weights=None)
    make(config)
    first = files_of(config.data.dir)
    manifest = json.loads(Path(config.data.dir, "manifest.json").read_text())
    assert manifest["split_by"]["prompts"]["num_first"] == 12
    write(Path(path), range(30))
    make(config)
    grown = files_of(config.data.dir)
    changed = {name for name, content in first.items() if grown[name] != content}
    assert {Path(name).name.split(".")[0] for name in changed} <= {"train-00002"}, "the short last shard"
    assert len(grown) > len(first)
    assert json.loads(Path(config.data.dir, "manifest.json").read_text())["split_by"] == manifest["split_by"]
    lines = Path(path).read_text().splitlines(keepends=True)
    Path(path).write_text("".join([json.dumps({"id": "new", "prompt": "A line above."}) + "\n", *lines]))
    with pytest.raises(ValueError, match=r"made from other prompts than .* add new ones only after the last"):
        make(config)
    assert files_of(config.data.dir) == grown


def test_data_of_an_earlier_version_grows_once_a_run_has_noted_its_splits(toy_config, tmp_path):
    path = write(tmp_path / "prompts.jsonl", range(12))
    config = with_data(toy_config, prompts=path, num_train=None, num_dev=2, num_test=2, split_weights=None)
    make(config)
    manifest = Path(config.data.dir, "manifest.json")
    facts = json.loads(manifest.read_text())
    old = {name: value for name, value in facts.items() if name != "split_by"}
    manifest.write_text(json.dumps(old))
    write(Path(path), range(30))
    with pytest.raises(ValueError, match="made from other prompts"):
        make(config)
    assert json.loads(manifest.read_text()) == old, "a refused run notes nothing"
    write(Path(path), range(12))
    make(config)
    assert json.loads(manifest.read_text())["split_by"] == facts["split_by"]
    write(Path(path), range(30))
    make(config)


@pytest.mark.parametrize("damaged", [[], 7, {"prompts": {"path": "x"}}, {"prompts": []}])
def test_a_damaged_entry_is_named(damaged, tmp_path):
    config = DataConfig(dir=str(tmp_path), prompts=write(tmp_path / "prompts.jsonl", range(9)), split_weights=(1, 1, 1))
    (tmp_path / "manifest.json").write_text(json.dumps({"split_by": damaged}))
    with pytest.raises(ValueError, match=r"manifest\.json: split_by is .* but must have num_first, .*restore"):
        load_prompts(config, "dev")
