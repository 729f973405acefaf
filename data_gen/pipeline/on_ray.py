"""`engine: ray`: shards as rows of a Ray Data set, mapped by a pool of actors, each of which holds the models of one
stage and the resources that data.ray gives to it.

A shard writes its own files and returns only its index, so a lost actor loses one shard's work: Ray starts another
actor and gives it that shard, `_RESTARTS` times for each actor. With several machines, data.dir must be a folder that
all of them see, and so must every path. The prompts of each shard are put into the object store once, and read once, by
the actor that makes the shard.

What a user can cause comes back from an actor as a value and not as an exception, which Ray would wrap in tracebacks of
its own.
"""

import logging
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.remote import RayConfig
from configs.schema import DataConfig, ModelSource
from data_gen.pipeline.code import folders, refuse_other_code, running
from data_gen.pipeline.worker import Job, Worker, models_of
from data_gen.responses.conversation import ShardSpec
from store.progress import Bar

_RESTARTS = 3
"""Restarts of each actor; each retries the shard that it died over."""
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
            **_session(job.data.ray.of(job.stage)),
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

    resources = job.data.ray.of(job.stage)
    num_workers = min(resources.num_workers, len(specs))
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    _check_room(job.stage, resources, num_workers, machines)
    _check_gpus(job, machines)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([{"index": index} for index in range(len(specs))], override_num_blocks=len(specs))
    reports = rows.map_batches(
        _Actor,
        fn_constructor_args=(_same_everywhere(job), [ray.put(spec) for spec in specs], running()),
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
            refuse_other_code(driver, machine=platform.node())
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


def _check_room(stage: str, resources: RayConfig, num_workers: int, machines: Sequence[dict[str, float]]) -> None:
    """Raise ValueError unless all workers find room at once: an actor without room waits for ever, and says nothing."""
    needs = {"CPU": float(resources.num_cpus), "GPU": float(resources.num_gpus), **resources.resources}
    wanted = {name: count for name, count in needs.items() if count > 0}
    room = [
        min((machine.get(name, 0.0) / count for name, count in wanted.items()), default=math.inf)
        for machine in machines
    ]
    num_fitting = sum(
        math.floor(num_of_node + 1e-6) if math.isfinite(num_of_node) else num_workers for num_of_node in room
    )
    if num_fitting < num_workers:
        there = "; ".join(_in_words({name: machine.get(name, 0.0) for name in needs}) for machine in machines)
        section = "data.ray" if stage == "together" else f"data.ray or data.ray.{stage}"
        raise ValueError(
            f"data.ray asks for {num_workers} workers of {_in_words(needs)} each, for the stage {stage}, and the "
            f"cluster has room for {num_fitting} of them (its machines have {there}); lower num_workers, num_cpus, "
            f"num_gpus or resources of {section}, or add machines to the cluster first"
        )


def _in_words(resources: Mapping[str, float]) -> str:
    """Resources as a person lists them: 2 CPUs, 0 GPUs and 1 h100."""
    *most, last = (f"{count:g} {name}{'s' if name in ('CPU', 'GPU') else ''}" for name, count in resources.items())
    return f"{', '.join(most)} and {last}"


def _check_gpus(job: Job, machines: Sequence[dict[str, float]]) -> None:
    """Raise ValueError where workers hold models that belong on a GPU, GPUs are there, and the workers are given
    none.
    """
    num_gpus = sum(machine.get("GPU", 0.0) for machine in machines)
    names = [name for name in models_of(job) if not _is_on_cpu(getattr(job.pair, name))]
    if job.data.ray.of(job.stage).num_gpus == 0 and num_gpus > 0 and names:
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
        modules = [str(folder) for folder in folders()]
        return {"runtime_env": {"py_modules": modules, "excludes": ["**/__pycache__/**"]}}
    needed = int(resources.num_workers * resources.num_cpus) + 1
    custom = {name: count * resources.num_workers for name, count in resources.resources.items()}
    return {"num_cpus": max(needed, os.cpu_count() or 1), "resources": custom, "include_dashboard": False}
