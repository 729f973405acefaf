"""The prompts of a run, from wherever `data.prompts` points."""

from pathlib import Path

from configs.schema import DataConfig
from data_gen.prompts.hub import SETS, load
from data_gen.prompts.prompt import Prompt, read_jsonl
from data_gen.prompts.splits import Split, in_hash_order, split_by_id
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
    """All prompts from which the split takes its first `count`."""
    if config.prompts == "stories":
        return [Prompt(s.id, (s.prompt,), category=s.kind) for s in stories(split, count, seed=config.seed)]
    weights = config.split_weights
    if Path(config.prompts).is_file():  # a file may have the name of a set
        prompts = read_jsonl(config.prompts)
    elif config.prompts in SETS:
        place = SETS[config.prompts]
        prompts, weights = load(config.prompts, split), place.weights or weights
        if split == "test" and place.test_part is not None:  # all of the set's own test part, which needs no splitting
            return in_hash_order(prompts, config.seed)
    else:
        raise FileNotFoundError(
            f"data.prompts is {config.prompts!r}, neither a known set nor a file; set it to stories, {', '.join(SETS)} "
            "or the path of a JSONL file"
        )
    return split_by_id(prompts, weights=weights, seed=config.seed, split_ids=config.split_ids)[split]
