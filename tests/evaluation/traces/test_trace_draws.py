"""Several draws of the coins per prompt: each independent, recorded shard by shard, and resampled with their prompt."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decode.experiment import Experiment
from evaluation.competitor import make_competitor
from evaluation.sources.primed import clocked_rows
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from lm import Sampling
from tests.evaluation.commands import called, config_with, refusal, spelt
from tests.toys.small_pair import trace

WARM = Sampling(temperature=0.6)


def flags(directory: Path, num_draws: int) -> list[str]:
    settings = {"dir": directory, "prompts_per_shard": 2, "draws_per_prompt": num_draws, "num_dev": 3, "num_test": 1}
    settings |= {"max_new_tokens": 12, "max_draft_length": 3}
    decode = spelt({f"decode.{name}": value for name, value in settings.items()})
    return ["--config", "configs/tiny.yaml", f"--heads.dir={directory / 'heads'}", *decode]


def loaded(argv: list[str], dataset: str = "stories") -> Trace:
    return trace_folder(Experiment(config_with(argv))).load(dataset).dev


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("draws")
    called("trace", *flags(directory, 3))
    return directory


@pytest.mark.slow
def test_further_draws_keep_what_is_recorded_and_resume_to_the_same_bytes(tmp_path, recorded):
    called("trace", *flags(tmp_path, 1))
    before = contents(tmp_path)
    assert not any("draw" in Path(name).name for name in before)
    called("trace", *flags(tmp_path, 3))
    assert before.items() <= contents(tmp_path).items()
    assert contents(tmp_path) == contents(recorded)
    for name in ("rows/dev-00001-draw2.parquet.json", "signals/dev-00000-draw1.safetensors"):
        (tmp_path / "trace" / "stories" / name).unlink()
    called("trace", *flags(tmp_path, 3))
    assert contents(tmp_path) == contents(recorded)


def test_a_flipped_byte_of_a_trace_is_named_and_its_shard_recorded_again(tmp_path, recorded, capsys):
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    path = tmp_path / "trace" / "stories" / "signals" / "dev-00000-draw1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path.name} is corrupted: its sha256 .*acceptance-heads trace"):
        loaded(flags(tmp_path, 3))
    called("trace", *flags(tmp_path, 3))
    assert f"{path} is corrupted" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_draws_are_other_responses_and_coins_for_the_same_prompts(recorded):
    one, three = loaded(flags(recorded, 1)), loaded(flags(recorded, 3))
    assert three.rows[:3] == one.rows
    assert three.prompt_of_row.tolist() == [0, 1, 2] * 3
    assert (three.num_prompts, clocked_rows(three, 3)) == (3, [0, 1, 2])
    for prompt in range(3):
        draws = [three.rows[row] for row in (three.prompt_of_row == prompt).nonzero()[0]]
        assert len({row.prompt_ids for row in draws}) == 1
        assert len({row.response_ids for row in draws}) > 1
    assert len({tuple(row.response_ids for row in three.rows[first : first + 3]) for first in (0, 3, 6)}) == 3


def test_other_settings_and_draws_that_would_be_equal_are_refused(tmp_path, recorded, capsys):
    directory = shutil.copytree(recorded, tmp_path / "recorded")
    path = directory / "trace" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("generator") == "PCG64DXSM"  # traces recorded by torch's generator have no such entry
    path.write_text(json.dumps(manifest))
    message = refusal(capsys, "trace", *flags(directory, 4))
    assert "differs in generator: None there, 'PCG64DXSM' in this run" in message
    assert f"delete {directory / 'trace'}" in message
    greedy = refusal(capsys, "trace", *flags(tmp_path / "new", 2), "--pair.sampling.temperature", "0")
    assert "decode.draws_per_prompt is 2" in greedy
    assert not (tmp_path / "new").exists()


def test_a_prompts_turns_belong_together_and_an_id_may_hold_the_mark_of_a_turn(tmp_path):
    lines = [{"id": f"set#{i}", "prompt": f"Tom has {i} pens.", "category": f"kind {i % 2}"} for i in range(40)]
    lines.append({"id": "talk", "turns": ["Tom has 3 pens.", "Ann has 4."], "category": "talk"})
    path, splits = tmp_path / "prompts.jsonl", tmp_path / "splits.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    splits.write_text(json.dumps({"train": [], "dev": ["talk", "set#2", "set#3"], "test": ["set#1"]}))
    argv = [*flags(tmp_path, 1), "--data.prompts", str(path), "--data.split_ids", str(splits)]
    called("trace", *argv)
    dev = loaded(argv, "prompts")
    categories = {row.id: row.category for row in dev.rows}
    assert categories == {"talk": "talk", "talk#2": "talk", "set#2": "kind 0", "set#3": "kind 1"}
    numbers = dict(zip([row.id for row in dev.rows], dev.prompt_of_row.tolist(), strict=True))
    assert numbers["talk"] == numbers["talk#2"]
    assert dev.num_prompts == 3


def test_amounts_of_rows_are_summed_by_prompt():
    def renamed(*names: str) -> Trace:
        part = trace(WARM).select(range(len(names)))
        ids = [dict(zip(("dataset", "id"), name.split("/"), strict=True)) for name in names]
        return replace(part, rows=tuple(replace(row, **own) for row, own in zip(part.rows, ids, strict=True)))

    assert renamed("a/1", "a/2", "b/1", "b/2").num_prompts == 4
    competitor = make_competitor("fixed_length", "fixed_length", {"k": [1, 2]})
    played = replay_settings(renamed("s/b", "s/a", "s/a#2", "s/a#3", "s/c#2", "s/b"), competitor.policy)
    amounts = np.array([[1, 2, 4, 8, 16, 32], [1, 1, 1, 1, 1, 1]])
    assert played.per_prompt(amounts).tolist() == [[33, 14, 16], [2, 3, 1]]
