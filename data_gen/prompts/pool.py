"""The prompts of a run, from wherever `data.prompts` points."""

from pathlib import Path

from configs.schema import DataConfig
from data_gen.prompts.hub import SETS, load
from data_gen.prompts.prompt import Prompt, read_jsonl
from data_gen.prompts.splits import Split, ordered, split_by_id
from data_gen.stories.stories import stories


def load_prompts(config: DataConfig, split: Split) -> list[Prompt]:
    """The run's prompts of one split, in the order in which they are cut into shards.

    Raises:
        FileNotFoundError: neither a known set nor a file.
        ValueError: a malformed line, a repeated id, or fewer prompts than asked for.
    """
    count = {"train": config.num_train, "dev": config.num_dev, "test": config.num_test}[split]
    if count < 0:
        raise ValueError(f"data.num_{split} is {count}; it must be at least 0")
    if count == 0:
        return []
    pool = _pool(config, split, count)
    if len(pool) < count:
        raise ValueError(
            f"data.num_{split} is {count} and {config.prompts} has {len(pool)} {split} prompts; set data.num_{split}={len(pool)}"
        )
    return pool[:count]


def _pool(config: DataConfig, split: Split, count: int) -> list[Prompt]:
    """Every prompt that the split could take."""
    if config.prompts == "stories":
        return [Prompt(s.id, (s.prompt,), category=s.kind) for s in stories(split, count, seed=config.seed)]
    if config.prompts in SETS and not Path(config.prompts).exists():
        own_split, prompts = load(config.prompts, split)
        weights = SETS[config.prompts].weights or config.split_weights
        return ordered(prompts, config.seed) if own_split else split_by_id(prompts, config, weights)[split]
    return split_by_id(read_jsonl(config.prompts), config, config.split_weights)[split]
