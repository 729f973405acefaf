"""Several processes make one run: the bytes are those of one process, whoever is killed, and whatever starts when."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.store import manifest
from data_gen.store.rows import read_rows
from store.shards import list_shards, rows_path
from tests.cases import first_fast
from tests.data_gen.on_disk import files_of, in_a_child
from tests.data_gen.pipeline.test_resume import make_and_die


def started(work: Callable[[], object], *, told: str | Path = os.devnull) -> int:
    """The id of a forked child that does `work`; its status is 2 after a user's mistake, whose text goes to a file."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except ValueError as error:
            Path(told).write_text(str(error))
            status = 2
        finally:
            os._exit(status)
    return child


def ended(children: Sequence[int]) -> list[int]:
    """The exit codes of the children; below 0 the signal that killed one."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def ranks(config: Config, world_size: int, only: Sequence[int] | None = None, **flags) -> list[int]:
    """The ids of processes that make the run together, at the same time."""
    chosen = range(world_size) if only is None else only
    return [started(partial(make, config, rank=rank, world_size=world_size, **flags)) for rank in chosen]


def manifest_of(directory: str | Path) -> Mapping[str, object]:
    return json.loads(Path(directory, "manifest.json").read_text())


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {}),
        pytest.param(3, {"mode": "sequential"}, marks=pytest.mark.slow),
        pytest.param(7, {"mixes": 2}, marks=pytest.mark.slow),
    ],
    ids=["2", "3 stage by stage", "7, of which two have no shard"],
)
def test_n_processes_write_the_bytes_of_one(toy_config, with_data, tmp_path, world_size, changes):
    """Rows, features, sidecars, errors.jsonl, and the manifest."""
    one, many = (with_data(toy_config, dir=str(tmp_path / name), **changes) for name in ("one", "many"))
    make(one)
    assert ended(ranks(many, world_size)) == [0] * world_size
    assert files_of(many.data.dir) == files_of(one.data.dir)
    assert manifest_of(many.data.dir) == manifest_of(one.data.dir)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["together", "sequential"])
def test_six_ranks_of_which_one_is_killed_at_any_moment_write_the_bytes_of_one(toy_config, with_data, tmp_path, mode):
    """One gets SIGKILL at a random moment and is started again, while the others go on; three times."""
    changes = {"rows_per_shard": 1, "mode": mode}
    one = with_data(toy_config, dir=str(tmp_path / "one"), **changes)
    start = time.monotonic()
    make(one)
    wait_s, whole = time.monotonic() - start, files_of(one.data.dir)
    for attempt in range(3):
        many = with_data(toy_config, dir=str(tmp_path / f"many{attempt}"), **changes)
        children = ranks(many, 6)
        victim, moment_s = random.Random().randrange(6), random.Random().uniform(0, 2 * wait_s)
        time.sleep(moment_s)
        os.kill(children[victim], signal.SIGKILL)  # a child that has ended is not waited for yet, so the id is its own
        codes = ended([children[victim], *ranks(many, 6, only=[victim])])
        codes += ended([child for child in children if child != children[victim]])
        assert set(codes) <= {0, -signal.SIGKILL}
        assert codes[1:] == [0] * 6
        assert files_of(many.data.dir) == whole, f"rank {victim} was killed after {moment_s:.3f} s"


@pytest.mark.parametrize("write", first_fast([3, 1, 6], 1))
def test_a_rank_killed_in_the_middle_of_a_write_leaves_nothing_that_stays(toy_config, with_data, tmp_path, write):
    """It has begun the manifest, or a shard. Another rank touches none of that; the next run of this one, or of its
    manifest, clears it.
    """
    one = with_data(toy_config, dir=str(tmp_path / "one"))
    make(one)
    flags = {"rank": 1, "world_size": 2}
    assert os.WTERMSIG(in_a_child(lambda: make_and_die(toy_config, write, **flags))) == signal.SIGKILL
    assert list(Path(toy_config.data.dir).rglob(".*.partial"))
    make(toy_config, rank=0, world_size=2)
    make(toy_config, **flags)
    assert files_of(toy_config.data.dir) == files_of(one.data.dir)


def test_a_rank_leaves_the_unfinished_files_of_another_alone(toy_config):
    """They belong to a process that is writing them."""
    folder = Path(toy_config.data.dir) / "rows"
    folder.mkdir(parents=True)
    theirs, ours = (folder / f".{name}.parquet.{os.getpid()}.partial" for name in ("train-00001", "train-00002"))
    theirs.touch()
    ours.touch()
    make(toy_config, rank=0, world_size=2)
    assert theirs.is_file()
    assert not ours.exists()


def test_a_rank_makes_its_own_shards_and_the_last_accounts_for_all(toy_config, capsys):
    directory = Path(toy_config.data.dir)
    make(toy_config, rank=1, world_size=2)
    assert sorted(path.stem for path in directory.glob("rows/*.parquet")) == ["test-00000", "train-00001"]
    said = capsys.readouterr().out
    assert "rank 1 of 2 makes 2 of 5 shards" in said
    assert "rank 1 of 2 made 2 shards (stages: together); 3 shards are incomplete, the first is train-00000" in said
    assert not (directory / "errors.jsonl").exists()
    make(toy_config, rank=0, world_size=2)
    assert "12 rows" in capsys.readouterr().out
    assert (directory / "errors.jsonl").is_file()


@pytest.mark.slow
def test_ranks_grow_a_run_and_a_smaller_one_goes_by_the_same_shares(toy_config, with_data, tmp_path):
    """The first part is of one process, the second of three; then a lost shard beyond what is asked for stays lost."""
    one = with_data(toy_config, dir=str(tmp_path / "one"))
    few = {"num_train": 4, "num_test": 2}
    make(with_data(one, **few))
    make(one)
    make(with_data(toy_config, **few))
    assert ended(ranks(toy_config, 3)) == [0] * 3
    whole = files_of(one.data.dir)
    assert files_of(toy_config.data.dir) == whole
    assert manifest_of(toy_config.data.dir)["split"] == manifest_of(one.data.dir)["split"]
    last = len(list_shards(one.data.dir, "train")) - 1
    for index in (0, last):
        rows_path(toy_config.data.dir, "train", index).unlink()
    assert ended(ranks(with_data(toy_config, **few), 3)) == [0] * 3
    after = files_of(toy_config.data.dir)
    assert {name for name in whole if name not in after} == {f"rows/train-{last:05d}.parquet"}
    assert ended(ranks(toy_config, 3)) == [0] * 3
    assert files_of(toy_config.data.dir) == whole


def test_of_ranks_with_different_settings_one_settles_the_manifest_and_the_others_are_refused(
    toy_config, with_data, tmp_path
):
    """They start at the same moment in an empty directory on a slow disk, each with a seed of its own."""

    def work(rank: int) -> None:
        write_atomic = manifest.write_atomic
        manifest.write_atomic = lambda path, content: (time.sleep(0.5), write_atomic(path, content))
        make(with_data(toy_config, seed=rank), rank=rank, world_size=4)

    codes = ended([started(partial(work, rank), told=tmp_path / f"{rank}.error") for rank in range(4)])
    assert sorted(codes) == [0, 2, 2, 2]
    winner = codes.index(0)
    assert manifest_of(toy_config.data.dir)["seed"] == winner
    for rank in {0, 1, 2, 3} - {winner}:
        assert f"differs in seed: {winner} there, {rank} in this run" in (tmp_path / f"{rank}.error").read_text()
    made = [path.stem for path in Path(toy_config.data.dir).glob("rows/*.parquet")]
    assert len(made) == len(range(winner, 5, 4)), "only the winner made shards"


@pytest.mark.slow
def test_ranks_try_errors_again_each_its_own(toy_config, with_data, tmp_path):
    """Responses that the file lacked are there later; shards without an error stay as they are."""
    lines = [json.dumps({"id": f"p{index}", "response_ids": [5 + index, 1]}) + "\n" for index in range(12)]
    settings = {"source": "file", "max_error_share": 1.0, "rows_per_shard": 1}
    one, many = (
        with_data(toy_config, dir=str(tmp_path / name), responses=str(tmp_path / f"{name}.jsonl"), **settings)
        for name in ("one", "many")
    )
    Path(one.data.responses).write_text("".join(lines[:8] + lines[8:]))
    make(one)
    Path(many.data.responses).write_text("".join(lines[:8]))
    assert ended(ranks(many, 3)) == [0] * 3
    failed = [json.loads(line) for line in Path(many.data.dir, "errors.jsonl").read_text().splitlines()]
    assert {problem["id"] for problem in failed} == {"p8", "p9", "p10", "p11"}
    Path(many.data.responses).write_text("".join(lines))
    times = {path: path.stat().st_mtime_ns for path in Path(many.data.dir).glob("rows/*.parquet")}
    assert ended(ranks(many, 3, retry_errors=True)) == [0] * 3
    assert files_of(many.data.dir) == files_of(one.data.dir)
    again = {path.stem for path, time_ns in times.items() if path.stat().st_mtime_ns != time_ns}
    assert again == {problem["shard"] for problem in failed}


@pytest.mark.slow
def test_each_stage_by_other_numbers_of_processes_ends_in_the_bytes_of_one(toy_config, with_data, tmp_path):
    """As where the target wants other GPUs than the draft; a stage does not begin before the one before it is made."""
    one, many = (with_data(toy_config, dir=str(tmp_path / name), mode="sequential") for name in ("one", "many"))
    make(one)
    assert ended(ranks(many, 2, stages="respond")) == [0, 0]
    with pytest.raises(
        ValueError, match=r"^stage target needs stage draft, which is missing for 5 shards.*train-00000"
    ):
        make(many, stages="target")
    assert ended(ranks(many, 3, stages="draft")) == [0] * 3
    make(many, stages="target")
    assert files_of(many.data.dir) == files_of(one.data.dir)
    assert len(read_rows(rows_path(many.data.dir, "train", 0))) == 3
