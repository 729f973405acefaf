"""Several draws of the coins per prompt: each independent, recorded shard by shard, and resampled with their prompt."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.command import config_of, parser_for, run
from decode.experiment import Experiment
from evaluation.__main__ import COMMANDS
from evaluation.competitor import make_competitor
from evaluation.contest import Arm, Result, result_of
from evaluation.gain import Splits
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace, TraceRow, join_traces
from lm import Sampling
from tests.toys.small_pair import trace

SMALL = ["--decode.num_dev=3", "--decode.num_test=1", "--decode.max_new_tokens=12", "--decode.max_draft_length=3"]
WARM = Sampling(temperature=0.6)


def flags(directory: Path, num_draws: int) -> list[str]:
    where = [f"--decode.dir={directory}", "--decode.prompts_per_shard=2", f"--decode.draws_per_prompt={num_draws}"]
    return ["--config", "configs/tiny.yaml", "--heads.dir", str(directory / "heads"), *where, *SMALL]


def loaded(directory: Path, num_draws: int) -> Splits[Trace]:
    parser = parser_for(COMMANDS["trace"])
    return trace_folder(Experiment(config_of(parser, parser.parse_args(flags(directory, num_draws))))).load("stories")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Three draws at once."""
    directory = tmp_path_factory.mktemp("draws")
    run(COMMANDS, argv=["trace", *flags(directory, 3)])
    return directory


@pytest.mark.slow
def test_further_draws_keep_what_is_there_and_resume_to_the_same_bytes(tmp_path, recorded):
    run(COMMANDS, argv=["trace", *flags(tmp_path, 1)])
    before = contents(tmp_path)
    assert not any("draw" in Path(name).name for name in before)
    run(COMMANDS, argv=["trace", *flags(tmp_path, 3)])
    after = contents(tmp_path)
    assert before.items() <= after.items()
    assert after == contents(recorded)
    for name in ("rows/dev-00001-draw2.parquet.json", "signals/dev-00000-draw1.safetensors"):
        (tmp_path / "trace" / "stories" / name).unlink()
    run(COMMANDS, argv=["trace", *flags(tmp_path, 3)])
    assert contents(tmp_path) == after


def test_a_flipped_byte_of_a_trace_is_named_and_its_shard_recorded_again(tmp_path, recorded, capsys):
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    path = tmp_path / "trace" / "stories" / "signals" / "dev-00000-draw1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path.name} is corrupted: its sha256 .*acceptance-heads trace"):
        loaded(tmp_path, 3)
    run(COMMANDS, argv=["trace", *flags(tmp_path, 3)])
    assert f"{path} is corrupted" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_draws_are_other_responses_and_coins_for_the_same_prompts(recorded):
    one, three = loaded(recorded, 1).dev, loaded(recorded, 3).dev
    assert three.rows[:3] == one.rows
    assert three.prompt_of_row.tolist() == [0, 1, 2] * 3
    assert (three.num_prompts, three.first_draws) == (3, [0, 1, 2])
    for prompt in range(3):
        draws = [three.rows[row] for row in (three.prompt_of_row == prompt).nonzero()[0]]
        assert len({row.prompt_ids for row in draws}) == 1
        assert len({row.response_ids for row in draws}) > 1
    assert len({tuple(row.response_ids for row in three.rows[first : first + 3]) for first in (0, 3, 6)}) == 3


def test_a_trace_of_another_generator_is_refused_and_its_folder_named(tmp_path, recorded, capsys):
    directory = tmp_path / "there"
    shutil.copytree(recorded, directory)
    path = directory / "trace" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("generator") == "PCG64DXSM"  # traces recorded by torch's generator have no such entry
    path.write_text(json.dumps(manifest))
    with pytest.raises(SystemExit):
        run(COMMANDS, argv=["trace", *flags(directory, 4)])
    complaint = capsys.readouterr().err
    assert "differs in generator: None there, 'PCG64DXSM' in this run" in complaint
    assert f"delete {directory / 'trace'}" in complaint


def test_of_greedy_sampling_more_than_one_draw_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(COMMANDS, argv=["trace", *flags(tmp_path, 2), "--pair.sampling.temperature", "0"])
    assert "decode.draws_per_prompt is 2" in capsys.readouterr().err
    assert not contents(tmp_path)


def test_an_id_may_hold_the_mark_of_a_turn(tmp_path):
    lines = [
        {"id": f"set#{number}", "prompt": f"Tom has {number} pens.", "category": f"kind {number % 2}"}
        for number in range(40)
    ]
    lines.append({"id": "talk", "turns": ["Tom has 3 pens.", "Ann has 4."], "category": "talk"})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": [], "dev": ["talk", "set#2", "set#3"], "test": ["set#1"]}))
    own = ["--data.prompts", str(path), "--data.split_ids", str(splits)]
    run(COMMANDS, argv=["trace", *flags(tmp_path, 1), *own])
    parser = parser_for(COMMANDS["trace"])
    dev = (
        trace_folder(Experiment(config_of(parser, parser.parse_args([*flags(tmp_path, 1), *own])))).load("prompts").dev
    )
    assert {row.id: row.category for row in dev.rows} == {
        "talk": "talk",
        "talk#2": "talk",
        "set#2": "kind 0",
        "set#3": "kind 1",
    }
    names = dict(zip([row.id for row in dev.rows], dev.prompt_of_row.tolist(), strict=True))
    assert names["talk"] == names["talk#2"]
    assert dev.num_prompts == 3


def test_prompts_of_two_datasets_may_have_one_id():
    traced = trace(WARM)
    parts = [replace(traced, rows=tuple(replace(row, dataset=name) for row in traced.rows)) for name in ("a", "b")]
    assert join_traces(parts).num_prompts == 2 * traced.num_prompts


def result(traced: Trace, k: int) -> Result:
    competitor = make_competitor("fixed_length", "fixed_length", {"k": [k]})
    played = replay_settings(traced, competitor.policy)
    return result_of(Arm(competitor, played, played), 0, Times.constant(0.2, 1.0))


def test_the_interval_resamples_prompts_so_that_equal_draws_add_no_certainty():
    once = trace(WARM)
    both = [result(traced, 4).over(result(traced, 1)) for traced in (once, join_traces([once, once, once]))]
    assert both[1] == pytest.approx(both[0], rel=1e-9)
    assert both[0].low < both[0].high


def test_amounts_of_rows_become_those_of_their_prompts():
    rows = tuple(TraceRow(name, "", (1,), (1,), 1) for name in ("b", "a", "a#2", "a#3", "c#2", "b"))
    traced = trace(WARM).select(range(6))
    traced = replace(
        traced, rows=tuple(replace(row, id=named.id) for row, named in zip(traced.rows, rows, strict=True))
    )
    replayed = replay_settings(traced, make_competitor("fixed_length", "fixed_length", {"k": [1, 2]}).policy)
    amounts = np.array([[1, 2, 4, 8, 16, 32], [1, 1, 1, 1, 1, 1]])
    assert replayed.per_prompt(amounts).tolist() == [[33, 14, 16], [2, 3, 1]]
