"""`engine: local`: one worker in this process makes one shard after the other."""

from collections.abc import Sequence

from tqdm import tqdm

from data_gen.pipeline.worker import Job, Worker, steps_of
from data_gen.responses.conversation import ShardSpec
from lm import free_memory


def run_here(job: Job, specs: Sequence[ShardSpec], bar: tqdm) -> None:
    """Run the job's stage on every shard; `bar` counts prompts."""
    worker = Worker(job)
    share = 1 / steps_of(job.stage)
    for spec in specs:
        bar.set_description(f"{job.stage}: {spec.split}-{spec.index:05d}")
        worker.make(spec, lambda count: bar.update(count * share))
    del worker
    free_memory()  # the next stage loads models of its own
