"""`engine: ray`: shards made by Ray actors, each with the models of one stage and the resources of data.ray.

A lost actor loses one shard's work: Ray restarts it up to `_RESTARTS` times and gives it that shard again. On a
cluster, workers receive the driver's copy of the project's packages; all machines must see data.dir and every
path. Relative paths start at the driver's working directory.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from configs.schema import RayConfig
from data_gen.pipeline.worker import Job, Worker
from data_gen.responses.exchange import ShardSpec
from store.progress import Bar

_RESTARTS = 3
"""Restarts of each actor; each retries the shard at which the actor died."""
_ROOM_S = 30
"""Seconds to wait for the resources of all workers: an actor without resources waits forever, silently."""
PACKAGES = ("store", "configs", "data_gen", "lm")
"""Packages of the project that a worker imports."""


def run_on_actors(job: Job, specs: Sequence[ShardSpec], bar: Bar) -> None:
    """Run the job's stage on every shard; `bar` counts prompts. ValueError: the cluster lacks resources, or
    workers die repeatedly; the errors of a worker are raised as they are.
    """
    import ray  # an extra, checked by data_gen.pipeline.checks.check_settings
    from ray.util import placement_group, remove_placement_group

    if is_own := not ray.is_initialized():  # a caller's Ray session is used and left running
        ray.init(log_to_driver=False, configure_logging=False, **_session(job.data.ray))
    resources = job.data.ray
    num_done = 0
    num_workers = min(resources.num_workers, len(specs))
    bundle = _bundle(resources)
    group = placement_group([bundle] * num_workers)
    try:
        if not group.wait(_ROOM_S):
            raise ValueError(
                f"data.ray requests {num_workers} workers of {bundle} each, but the cluster could not provide them in "
                f"{_ROOM_S} s; lower num_workers, num_cpus, num_gpus or resources, or add machines to the cluster"
            )
        for name, num_requests in _made(job, specs, group, num_workers):
            bar.set_description(f"{job.stage}: {name}")
            bar.update(num_requests)
            num_done += 1
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # without Ray's own tracebacks
    except ray.exceptions.RayActorError as error:
        raise ValueError(
            f"a worker of stage {job.stage} died after {num_done} shards were made and up to {_RESTARTS} restarts: "
            f"{_reason(error)}; the usual cause is too little memory: lower data.ray.num_workers, data.batch_size or "
            "data.chunk_mb, or set data.mode: sequential; finished shards are kept"
        ) from error
    finally:
        remove_placement_group(group)  # ends the actors
        if is_own:
            ray.shutdown()


def _made(job: Job, specs: Sequence[ShardSpec], group: object, num_workers: int) -> Iterator[tuple[str, int]]:
    """Name and number of requests of each shard, as actors in the placement group make it."""
    import ray
    from ray.util import ActorPool
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = job.data.ray
    actor_type = ray.remote(_Actor).options(
        num_cpus=resources.num_cpus,
        num_gpus=resources.num_gpus,
        resources=resources.resources,
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
    )
    actors = [actor_type.remote(_alike(job), os.getcwd(), _versions()) for _ in range(num_workers)]
    yield from ActorPool(actors).map_unordered(lambda actor, spec: actor.make.remote(spec), list[Any](specs))


def _alike(job: Job) -> Job:
    """The job with one thread count and one absolute directory, so that every actor writes the same files."""
    pair = replace(job.pair, num_threads=job.pair.num_threads or torch.get_num_threads())
    return replace(job, pair=pair, data=replace(job.data, dir=os.path.abspath(job.data.dir)))


def _bundle(resources: RayConfig) -> dict[str, float]:
    """The resources of one worker; Ray reserves none without any."""
    bundle = {"CPU": resources.num_cpus or 0.001, "GPU": resources.num_gpus, **resources.resources}
    return {name: float(count) for name, count in bundle.items() if count > 0}


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("The actor is dead because")), lines[-1])[:300]


class _Actor:
    """A worker in an actor's process, which loads its models with its first shard."""

    def __init__(self, job: Job, folder: str, driver: dict[str, str]) -> None:
        """`folder` and `driver`: the driver's working directory and versions."""
        self._job = job
        self._folder = folder
        self._driver = driver

    @cached_property
    def _worker(self) -> Worker:
        if Path(self._folder).is_dir():
            os.chdir(self._folder)  # relative paths of the config
        for name, installed in _versions().items():
            if self._driver[name] != installed:
                raise ValueError(
                    f"the worker on {platform.node()} has {name} {installed}, but the driver has {self._driver[name]}; "
                    "install the same version on every machine"
                )
        return Worker(self._job)

    def make(self, spec: ShardSpec) -> tuple[str, int]:
        """Make a shard; returns its name and the number of its requests."""
        self._worker.make(spec, lambda count: None)
        return spec.name, spec.num_requests


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}


def _session(resources: RayConfig) -> dict[str, Any]:
    """Arguments of Ray's session; a local one declares as many cores and custom resources as the workers request."""
    if resources.address is not None:
        modules = [str(Path(__file__).parents[2] / name) for name in PACKAGES]
        return {
            "address": resources.address,
            "runtime_env": {"py_modules": modules, "excludes": ["**/__pycache__/**"]},
        }
    return {
        "address": "local",  # by default Ray would join any cluster that it finds on this machine
        "num_cpus": max(int(resources.num_workers * resources.num_cpus) + 1, os.cpu_count() or 1),
        "resources": {name: count * resources.num_workers for name, count in resources.resources.items()},
        "include_dashboard": False,
    }
