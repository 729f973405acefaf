"""`engine: ray`: shards as rows of a Ray Data set, mapped by a pool of actors that hold the models.

A shard writes its own files and returns only its index, so a lost actor loses one shard's work: Ray starts another actor and gives it that
shard. With several machines, data.dir must be a folder that all of them see.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from configs.schema import RayConfig
from data_gen.pipeline.worker import Job, Worker
from data_gen.responses.conversation import ShardSpec


def run_on_actors(job: Job, specs: Sequence[ShardSpec], bar: tqdm) -> None:
    """Run the job's stage on every shard; `bar` counts prompts.

    Raises:
        ValueError: what a worker raised for a user's mistake.
    """
    import ray  # an extra: data_gen.pipeline.command.check says so where it is missing
    import ray.data

    resources = job.data.ray
    is_own = not ray.is_initialized()  # a caller's own Ray session is used and left running
    if is_own:
        ray.init(address=resources.address, log_to_driver=False, configure_logging=False, **_room_here(resources))
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        indices = ray.data.from_items([{"index": index} for index in range(len(specs))], override_num_blocks=len(specs)).map_batches(
            _Actor,
            fn_constructor_args=(_same_everywhere(job), list(specs)),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(resources.num_workers, len(specs))),
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
        )
        for row in indices.iter_rows():
            spec = specs[int(row["index"])]
            bar.set_description(f"{job.stage}: {spec.split}-{spec.index:05d}")
            bar.update(spec.num_requests)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError | FileNotFoundError):  # a user's mistake reads the same on every engine
            raise type(error.cause)(str(error.cause)) from error
        raise
    finally:
        if is_own:
            ray.shutdown()


class _Actor:
    """A worker in an actor's process."""

    def __init__(self, job: Job, specs: list[ShardSpec]) -> None:
        self.worker, self.specs = Worker(job), specs

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for index in batch["index"]:
            self.worker.make(self.specs[int(index)], lambda count: None)
        return batch


def _same_everywhere(job: Job) -> Job:
    """The job with this process's thread count and folder spelled out, so that every actor computes the same bytes in the same place."""
    pair = replace(job.pair, num_threads=job.pair.num_threads or torch.get_num_threads())
    return replace(job, pair=pair, data=replace(job.data, dir=os.path.abspath(job.data.dir)))


def _room_here(resources: RayConfig) -> dict[str, Any]:
    """Arguments that make room for the workers on this machine, unless a cluster is named: Ray counts cores, and workers may be more."""
    if resources.address is not None:
        return {}
    needed = int(resources.num_workers * resources.num_cpus) + 1
    return {"num_cpus": max(needed, os.cpu_count() or 1), "include_dashboard": False}
