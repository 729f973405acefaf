"""`engine: ray`: shards as rows of a Ray Data set, mapped by a pool of actors that hold the models.

A shard writes its own files and returns only its name, so a lost actor loses one shard's work: Ray starts another actor and gives it that
shard. Several machines need a data.dir that all of them see.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from configs.schema import Config
from data_gen.pipeline.stages import Stage
from data_gen.responses.conversation import ShardSpec


def run_on_actors(config: Config, stage: Stage, specs: Sequence[ShardSpec], bar: tqdm) -> None:
    """Run one stage on every shard.

    Raises:
        ValueError: what a worker raised for a user's mistake.
    """
    import ray  # an extra: data_gen.pipeline.command.check says so where it is missing
    import ray.data

    started = not ray.is_initialized()
    if started:
        ray.init(address=config.data.ray.address, log_to_driver=False, configure_logging=False, **_own_machine(config))
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    resources = config.data.ray
    try:
        names = ray.data.from_items([{"index": index} for index in range(len(specs))], override_num_blocks=len(specs)).map_batches(
            _Actor,
            fn_constructor_args=(_settled(config), stage, list(specs)),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(resources.num_workers, len(specs))),
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
        )
        for row in names.iter_rows():
            spec = specs[int(row["index"])]
            bar.set_description(f"{stage}: {spec.split}-{spec.index:05d}")
            bar.update(spec.num_requests)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError | FileNotFoundError):
            raise type(error.cause)(str(error.cause)) from error
        raise
    finally:
        if started:
            ray.shutdown()


class _Actor:
    """A worker in an actor's process."""

    def __init__(self, config: Config, stage: Stage, specs: list[ShardSpec]) -> None:
        from data_gen.pipeline.worker import Worker

        self.worker, self.specs = Worker(config, stage), specs

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for index in batch["index"]:
            self.worker.make(self.specs[int(index)], lambda count: None)
        return batch


def _settled(config: Config) -> Config:
    """The config with what this process would decide for itself: the same thread count and folder in every actor, so the same bytes."""
    pair = replace(config.pair, num_threads=config.pair.num_threads or torch.get_num_threads())
    return replace(config, pair=pair, data=replace(config.data, dir=os.path.abspath(config.data.dir)))


def _own_machine(config: Config) -> dict[str, Any]:
    """Room for the workers on this machine, when no cluster is named (Ray counts cores, workers may be more)."""
    if config.data.ray.address is not None:
        return {}
    needed = int(config.data.ray.num_workers * config.data.ray.num_cpus) + 1
    return {"num_cpus": max(needed, os.cpu_count() or 1), "include_dashboard": False}
