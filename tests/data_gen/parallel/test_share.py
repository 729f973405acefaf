"""Who makes which shard: flags, launchers' variables, and processes that would share the shards otherwise."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_gen.pipeline.command import make
from data_gen.pipeline.share import Share, share_of
from store.lock import LOCK, holder_of, only_writer
from tests.data_gen.on_disk import with_data
from tests.data_gen.processes import meanwhile

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "6", "SLURM_NPROCS": "6"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}


def test_the_share_is_what_the_flags_say_or_the_launcher_and_everything_outside_of_one():
    """srun has a step of several tasks. The batch script that calls it has a rank, too, and is one process."""
    for environment, share in (
        ({}, Share(0, 1)),
        (TORCHRUN, Share(2, 4, 0, "torchrun")),
        (SLURM, Share(3, 6, 1, "srun")),
        (BATCH_SCRIPT, Share(0, 1)),
        (SLURM | TORCHRUN, Share(2, 4, 0, "torchrun")),
        (SLURM | {"RANK": "5"}, Share(3, 6, 1, "srun")),
        (TORCHRUN | {"RANK": "", "WORLD_SIZE": ""}, Share(0, 1)),
    ):
        assert share_of(None, None, environment) == share, environment
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
    with pytest.raises(ValueError, match=says):
        make(toy_config, rank=flags[0], world_size=flags[1])
    assert not Path(toy_config.data.dir).exists()


@pytest.mark.parametrize("changes", [{"RANK": "4"}, {"RANK": "x"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "first"}])
def test_variables_that_are_no_rank_are_refused_with_the_way_out(changes):
    with pytest.raises(ValueError, match=r"^RANK is .* and WORLD_SIZE is .* environment.*unset them, or pass --rank"):
        share_of(None, None, TORCHRUN | changes)


def test_ray_and_several_processes_exclude_each_other(toy_config, monkeypatch):
    """Ray's driver shares the shards out; under torchrun there would be several drivers."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"engine is ray, .* is rank 2 of 4 \(from torchrun\); set .*--rank 0 --w"):
        make(with_data(toy_config, engine="ray"))


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "device"), [(4, 2, "cuda:2"), (4, 5, "cuda:1"), (4, 0, None), (1, 3, None), (0, 3, None)]
)
def test_processes_of_one_machine_take_its_gpus_in_turn(toy_config, monkeypatch, num_gpus, local_rank, device):
    """Where a launcher leaves one GPU visible to each, or nobody says which process of the machine it is, the first
    is its own.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    share = Share(6, 8, local_rank, "torchrun")
    placed = share.on_its_gpu(toy_config.pair)
    assert (placed.target.device_map, placed.draft.device_map) == (device, device)
    mapped = replace(toy_config.pair, target=replace(toy_config.pair.target, device_map="auto"))
    assert share.on_its_gpu(mapped).target.device_map == "auto"


def is_locked(lock: Path, by: str = "{") -> Callable[[], bool]:
    return lambda: lock.is_file() and by in lock.read_text()


def test_whoever_cuts_the_run_otherwise_is_refused_while_a_rank_is_at_work(toy_config):
    """Rank 1 of 3 has had its first turn."""
    directory = Path(toy_config.data.dir)

    def work() -> None:
        share = Share(1, 3)
        with share.writing(toy_config.data.dir):
            with share.turn(toy_config.data.dir):
                share.refuse_others(toy_config.data.dir, toy_config.data)
            signal.pause()

    with meanwhile(work, until=is_locked(directory / f"{LOCK}-1-of-3", '"requested"')) as pid:
        before = sorted(path.name for path in directory.iterdir())
        in_use = rf"data is in use by rank 1 of 3, process {pid} on \S+ since 20.*this process --world_size 3 too"
        for flags in ({}, {"rank": 0, "world_size": 1}, {"rank": 0, "world_size": 2}):
            with pytest.raises(ValueError, match=in_use):
                make(toy_config, **flags)
            assert sorted(path.name for path in directory.iterdir()) == before
        with pytest.raises(ValueError, match=rf"data is in use by process {pid} "):
            make(toy_config, rank=1, world_size=3)
        with pytest.raises(ValueError, match=r"rank 1 of 3, .* num_test 8, 0 and 4 instead of 6, 0 and 4; give"):
            make(with_data(toy_config, num_train=6), rank=0, world_size=3)


def test_a_rank_waits_for_a_turn_and_not_for_a_run_of_one_process(toy_config, monkeypatch, capfd):
    monkeypatch.setattr("data_gen.pipeline.share._TURN_S", 1.2)

    def work() -> None:
        with only_writer(toy_config.data.dir, setting="data.dir"):
            signal.pause()

    with (
        meanwhile(work, until=is_locked(Path(toy_config.data.dir) / LOCK)) as pid,
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
    assert not tmp_path.exists(), "nothing is left"


def test_the_lock_of_a_rank_that_was_killed_is_cleared_by_whoever_looks(toy_config):
    lock = Path(toy_config.data.dir) / f"{LOCK}-5-of-6"

    def work() -> None:
        with Share(5, 6).writing(toy_config.data.dir):
            signal.pause()

    with meanwhile(work, until=is_locked(lock)) as pid:
        assert holder_of(lock)["pid"] == pid
        os.kill(pid, signal.SIGKILL)
    assert lock.is_file()
    make(toy_config, rank=0, world_size=2)
    make(toy_config, rank=1, world_size=2)
    assert not list(Path(toy_config.data.dir).glob(f"{LOCK}*"))
