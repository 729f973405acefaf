"""`engine: ray`: shards as rows of a Ray Data set, mapped by a pool of actors, each of which holds the models of one
stage and the resources of data.ray.

A shard writes its own files and returns only its index, so a lost actor loses one shard's work: Ray starts another
actor and gives it that shard, `_RESTARTS` times for each actor. With several machines, data.dir must be a folder that
all of them see, and so must every path. The prompts of each shard are put into the object store once, and read once, by
the actor that makes the shard.

What a user can cause comes back from an actor as a value and not as an exception, which Ray would wrap in tracebacks of
its own.
"""

import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from configs.remote import RayConfig
from configs.schema import DataConfig, ModelSource
from data_gen.pipeline.worker import Job, Worker, models_of
from data_gen.responses.conversation import ShardSpec
from store.progress import Bar

_RESTARTS = 3
"""Restarts of each actor; each retries the shard that it died over."""
_ROOM_S = 30
"""Seconds that the cluster has to find room for all workers: an actor without room waits forever, and says nothing."""
PACKAGES = ("store", "configs", "data_gen", "lm")
"""Packages of the project that a worker imports."""
_ERRORS = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}
"""Errors that an actor may report, by name."""


def run_on_actors(job: Job, specs: Sequence[ShardSpec], bar: Bar) -> None:
    """Run the job's stage on every shard; `bar` counts prompts.

    Raises:
        ValueError: the cluster lacks what is asked for, workers die again and again, or what a worker raised for a
            user's mistake.
        FileNotFoundError: what a worker raised for a path that is not there.
    """
    import ray  # an extra: data_gen.pipeline.command.check_settings says so where it is missing

    is_own = not ray.is_initialized()  # a caller's own Ray session is used and left running
    if is_own:
        # without an address Ray would join any cluster that it finds on this machine
        ray.init(
            address=job.data.ray.address or "local",
            log_to_driver=False,
            configure_logging=False,
            **_session(job.data.ray),
        )
    num_done = 0
    try:
        for row in _reports(job, specs):
            if row["error"]:
                raise _ERRORS[row["error"]](row["reason"])
            spec = specs[int(row["index"])]
            bar.set_description(f"{job.stage}: {spec.split}-{spec.index:05d}")
            bar.update(spec.num_requests)
            num_done += 1
    except ray.exceptions.RayActorError as error:
        when = (
            f"after {num_done} shards were made" if num_done else "while it loaded its models or made its first shard"
        )
        raise ValueError(
            f"a worker of the stage {job.stage} died {when}, and was restarted at most {_RESTARTS} times: "
            f"{_why(error)}; most often the memory does not suffice: lower data.ray.num_workers, data.batch_size or "
            "data.chunk_mb, or choose data.mode sequential; what was written stays"
        ) from error
    finally:
        if is_own:
            ray.shutdown()


def _reports(job: Job, specs: Sequence[ShardSpec]) -> Iterator[dict[str, Any]]:
    """Wait for the shards and yield each actor's report: the shard's index, and the kind and text of an error or
    neither.
    """
    import ray
    import ray.data

    resources = job.data.ray
    num_workers = min(resources.num_workers, len(specs))
    _check_room(resources, num_workers)
    _check_gpus(job, ray.cluster_resources().get("GPU", 0.0))
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([{"index": index} for index in range(len(specs))], override_num_blocks=len(specs))
    reports = rows.map_batches(
        _Actor,
        fn_constructor_args=(_same_everywhere(job), [ray.put(spec) for spec in specs], _versions()),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=num_workers),
        num_cpus=resources.num_cpus,
        num_gpus=resources.num_gpus,
        resources=resources.resources,
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
    )
    return iter(reports.iter_rows())


class _Actor:
    """A worker in an actor's process; `specs` are the shards in the object store."""

    def __init__(self, job: Job, specs: Sequence[Any], driver: dict[str, str]) -> None:
        self.specs, self.error, self.reason = specs, "", ""
        with self._errors_as_values():
            _refuse_other_versions(driver)
            self.worker = Worker(job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import ray

        with self._errors_as_values():
            for index in batch["index"] if not self.error else ():
                self.worker.make(ray.get(self.specs[int(index)]), lambda count: None)
        return {"index": batch["index"], "error": [self.error], "reason": [self.reason]}

    @contextmanager
    def _errors_as_values(self) -> Iterator[None]:
        """Keep what a user can mend: raised here, it would reach the driver as a text with tracebacks."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.error = "FileNotFoundError" if isinstance(error, FileNotFoundError) else "ValueError"
            self.reason = " ".join(str(error).split())


def _versions() -> dict[str, str]:
    """Versions of the packages that decide the rows."""
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}


def _refuse_other_versions(driver: dict[str, str]) -> None:
    for name, installed in _versions().items():
        if driver[name] != installed:
            raise ValueError(
                f"the worker on {platform.node()} has {name} {installed} and the driver {driver[name]}; install the "
                "same version on every machine"
            )


def _check_room(resources: RayConfig, num_workers: int) -> None:
    """Raise ValueError unless the cluster has room for all workers at once."""
    from ray.util import placement_group, remove_placement_group

    bundle = {"CPU": float(resources.num_cpus), "GPU": float(resources.num_gpus), **resources.resources}
    bundle = {name: count for name, count in bundle.items() if count > 0}
    if not bundle:
        return
    group = placement_group([bundle] * num_workers)
    has_room = group.wait(_ROOM_S)
    remove_placement_group(group)
    if not has_room:
        raise ValueError(
            f"data.ray asks for {num_workers} workers of {bundle} each, and the cluster did not find room for them in "
            f"{_ROOM_S} s; lower num_workers, num_cpus, num_gpus or resources, or add machines to the cluster first"
        )


def _check_gpus(job: Job, num_gpus: float) -> None:
    """Raise ValueError where GPUs are there, models belong on a GPU, and the workers are given none."""
    names = [name for name in models_of(job) if not _is_on_cpu(getattr(job.pair, name))]
    if job.data.ray.num_gpus == 0 and num_gpus > 0 and names:
        device = getattr(job.pair, names[0]).device_map
        raise ValueError(
            f"data.ray.num_gpus is 0, so the {names[0]} (device_map {device}) would run on the CPU, and the cluster "
            f"has {num_gpus:g} GPUs; "
            f"set data.ray.num_gpus to the GPUs of each worker, or pair.{names[0]}.device_map to cpu"
        )


def _is_on_cpu(source: ModelSource) -> bool:
    devices = source.device_map.values() if isinstance(source.device_map, dict) else [source.device_map]
    return all(str(device) in ("cpu", "disk") for device in devices)


def _why(error: Exception) -> str:
    """The one line of Ray's many that says why an actor died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("The actor is dead because")] or lines[-1:]
    return telling[-1][:300] if telling else type(error).__name__


def _same_everywhere(job: Job) -> Job:
    """The job with this process's thread count and paths spelled out, so that every actor computes the same bytes in
    the same place.
    """
    models = {name: source for name in ("target", "draft", "micro") if (source := getattr(job.pair, name)) is not None}
    placed = {name: replace(source, path=_placed(source.path)) for name, source in models.items()}
    pair = replace(job.pair, num_threads=job.pair.num_threads or torch.get_num_threads(), **placed)
    return replace(job, pair=pair, data=_data_everywhere(job.data, job.pair.target.path))


def _data_everywhere(data: DataConfig, target: str) -> DataConfig:
    """The section with absolute paths; `target`, the path as it was, remains the name of the target on a server."""
    return replace(
        data,
        dir=os.path.abspath(data.dir),
        split_ids=data.split_ids and os.path.abspath(data.split_ids),
        responses=data.responses and os.path.abspath(data.responses),
        prompts=tuple(replace(source, path=_placed(source.path)) for source in data.prompt_sources),
        server=replace(data.server, model=data.server.model or target),
    )


def _placed(path: str) -> str:
    """The absolute path of what lies on this disk; a name (of a known set, or on the hub) as it is."""
    return os.path.abspath(path) if Path(path).exists() else path


def _session(resources: RayConfig) -> dict[str, Any]:
    """Arguments of Ray's session.

    On a cluster, workers are sent the project's packages as the driver has them. On this machine they import the
    driver's, and room is made for them, as Ray counts cores, and workers may be more; it has the custom resources that
    they ask for.
    """
    if resources.address is not None:
        root = Path(__file__).parents[2]
        modules = [str(root / name) for name in PACKAGES]
        return {"runtime_env": {"py_modules": modules, "excludes": ["**/__pycache__/**"]}}
    needed = int(resources.num_workers * resources.num_cpus) + 1
    custom = {name: count * resources.num_workers for name, count in resources.resources.items()}
    return {"num_cpus": max(needed, os.cpu_count() or 1), "resources": custom, "include_dashboard": False}
