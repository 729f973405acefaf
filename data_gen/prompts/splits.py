"""Which split a prompt belongs to.

Splits depend on the run's seed and on each prompt's stable id only, never on file order: ids are ordered by sha256(seed / id), the head of
that order is test, then dev, then train, in the proportions of `split_weights`; a run takes the first `num_*` of each. A larger run
therefore contains the smaller one, and no choice of sizes moves a prompt from one split to another.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from configs.schema import DataConfig
from data_gen.prompts.prompt import Prompt
from lm.uniforms import seed_of

Split = Literal["train", "dev", "test"]


SPLITS: tuple[Split, ...] = get_args(Split)


def split_by_id(prompts: Iterable[Prompt], config: DataConfig, weights: tuple[int, int, int]) -> dict[Split, list[Prompt]]:
    """Every prompt in exactly one split, each split in its hash order.

    Args:
        prompts: with ids that differ.
        config: for its seed and its `split_ids`.
        weights: shares of train, dev and test.
    """
    in_order = ordered(prompts, config.seed)
    if config.split_ids is not None:
        return _split_by_list(in_order, config.split_ids)
    if min(weights) < 0 or sum(weights) == 0:
        raise ValueError(f"data.split_weights is {list(weights)}; three shares of at least 0 that are not all 0, for train, dev and test")
    num_test, num_dev = (round(len(in_order) * weight / sum(weights)) for weight in (weights[2], weights[1]))
    return {"test": in_order[:num_test], "dev": in_order[num_test : num_test + num_dev], "train": in_order[num_test + num_dev :]}


def ordered(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: (seed_of(seed, "split", prompt.id), prompt.id))


def _split_by_list(in_order: list[Prompt], path: str) -> dict[Split, list[Prompt]]:
    """The split that a file of id lists decides."""
    try:
        lists = json.loads(Path(path).read_text())
        named = {str(prompt_id): split for split, ids in lists.items() for prompt_id in ids}
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise ValueError(f'{path} is no JSON object of id lists such as {{"dev": [3, 5], "test": [8]}}: {error}') from error
    if unknown := set(lists) - set(SPLITS):
        raise ValueError(f"{path} names the split {sorted(unknown)[0]!r}; one of {', '.join(SPLITS)}")
    result: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
    for prompt in in_order:
        result[named.get(prompt.id, "train")].append(prompt)
    return result
