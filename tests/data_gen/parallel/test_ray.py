"""`engine: ray`: the bytes of `local`, also when an actor dies; what a cluster cannot do, and what goes wrong in its
workers, ends in one line.
"""

import ast
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from configs.command import run
from configs.schema import Config, RayConfig
from data_gen.pipeline import on_ray
from data_gen.pipeline.command import make
from tests.data_gen.on_disk import files_of, with_a_draft_of_nan, with_data
from tests.data_gen.processes import ray_actors

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
ROOT = Path(on_ray.__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    """Ray believes in its GPU, and no test here uses it."""
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
    config, directory = with_data(toy_config, rows_per_shard=1), tmp_path / "ray"
    make(config)
    with killing(lambda: any((directory / "rows").glob("*.parquet")), at_most=1) as killed:
        make(with_data(config, dir=str(directory), engine="ray", ray=RayConfig(num_workers=2, num_cpus=1)))
    assert killed
    assert files_of(directory) == files_of(config.data.dir)
