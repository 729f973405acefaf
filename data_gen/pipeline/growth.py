"""The shards of a run. A larger run keeps the shards of the smaller one; only a short last shard is made again.

Each shard's sidecar has a digest of every prompt that it was made from, so that shards of other prompts are refused. If
fewer prompts are requested, existing shards stay.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from configs.schema import DataConfig
from data_gen.pipeline.stages import forget, name_of, prompts_made
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import SPLITS
from data_gen.responses.conversation import ShardSpec


def shards_of(data: DataConfig) -> list[ShardSpec]:
    """The shards of all splits, in the order in which they are made.

    Raises:
        ValueError: fewer prompts than requested.
    """
    return [spec for split in SPLITS for spec in cut_shards(split, load_prompts(data, split), data.rows_per_shard)]


def cut_shards(split: str, prompts: Sequence[Prompt], size: int) -> list[ShardSpec]:
    """Shards of `size` consecutive prompts."""
    starts = range(0, len(prompts), size)
    return [ShardSpec(split, index, tuple(prompts[start : start + size])) for index, start in enumerate(starts)]


def refuse_other_prompts(specs: Iterable[ShardSpec], data: DataConfig) -> None:
    """Forget short shards that have grown.

    Raises:
        ValueError: a shard was made from other prompts.
    """
    for spec in specs:
        for made in prompts_made(spec, data):
            num = min(len(made), len(spec.digests))
            if made[:num] != spec.digests[:num]:
                raise ValueError(
                    f"{name_of(spec)} of {data.dir} was made from other prompts than {_sources(data)} has now; restore "
                    f"the earlier prompts, choose another data.dir, or delete {data.dir} to start over"
                )
            if num < len(spec.digests):
                forget(spec, data)


def _sources(data: DataConfig) -> str:
    return ", ".join(str(Path(source.path)) for source in data.prompt_sources)
