"""Several processes make one run, by ranks or by `engine: ray`: the bytes are those of one process, whoever is killed
and whatever starts when; what a cluster cannot do, and what goes wrong in its workers, ends in one line.
"""

import ast
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.command import run
from configs.schema import Config, RayConfig
from data_gen.pipeline import on_ray
from data_gen.pipeline.command import make
from data_gen.pipeline.share import Share, share_of
from data_gen.store import manifest
from data_gen.store.rows import read_rows
from store.lock import LOCK, holder_of, only_writer
from store.shards import shard_path
from tests.cases import first_fast
from tests.data_gen.on_disk import assert_as_at_once, files_of, with_a_draft_of_nan, with_data
from tests.data_gen.pipeline.test_resume import make_and_die
from tests.data_gen.processes import at_once, meanwhile, ray_actors

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


@pytest.mark.parametrize("flags", [(0, None), (None, 4), (4, 4), (-1, 4), (0, 0)])
def test_flags_and_variables_that_are_no_rank_are_refused_with_what_to_give(flags):
    says = rf"^--rank is {flags[0]} and --world_size is {flags[1]}, which is not .*; pass both, with --rank from 0"
    with pytest.raises(ValueError, match=says):
        share_of(*flags)
    for changes in ({"RANK": "4"}, {"RANK": "x"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "first"}):
        with pytest.raises(ValueError, match=r"^RANK is .* and WORLD_SIZE is .* LOCAL_RANK is .*; pass both, with"):
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
    """Of one visible GPU, or where nobody says which process of the machine it is, the first is its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    share = Share(6, 8, local_rank, "torchrun")
    placed = share.on_its_gpu(toy_config.pair)
    assert (placed.target.device_map, placed.draft.device_map) == (device, device)
    mapped = replace(toy_config.pair, target=replace(toy_config.pair.target, device_map="auto"))
    assert share.on_its_gpu(mapped).target.device_map == "auto"


def is_locked(lock: Path) -> Callable[[], bool]:
    return lambda: lock.is_file() and "{" in lock.read_text()


def is_after_a_turn(lock_of_rank: Path) -> Callable[[], bool]:
    return lambda: is_locked(lock_of_rank)() and not (lock_of_rank.parent / LOCK).exists()


def first_turn(config: Config, share: Share) -> Callable[[], None]:
    """The work of a process that has had its first turn, and never ends."""

    def work() -> None:
        with ExitStack() as held:
            with share.first_turn(config.data, held):
                pass
            signal.pause()

    return work


def test_whoever_cuts_the_run_otherwise_is_refused_while_a_rank_is_at_work(toy_config):
    """Rank 1 of 3 has had its first turn."""
    lock = Path(toy_config.data.dir) / f"{LOCK}-1-of-3-8-0-4"
    with meanwhile(first_turn(toy_config, Share(1, 3)), until=is_after_a_turn(lock)) as pid:
        before = sorted(path.name for path in lock.parent.iterdir())
        in_use = rf"data is in use by rank 1, process {pid} on \S+ since 20.* 3, 8, 0, 4 instead of [12], 8, 0, 4; wait"
        for flags in ({}, {"rank": 0, "world_size": 1}, {"rank": 0, "world_size": 2}):
            with pytest.raises(ValueError, match=in_use):
                make(toy_config, **flags)
            assert sorted(path.name for path in lock.parent.iterdir()) == before
        with pytest.raises(ValueError, match=rf"data is in use by process {pid} "):
            make(toy_config, rank=1, world_size=3)
        with pytest.raises(ValueError, match=r"rank 1, .* 3, 8, 0, 4 instead of 3, 6, 0, 4; wait"):
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


def test_of_ranks_that_end_at_once_exactly_the_last_accounts(toy_config):
    """Each gives back its own lock before it looks for others, so that no two leave the account to each other."""
    shares, works, numbers = [Share(rank, 3) for rank in range(3)], [ExitStack() for _ in range(3)], []
    for share, work in zip(shares, works, strict=True):
        with share.first_turn(toy_config.data, work):
            pass
    for share, work in zip(shares, works, strict=True):
        with share.last_turn(toy_config.data.dir, work) as num_others:
            numbers.append(num_others)
    assert numbers == [2, 1, 0]
    assert not Path(toy_config.data.dir).exists(), "nothing is left"


def test_the_lock_of_a_rank_that_was_killed_is_cleared_by_whoever_looks(toy_config):
    lock = Path(toy_config.data.dir) / f"{LOCK}-5-of-6-8-0-4"
    with meanwhile(first_turn(toy_config, Share(5, 6)), until=is_after_a_turn(lock)) as pid:
        assert f"process {pid} on " in holder_of(lock)
        os.kill(pid, signal.SIGKILL)
    assert lock.is_file()
    make(toy_config, rank=0, world_size=2)
    make(toy_config, rank=1, world_size=2)
    assert not list(Path(toy_config.data.dir).glob(f"{LOCK}*"))


def ranks(config: Config, world_size: int, only: Sequence[int] | None = None, **flags) -> list[partial[None]]:
    """The works of the processes that make the run together."""
    chosen = range(world_size) if only is None else only
    return [partial(make, config, rank=rank, world_size=world_size, **flags) for rank in chosen]


def manifest_of(directory: str | Path) -> Mapping[str, object]:
    return json.loads(Path(directory, "manifest.json").read_text())


@pytest.mark.parametrize(
    ("world_size", "changes"),
    first_fast([(2, {}), (3, {"mode": "sequential"}), (7, {})], 1),
    ids=["2", "3 stage by stage", "7, of which two have no shard"],
)
def test_n_processes_write_the_bytes_of_one(toy_config, world_size, changes):
    """Rows, labels, sidecars, errors.jsonl, and the manifest."""
    config = with_data(toy_config, **changes)
    assert at_once(*ranks(config, world_size)) == [0] * world_size
    assert_as_at_once(config)
    assert manifest_of(config.data.dir) == manifest_of(f"{config.data.dir}-whole")


@pytest.mark.parametrize("write", first_fast([3, 1, 6], 1))
def test_a_rank_killed_in_the_middle_of_a_write_leaves_nothing_that_stays(toy_config, toy_run, write):
    """It has begun the manifest, or a shard, which another rank leaves alone and the next run of this one clears."""
    flags = {"rank": 1, "world_size": 2}
    assert at_once(lambda: make_and_die(toy_config, write, **flags)) == [-signal.SIGKILL]
    assert list(Path(toy_config.data.dir).rglob(".*.partial"))
    make(toy_config, rank=0, world_size=2)
    make(toy_config, **flags)
    assert files_of(toy_config.data.dir) == files_of(toy_run)


def test_a_rank_makes_its_own_shards_leaves_unfinished_files_of_others_and_the_last_accounts_for_all(
    toy_config, capsys
):
    directory = Path(toy_config.data.dir)
    (directory / "rows").mkdir(parents=True)
    theirs, ours = (directory / "rows" / f".train-0000{n}.parquet.{os.getpid()}.partial" for n in (2, 1))
    theirs.touch()
    ours.touch()
    make(toy_config, rank=1, world_size=2)
    assert theirs.is_file(), "it belongs to a process that is writing it"
    assert not ours.exists()
    assert sorted(path.stem for path in directory.glob("rows/*.parquet")) == ["test-00000", "train-00001"]
    said = capsys.readouterr().out
    assert "rank 1 of 2 makes 2 of 5 shards" in said
    assert "rank 1 of 2 made 2 shards (stages: together); 3 shards are incomplete, the first is train-00000" in said
    assert not (directory / "errors.jsonl").exists()
    make(toy_config, rank=0, world_size=2)
    assert "12 rows" in capsys.readouterr().out
    assert (directory / "errors.jsonl").is_file()


def test_of_ranks_with_different_settings_one_settles_the_manifest_and_the_others_are_refused(toy_config, tmp_path):
    """They start at the same moment in an empty directory on a slow disk, each with a seed of its own."""

    def work(rank: int) -> None:
        write_atomic = manifest.write_atomic
        manifest.write_atomic = lambda path, content: (time.sleep(0.5), write_atomic(path, content))
        try:
            make(with_data(toy_config, seed=rank), rank=rank, world_size=4)
        except ValueError as error:
            (tmp_path / f"{rank}.error").write_text(str(error))
            raise

    codes = at_once(*(partial(work, rank) for rank in range(4)))
    assert sorted(codes) == [0, 1, 1, 1]
    winner = codes.index(0)
    assert manifest_of(toy_config.data.dir)["seed"] == winner
    for rank in {0, 1, 2, 3} - {winner}:
        assert f"differs in seed: {winner} there, {rank} in this run" in (tmp_path / f"{rank}.error").read_text()
    made = [path.stem for path in Path(toy_config.data.dir).glob("rows/*.parquet")]
    assert len(made) == len(range(winner, 5, 4)), "only the winner made shards"


@pytest.mark.slow
def test_each_stage_by_other_numbers_of_processes_ends_in_the_bytes_of_one(toy_config):
    """As where the target wants other GPUs than the draft; a stage does not begin before the one before it is made."""
    config = with_data(toy_config, mode="sequential")
    assert at_once(*ranks(config, 2, stages="respond")) == [0, 0]
    missing = r"^stage target needs stage draft, which is missing for 5 shards.*train-00000"
    with pytest.raises(ValueError, match=missing):
        make(config, stages="target")
    assert at_once(*ranks(config, 3, stages="draft")) == [0] * 3
    make(config, stages="target")
    assert_as_at_once(config)
    assert len(read_rows(shard_path(config.data.dir, "rows", "train", 0))) == 3


ROOT = Path(on_ray.__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    """Ray believes in its GPU, and no test here uses it."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    quiet = dict.fromkeys(("log_to_driver", "configure_logging", "include_dashboard"), False)
    ray.init(address="local", num_cpus=2, num_gpus=1, resources={"tag": 1}, **quiet)
    yield
    ray.shutdown()


@pytest.fixture
def on_cluster(toy_config, tmp_path, cluster) -> Config:
    """The toy run by one worker, with models that are meant for the CPU."""
    models = {name: replace(getattr(toy_config.pair, name), device_map="cpu") for name in ("target", "draft")}
    config = replace(toy_config, pair=replace(toy_config.pair, **models))
    return with_data(config, dir=str(tmp_path / "ray"), engine="ray", ray=RayConfig(num_workers=1))


@contextmanager
def killing(condition: Callable[[], bool], *, at_most: int) -> Iterator[list[int]]:
    """While the block runs, Ray's actors get SIGKILL where the condition holds; the actors that got it."""
    finished, killed = threading.Event(), list[int]()

    def kill() -> None:
        while len(killed) < at_most and not finished.wait(0.02):
            for pid in ray_actors()[: at_most - len(killed)] if condition() else ():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        finished.set()
        killer.join()


@pytest.mark.slow
def test_what_the_cluster_lacks_is_refused_before_any_worker_starts(on_cluster, monkeypatch):
    monkeypatch.setattr(on_ray, "_ROOM_S", 1)
    for asked in ({"num_workers": 2, "num_cpus": 2}, {"num_workers": 1, "num_gpus": 8}, {"resources": {"h100": 1}}):
        with pytest.raises(ValueError, match=r"^data\.ray requests \d workers of .*; lower num_workers, "):
            make(with_data(on_cluster, ray=RayConfig(**asked)))
        assert not ray_actors()


@pytest.mark.slow
def test_a_users_mistake_in_a_worker_is_one_line_and_exit_code_2(on_cluster, tmp_path, capsys):
    """The worker finds it while it loads the models."""
    broken = with_a_draft_of_nan(on_cluster, tmp_path / "broken")
    argv = ["--pair.target.path=a", "--pair.draft.path=b"]
    with pytest.raises(SystemExit, match="2"):
        run({"make": lambda config: make(broken)}, default="make", argv=argv)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "the draft yields NaN or infinite logits for each of 8 tested ids" in line


@pytest.mark.slow
def test_a_worker_with_other_versions_is_refused_and_both_are_named(on_cluster, monkeypatch):
    monkeypatch.setattr(on_ray, "_versions", lambda: dict.fromkeys(("torch", "transformers", "tokenizers"), "0"))
    with pytest.raises(ValueError, match=r"the worker on .* has torch \d.* but the driver has 0; install"):
        make(on_cluster)


@pytest.mark.slow
def test_workers_that_are_killed_while_they_load_end_the_run_with_the_reason(on_cluster):
    """Every actor gets SIGKILL as soon as it is there, as from a kernel out of memory."""
    reason = r"^a worker of stage together died after 0 shards .* 3 restarts: The actor is dead because"
    with killing(lambda: True, at_most=100), pytest.raises(ValueError, match=reason) as error:
        make(on_cluster)
    assert "\n" not in str(error.value)


def test_workers_are_sent_every_package_of_the_project_that_they_import():
    """Packages that `data_gen.pipeline.worker` reaches by imports, wherever they stand in a file."""
    reached, waiting = set[str](), {"data_gen"}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        for path in (ROOT / name).rglob("*.py"):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            tops = {str(node.module).partition(".")[0] for node in nodes}
            waiting |= {top for top in tops - reached if (ROOT / top / "__init__.py").is_file()}
    assert reached == set(on_ray.PACKAGES)


@pytest.mark.slow
def test_ray_writes_the_bytes_of_the_local_engine_even_when_an_actor_is_killed(toy_config, tmp_path):
    """One actor gets SIGKILL as soon as a first shard is on disk; another makes its shard again."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    config, directory = with_data(toy_config, rows_per_shard=1), tmp_path / "ray"
    make(config)
    with killing(lambda: any((directory / "rows").glob("*.parquet")), at_most=1) as killed:
        make(with_data(config, dir=str(directory), engine="ray", ray=RayConfig(num_workers=2, num_cpus=1)))
    assert killed
    assert files_of(directory) == files_of(config.data.dir)
