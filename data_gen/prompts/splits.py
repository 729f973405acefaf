"""Which split a prompt belongs to.

Splits depend on the run's seed and on what each prompt says, never on file order or ids: prompts are ordered by
sha256(seed / content), the head of that order is test, then dev, then train, in the proportions of `split_weights`; a
run takes the first `num_*` of each. Of prompts with one content only the first is kept, so that none is in two splits.
A larger run therefore contains the smaller one, and no choice of sizes moves a prompt from one split to another.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from data_gen.prompts.prompt import Prompt
from lm.uniforms import seed_of

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SPLIT_IDS = 'data.split_ids takes a JSON object of id lists such as {"dev": [3, 5], "test": [8]}'


def split_by_id(
    prompts: Iterable[Prompt], *, weights: tuple[int, int, int], seed: int, split_ids: str | None = None
) -> dict[Split, list[Prompt]]:
    """Every prompt in exactly one split, each split in hash order.

    Args:
        prompts: prompts of differing ids. Of those with one content one is kept: test before dev before train.
        weights: shares of train, dev and test.
        seed: the seed of the hash order.
        split_ids: path of a JSON file of id lists, which then decides instead of the weights.

    Raises:
        ValueError: weights that are no shares, or a file of another form.
    """
    if split_ids is not None:
        return _split_by_list(in_hash_order(prompts, seed), split_ids)
    in_order = without_duplicates(in_hash_order(prompts, seed))
    if min(weights) < 0 or sum(weights) == 0:
        raise ValueError(
            f"data.split_weights is {list(weights)}; give train, dev and test shares of at least 0, not all of them 0"
        )
    num_test, num_dev = (round(len(in_order) * weight / sum(weights)) for weight in (weights[2], weights[1]))
    return {
        "test": in_order[:num_test],
        "dev": in_order[num_test : num_test + num_dev],
        "train": in_order[num_test + num_dev :],
    }


def in_hash_order(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """The prompts sorted by the hash of seed and content: a shuffle that adding or removing prompts does not change for
    the others.
    """
    return sorted(prompts, key=lambda prompt: (seed_of(seed, "split", ascii(prompt.content)), prompt.id))


def without_duplicates(prompts: Iterable[Prompt], seen: Iterable[Prompt] = ()) -> list[Prompt]:
    """The prompts whose content none before them has, nor one of `seen`."""
    contents = {prompt.content for prompt in seen}
    kept = []
    for prompt in prompts:
        if prompt.content not in contents:
            contents.add(prompt.content)
            kept.append(prompt)
    return kept


def _split_by_list(in_order: list[Prompt], path: str) -> dict[Split, list[Prompt]]:
    """The split that a file of id lists prescribes; ids that it does not list are train."""
    try:
        lists = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; {_SPLIT_IDS}") from error
    if not isinstance(lists, dict) or not all(isinstance(ids, list) for ids in lists.values()):
        raise ValueError(f"{path} holds {lists!r:.60}; {_SPLIT_IDS}")
    if unknown := set(lists) - set(SPLITS):
        raise ValueError(f"{path} names the split {sorted(unknown)[0]!r}; the splits are {', '.join(SPLITS)}")
    split_of = {str(prompt_id): split for split, ids in lists.items() for prompt_id in ids}
    result: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
    for prompt in in_order:
        result[split_of.get(prompt.id, "train")].append(prompt)
    result["test"] = without_duplicates(result["test"])
    result["dev"] = without_duplicates(result["dev"], result["test"])
    result["train"] = without_duplicates(result["train"], [*result["dev"], *result["test"]])
    return result
