"""`engine: ray`: shards as rows of a Ray Data set, mapped by a pool of actors, each with the models of one stage and
the resources of data.ray.

A lost actor loses one shard's work: Ray restarts it up to `_RESTARTS` times and gives it that shard again. Workers
receive the driver's copy of the project's packages. With several machines, data.dir and every path must be visible to
all. A user's mistake comes back as a value, because Ray would wrap an exception in its own tracebacks.
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

from configs.schema import RayConfig
from data_gen.pipeline.worker import Job, Worker
from data_gen.responses.conversation import ShardSpec
from store.progress import Bar

_RESTARTS = 3
"""Restarts of each actor; each retries the shard at which the actor died."""
_ROOM_S = 30
"""Seconds to wait for the resources of all workers: an actor without resources waits forever, silently."""
PACKAGES = ("store", "configs", "data_gen", "lm")
"""Packages of the project that a worker imports."""
_ERRORS = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}
"""Errors that an actor may report, by name."""


def run_on_actors(job: Job, specs: Sequence[ShardSpec], bar: Bar) -> None:
    """Run the job's stage on every shard; `bar` counts prompts.

    Raises:
        ValueError: the cluster lacks resources, workers die repeatedly, or a worker raised it.
        FileNotFoundError: a worker raised it.
    """
    import ray  # an extra, checked by data_gen.pipeline.command.check_settings

    is_own = not ray.is_initialized()  # a caller's Ray session is used and left running
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
            f"a worker of stage {job.stage} died {when}, after up to {_RESTARTS} restarts: {_reason_of(error)}; the "
            "usual cause is too little memory: lower data.ray.num_workers, data.batch_size or data.chunk_mb, or set "
            "data.mode: sequential; finished shards are kept"
        ) from error
    finally:
        if is_own:
            ray.shutdown()


def _reports(job: Job, specs: Sequence[ShardSpec]) -> Iterator[dict[str, Any]]:
    """Wait for the shards and yield each report: the shard's index, and the kind and text of an error, if any."""
    import ray
    import ray.data

    resources = job.data.ray
    num_workers = min(resources.num_workers, len(specs))
    _check_room(resources, num_workers)
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
            for name, installed in _versions().items():
                if driver[name] != installed:
                    raise ValueError(
                        f"the worker on {platform.node()} has {name} {installed}, but the driver has {driver[name]}; "
                        "install the same version on every machine"
                    )
            self.worker = Worker(job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import ray

        with self._errors_as_values():
            for index in batch["index"] if not self.error else ():
                self.worker.make(ray.get(self.specs[int(index)]), lambda count: None)
        return {"index": batch["index"], "error": [self.error], "reason": [self.reason]}

    @contextmanager
    def _errors_as_values(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            self.error = "FileNotFoundError" if isinstance(error, FileNotFoundError) else "ValueError"
            self.reason = " ".join(str(error).split())


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}


def _check_room(resources: RayConfig, num_workers: int) -> None:
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
            f"data.ray requests {num_workers} workers of {bundle} each, but the cluster could not provide them within "
            f"{_ROOM_S} s; lower num_workers, num_cpus, num_gpus or resources, or add machines to the cluster"
        )


def _reason_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("The actor is dead because")] or lines[-1:]
    return reasons[-1][:300] if reasons else type(error).__name__


def _same_everywhere(job: Job) -> Job:
    """The job with this process's thread count and absolute paths, so that every actor writes the same bytes to the
    same directory; the name of the target on a server stays.
    """
    pair, data = job.pair, job.data
    models = {name: source for name in ("target", "draft", "micro") if (source := getattr(pair, name)) is not None}
    absolute = {name: replace(source, path=_absolute(source.path)) for name, source in models.items()}
    return replace(
        job,
        pair=replace(pair, num_threads=pair.num_threads or torch.get_num_threads(), **absolute),
        data=replace(
            data,
            dir=os.path.abspath(data.dir),
            split_ids=data.split_ids and os.path.abspath(data.split_ids),
            responses=data.responses and os.path.abspath(data.responses),
            prompts=tuple(replace(source, path=_absolute(source.path)) for source in data.prompt_sources),
            server=replace(data.server, model=data.server.model or pair.target.path),
        ),
    )


def _absolute(path: str) -> str:
    """The absolute path of an existing file or folder; any other name (a known set, a hub id) unchanged."""
    return os.path.abspath(path) if Path(path).exists() else path


def _session(resources: RayConfig) -> dict[str, Any]:
    """Arguments of Ray's session; a local one declares as many cores and custom resources as the workers request."""
    modules = [str(Path(__file__).parents[2] / name) for name in PACKAGES]
    if resources.address is not None:
        return {"runtime_env": {"py_modules": modules, "excludes": ["**/__pycache__/**"]}}
    needed = int(resources.num_workers * resources.num_cpus) + 1
    custom = {name: count * resources.num_workers for name, count in resources.resources.items()}
    return {"num_cpus": max(needed, os.cpu_count() or 1), "resources": custom, "include_dashboard": False}
