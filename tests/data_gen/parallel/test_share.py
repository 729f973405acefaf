"""Who makes which shard: flags, launchers' variables, and processes that would share the shards otherwise."""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.pipeline.share import Share, share_of
from data_gen.responses.conversation import ShardSpec
from store.lock import LOCK, holder_of, only_writer
from tests.data_gen.processes import meanwhile

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "6", "SLURM_NPROCS": "6"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, Share(0, 1)),
        (TORCHRUN, Share(2, 4, 0, "torchrun")),
        (SLURM, Share(3, 6, 1, "srun")),
        (BATCH_SCRIPT, Share(0, 1)),
        (SLURM | TORCHRUN, Share(2, 4, 0, "torchrun")),
        (SLURM | {"RANK": "5"}, Share(3, 6, 1, "srun")),
        (TORCHRUN | {"RANK": "", "WORLD_SIZE": ""}, Share(0, 1)),
    ],
    ids=["none", "torchrun", "srun", "batch script", "torchrun in srun", "half of torchrun's in srun", "emptied"],
)
def test_the_share_is_what_the_launcher_says_and_everything_outside_of_one(environment, share):
    """srun has a step of several tasks. The batch script that calls it has a rank, too, and is one process."""
    assert share_of(None, None, environment) == share


def test_flags_win_over_the_variables_of_a_launcher():
    assert share_of(1, 3, SLURM | TORCHRUN) == Share(1, 3)
    assert share_of(0, 1, SLURM).is_whole


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((0, None), r"^--rank is given without --world_size; give both, such as --rank 0 --world_size 4$"),
        ((None, 4), r"^--world_size is given without --rank; give both"),
        ((4, 4), r"^--rank is 4 and --world_size 4; --rank must be from 0 to world_size - 1$"),
        ((-1, 4), r"^--rank is -1 and"),
        ((0, 0), r"^--rank is 0 and --world_size 0; --rank"),
    ],
)
def test_wrong_flags_are_refused_with_what_to_give(toy_config, flags, says):
    rank, world_size = flags
    with pytest.raises(ValueError, match=says):
        make(toy_config, rank=rank, world_size=world_size)
    assert not Path(toy_config.data.dir).exists()


@pytest.mark.parametrize("changes", [{"RANK": "4"}, {"RANK": "x"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "first"}])
def test_variables_that_are_no_rank_are_refused_with_the_way_out(changes):
    with pytest.raises(ValueError, match=r"^RANK is .* and WORLD_SIZE is .* environment.*unset them, or pass --rank"):
        share_of(None, None, TORCHRUN | changes)


def test_ray_and_several_processes_exclude_each_other(toy_config, with_data, monkeypatch):
    """Ray's driver shares the shards out; under torchrun there would be several drivers."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"engine is ray, .* is rank 2 of 4 \(from torchrun\); set .*--rank 0 --w"):
        make(with_data(toy_config, engine="ray"))


def test_every_shard_is_of_one_process():
    specs = [ShardSpec("train", index, ()) for index in range(14)]
    shares = [Share(rank, 4).of(specs) for rank in range(4)]
    assert [spec.index for spec in shares[1]] == [1, 5, 9, 13]
    assert sorted(chain.from_iterable(shares), key=lambda spec: spec.index) == specs
    assert Share(5, 6).of(specs[:3]) == []


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "device"), [(4, 2, "cuda:2"), (4, 5, "cuda:1"), (4, 0, None), (1, 3, None), (0, 3, None)]
)
def test_processes_of_one_machine_take_its_gpus_in_turn(toy_config, monkeypatch, num_gpus, local_rank, device):
    """Where a launcher leaves one GPU visible to each, or nobody says which process of the machine it is, the first
    is its own.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    placed = Share(6, 8, local_rank, "torchrun").on_its_gpu(toy_config.pair)
    assert (placed.target.device_map, placed.draft.device_map) == (device, device)
    mapped = replace(toy_config.pair, target=replace(toy_config.pair.target, device_map="auto"))
    assert Share(6, 8, local_rank, "torchrun").on_its_gpu(mapped).target.device_map == "auto"


@pytest.fixture
def at_work(toy_config):
    """A process that is rank 1 of 3, and has had its first turn."""

    def work() -> None:
        share, directory = Share(1, 3), toy_config.data.dir
        with share.writing(directory):
            with share.turn(directory):
                share.refuse_others(directory, toy_config.data)
            signal.pause()

    lock = Path(toy_config.data.dir) / f"{LOCK}-1-of-3"
    with meanwhile(work, until=lambda: lock.is_file() and '"requested"' in lock.read_text()) as pid:
        yield pid


@pytest.mark.parametrize("flags", [{}, {"rank": 0, "world_size": 1}, {"rank": 0, "world_size": 2}])
def test_processes_that_cut_the_run_otherwise_are_refused_while_a_rank_is_at_work(toy_config, at_work, flags):
    before = sorted(path.name for path in Path(toy_config.data.dir).iterdir())
    with pytest.raises(
        ValueError,
        match=rf"data is in use by rank 1 of 3, process {at_work} on \S+ since 20.*this process --world_size 3 too",
    ):
        make(toy_config, **flags)
    assert sorted(path.name for path in Path(toy_config.data.dir).iterdir()) == before


def test_the_same_rank_twice_and_another_number_of_prompts_are_refused_while_a_rank_is_at_work(
    toy_config, with_data, at_work
):
    with pytest.raises(ValueError, match=rf"data is in use by process {at_work} "):
        make(toy_config, rank=1, world_size=3)
    with pytest.raises(ValueError, match=r"rank 1 of 3, .* num_test 8, 0 and 4 instead of 6, 0 and 4; give"):
        make(with_data(toy_config, num_train=6), rank=0, world_size=3)


def test_a_rank_waits_for_a_turn_and_not_for_a_run_of_one_process(toy_config, monkeypatch, capfd):
    monkeypatch.setattr("data_gen.pipeline.share._TURN_S", 1.2)
    lock = Path(toy_config.data.dir) / LOCK

    def work() -> None:
        with only_writer(toy_config.data.dir, setting="data.dir"):
            signal.pause()

    with (
        meanwhile(work, until=lambda: lock.is_file() and lock.read_text() != "") as pid,
        pytest.raises(ValueError, match=rf"data is in use by process {pid} .*; wait until it ends"),
    ):
        make(toy_config, rank=0, world_size=2)
    assert f"in use by process {pid} on" in capfd.readouterr().err.replace("waiting for it to finish", "", 1)


def test_of_ranks_that_end_at_once_exactly_the_last_accounts(tmp_path):
    """Each gives back its own lock before it looks for others, so that no two leave the account to each other."""
    shares, works, numbers = [Share(rank, 3) for rank in range(3)], [ExitStack() for _ in range(3)], []
    for share, work in zip(shares, works, strict=True):
        work.enter_context(share.writing(str(tmp_path)))
    for share, work in zip(shares, works, strict=True):
        with share.last_turn(str(tmp_path), work) as num_others:
            numbers.append(num_others)
    assert numbers == [2, 1, 0]
    assert [path.name for path in tmp_path.parent.iterdir() if path.name == tmp_path.name] == [], "nothing is left"


def test_the_lock_of_a_rank_that_was_killed_is_cleared_by_whoever_looks(toy_config: Config):
    lock = Path(toy_config.data.dir) / f"{LOCK}-5-of-6"

    def work() -> None:
        with Share(5, 6).writing(toy_config.data.dir):
            signal.pause()

    with meanwhile(work, until=lambda: lock.is_file() and lock.read_text() != "") as pid:
        assert holder_of(lock)["pid"] == pid
        os.kill(pid, signal.SIGKILL)
    assert lock.is_file()
    make(toy_config, rank=0, world_size=2)
    make(toy_config, rank=1, world_size=2)
    assert not list(Path(toy_config.data.dir).glob(f"{LOCK}*"))
