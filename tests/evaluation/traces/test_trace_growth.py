"""A trace grows: full shards stay byte for byte, and only what is new is recorded."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from decode.experiment import Experiment
from evaluation.traces.recording import TraceFolder, trace_folder
from store.shards import sidecar_path
from tests.evaluation.commands import called, config_with, refusal, spelt

SMALL = {"num_dev": 3, "num_test": 2, "draws_per_prompt": 1}
LARGE = {"num_dev": 5, "num_test": 5, "draws_per_prompt": 2}


def flags(directory: Path, **counts: int) -> list[str]:
    settings = {"dir": directory, "prompts_per_shard": 2, "max_new_tokens": 12, "max_draft_length": 3, **counts}
    decode = spelt({f"decode.{name}": value for name, value in settings.items()})
    hot = ["--pair.sampling.temperature", "1.5"]  # so that drafts leave the responses
    return ["--config", "configs/tiny.yaml", f"--heads.dir={directory / 'heads'}", *hot, *decode]


def folder(directory: Path, **counts: int) -> TraceFolder:
    return trace_folder(Experiment(config_with(flags(directory, **counts))))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def parsed(directory: Path) -> dict[str, Any]:
    """The contents of files; the entries of sidecars may be in any order."""
    files = contents(directory).items()
    return {name: json.loads(content) if name.endswith(".json") else content for name, content in files}


def times_of(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*-0*")}


def in_format_1(directory: Path, **counts: int) -> None:
    """Turn a trace into one as earlier versions recorded it: a chain of hashes per split, no digests."""
    shards = folder(directory, **counts).shards
    path = directory / "trace" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["split"]
    hashes, num_shards = dict[str, str](), dict[str, int]()
    for key, spec in shards.items():
        if not key.draw:
            name = f"{key.dataset}.{key.split}"
            hashes[name] = sha256((hashes.get(name, "") + repr(spec.prompts)).encode()).hexdigest()
            num_shards[name] = num_shards.get(name, 0) + 1
    path.write_text(json.dumps({**manifest, "format": 1, "prompts": hashes, "recorded": {"num_shards": num_shards}}))
    for sidecar in directory.glob("trace/*/rows/*.json"):
        facts = json.loads(sidecar.read_text())
        del facts["prompts"]
        sidecar.write_text(json.dumps(facts, indent=1))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[Path]:
    directories = [tmp_path_factory.mktemp("recorded") for _ in (SMALL, LARGE)]
    for directory, counts in zip(directories, (SMALL, LARGE), strict=True):
        called("trace", *flags(directory, **counts))
    return directories


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    ("grown", "recorded_again"),
    [
        ({"num_test": 5}, set()),
        ({"num_dev": 5}, {"dev-00001"}),
        ({"num_dev": 4}, {"dev-00001"}),
        ({"draws_per_prompt": 2}, set()),
        (LARGE, {"dev-00001"}),
    ],
    ids=["test", "dev", "within_a_shard", "draws", "all"],
)
def test_a_larger_run_keeps_full_shards_and_gets_the_trace_of_a_fresh_one(
    grown, recorded_again, is_old, tmp_path, recorded
):
    small, large = recorded
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    if is_old:
        in_format_1(tmp_path, **SMALL)
    before = times_of(tmp_path / "trace")
    called("trace", *flags(tmp_path, **(SMALL | grown)))
    after = times_of(tmp_path / "trace")
    changed = {name for name in before if before[name] != after[name]}
    if is_old:  # digests were added to sidecars
        changed = {name for name in changed if not name.endswith(".json")}
    assert {Path(name).name.split(".")[0] for name in changed} == recorded_again
    shards, fresh = parsed(tmp_path / "trace"), parsed(large / "trace")
    assert shards.keys() <= fresh.keys()
    if grown is LARGE:
        assert shards == fresh
    for name in shards.keys() - {"manifest.json"}:  # dev-00001 is short unless dev grows
        if "num_dev" in grown or "dev-00001" not in name:
            assert shards[name] == fresh[name], name


def test_a_smaller_run_reads_the_first_prompts_and_draws_and_changes_no_shard(tmp_path, recorded, capsys):
    large = recorded[1]
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    called("trace", *flags(tmp_path, **(LARGE | {"num_test": 3, "draws_per_prompt": 1})))
    assert contents(tmp_path) == contents(large)
    every = folder(tmp_path, **LARGE).load("stories")
    fewer = folder(tmp_path, **(LARGE | {"num_test": 3, "draws_per_prompt": 1})).load("stories")
    assert fewer.test.rows == every.test.rows[:3]
    assert fewer.dev.rows == every.dev.rows[:5]
    assert fewer.test.num_positions == sum(len(row.response_ids) for row in fewer.test.rows)
    in_format_1(tmp_path, **LARGE)  # its prompts can no longer be recognised
    message = refusal(capsys, "trace", *flags(tmp_path, **(LARGE | {"num_test": 3})))
    assert "differs in prompts.stories.test" in message


def test_a_run_that_was_killed_while_the_trace_grew_resumes_to_the_same_bytes(tmp_path, recorded):
    small, large = recorded
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    grown = shutil.copytree(large, tmp_path / "grown") / "trace"
    shutil.copy(grown / "manifest.json", tmp_path / "trace")
    # killed between the two files of the short shard: its new signals are there, and its old rows lost their sidecar
    for name in ("dev-00001.safetensors", "dev-00001.safetensors.json"):
        shutil.copy(grown / "stories" / "signals" / name, tmp_path / "trace" / "stories" / "signals" / name)
    sidecar_path(tmp_path / "trace" / "stories" / "rows" / "dev-00001.parquet").unlink()
    (tmp_path / "trace" / "stories" / "rows" / ".test-00001.parquet.99999999.partial").write_bytes(b"half")
    shutil.rmtree(tmp_path / "grown")
    called("trace", *flags(tmp_path, **LARGE))
    assert contents(tmp_path) == contents(large)


def test_rows_of_an_earlier_recording_are_incomplete_while_their_signals_are_replaced(tmp_path, recorded):
    """The rows lose their sidecar first, so that a kill leaves no pair of files from two recordings."""
    directory = shutil.copytree(recorded[0], tmp_path / "grown")
    signals = directory / "trace" / "stories" / "signals"
    (path := signals / "dev-00001.safetensors").unlink()
    path.mkdir()  # the write of the signals fails
    with pytest.raises(OSError, match=r"dev-00001\.safetensors"):
        folder(directory, **LARGE).complete()
    assert not (directory / "trace" / "stories" / "rows" / "dev-00001.parquet.json").exists()


def test_a_trace_does_not_grow_by_other_prompts(tmp_path, capsys):
    path, splits = tmp_path / "prompts.jsonl", tmp_path / "splits.json"
    splits.write_text(json.dumps({"dev": [0, 1, 2, 3], "test": [4]}))
    argv = [*flags(tmp_path / "decode", num_test=1), f"--data.prompts={path}", f"--data.split_ids={splits}"]
    for number, name in ((3, "Ann"), (4, "Ben")):
        prompts = [f"{name} has 3 pens.", *(f"Tom has {number} pens." for number in range(5))]
        path.write_text("".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(prompts)))
        own = [*argv, f"--decode.num_dev={number}"]
        if name == "Ann":
            called("trace", *own)
    before = contents(tmp_path / "decode")
    message = refusal(capsys, "trace", *own)
    assert "recorded from other prompts than prompts has" in message
    assert f"delete {tmp_path / 'decode' / 'trace'}" in message
    assert contents(tmp_path / "decode") == before


def test_a_transfer_set_grows_and_its_recorded_shards_stay(tmp_path, capsys):
    path = tmp_path / "other.jsonl"

    def write(numbers: range) -> None:
        path.write_text("".join(json.dumps({"id": i, "prompt": f"Tom has {i} pens."}) + "\n" for i in numbers))

    argv = [*flags(tmp_path / "decode", num_dev=4, num_test=4), f"--decode.datasets=['{path}']"]
    write(range(12))
    called("trace", *argv)
    manifest = tmp_path / "decode" / "trace" / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert facts["split_by"]["other"]["num_first"] == 12
    # an earlier version noted nothing: a run with the unchanged file adds it
    manifest.write_text(json.dumps({key: value for key, value in facts.items() if key != "split_by"}))
    called("trace", *argv)
    assert json.loads(manifest.read_text())["split_by"] == facts["split_by"]
    before = contents(tmp_path / "decode" / "trace" / "other")
    write(range(60))
    grown = [argument.replace("num_dev=4", "num_dev=9") for argument in argv]
    called("trace", *grown)
    after = contents(tmp_path / "decode" / "trace" / "other")
    assert {name: after[name] for name in before} == before
    assert len(after) > len(before)
    write(range(1, 60))  # other prompts than those of the record
    assert "was recorded from other prompts than other has now" in refusal(capsys, "trace", *grown)
