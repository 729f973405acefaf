"""`engine: ray`: the same bytes as `local`, also when an actor dies."""

import os
import signal
import threading

import pytest

from configs.schema import RayConfig
from data_gen.pipeline.command import make
from tests.data_gen.on_disk import files_of
from tests.data_gen.processes import ray_actors


@pytest.mark.slow
def test_ray_writes_the_bytes_of_the_local_engine_even_when_an_actor_is_killed(toy_config, with_data, tmp_path):
    """One actor gets SIGKILL as soon as a first shard is on disk; another makes its shard again."""
    pytest.importorskip("ray.data", reason="the extra `ray` is not installed")
    config = with_data(toy_config, rows_per_shard=1)
    make(config)
    directory = tmp_path / "ray"
    killed: list[int] = []
    finished = threading.Event()

    def kill() -> None:
        while not killed and not finished.wait(0.02):
            if any((directory / "rows").glob("*.parquet")):
                for pid in ray_actors()[:1]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    make(with_data(config, dir=str(directory), engine="ray", ray=RayConfig(num_workers=2, num_cpus=1)))
    finished.set()
    killer.join()
    assert killed
    assert files_of(directory) == files_of(config.data.dir)
