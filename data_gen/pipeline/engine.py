"""Engines: who runs the workers. `local` in this process, one shard after the other; `ray` on actors. Both write the same bytes."""

from collections.abc import Sequence

from tqdm import tqdm

from configs.schema import Config
from data_gen.pipeline.stages import Stage
from data_gen.pipeline.worker import Worker, steps_of
from data_gen.responses.conversation import ShardSpec


def run_engine(config: Config, stage: Stage, specs: Sequence[ShardSpec]) -> None:
    """Run one stage on every shard of `specs`, with a progress bar over their prompts."""
    total = sum(spec.num_requests for spec in specs)
    with tqdm(total=total, unit="row", desc=f"{stage}: loading models", mininterval=0.2, bar_format=_FORMAT) as bar:
        if config.data.engine == "ray":
            from data_gen.pipeline.on_ray import run_on_actors

            run_on_actors(config, stage, specs, bar)
        else:
            _run_here(config, stage, specs, bar)


_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total} rows [{elapsed}<{remaining}, {rate_fmt}]"


def _run_here(config: Config, stage: Stage, specs: Sequence[ShardSpec], bar: tqdm) -> None:
    worker = Worker(config, stage)
    share = 1 / steps_of(stage)
    for spec in specs:
        bar.set_description(f"{stage}: {spec.split}-{spec.index:05d}")
        worker.make(spec, lambda count: bar.update(count * share))
