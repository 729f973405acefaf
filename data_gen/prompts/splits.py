"""Assigns prompts to splits.

Splits depend on the run's seed and each prompt's content, never on file order or ids: prompts are ordered by
sha256(seed / content); the first part is test, then dev, then train, in the proportions of `split_weights`, and a run
takes the first `num_*` of each. Duplicates are dropped, so no content is in two splits. A larger run contains the
smaller one, and no choice of sizes moves a prompt from one split to another.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from data_gen.prompts.prompt import Prompt
from lm.draws import seed_of

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SPLIT_IDS = 'data.split_ids takes a JSON object of id lists such as {"dev": [3, 5], "test": [8]}'


def split_by_id(
    prompts: Iterable[Prompt], *, weights: tuple[int, int, int], seed: int, split_ids: str | None = None
) -> dict[Split, list[Prompt]]:
    """Every prompt in exactly one split, each split in hash order, by shares of train, dev and test or by the file
    `split_ids`. Of duplicates one is kept, in test before dev before train. ValueError: invalid weights, or a file of
    another form.
    """
    if split_ids is not None:
        return _split_by_list(in_hash_order(prompts, seed), split_ids)
    in_order = without_duplicates(in_hash_order(prompts, seed))
    if min(weights) < 0 or sum(weights) == 0:
        raise ValueError(
            f"data.split_weights is {list(weights)}; give shares of at least 0 for train, dev and test, not all 0"
        )
    num_test, num_dev = (round(len(in_order) * weight / sum(weights)) for weight in (weights[2], weights[1]))
    return {
        "test": in_order[:num_test],
        "dev": in_order[num_test : num_test + num_dev],
        "train": in_order[num_test + num_dev :],
    }


def in_hash_order(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """The prompts by the hash of seed and content: a shuffle that other prompts do not change."""
    return sorted(prompts, key=lambda prompt: (seed_of(seed, "split", ascii(prompt.content)), prompt.id))


def without_duplicates(prompts: Iterable[Prompt], earlier: Iterable[Prompt] = ()) -> list[Prompt]:
    """The prompts whose content neither an earlier one has nor one of `earlier`."""
    excluded, first_of = {prompt.content for prompt in earlier}, dict[tuple[str, ...], Prompt]()
    for prompt in prompts:
        first_of.setdefault(prompt.content, prompt)
    return [prompt for content, prompt in first_of.items() if content not in excluded]


def _split_by_list(in_order: list[Prompt], path: str) -> dict[Split, list[Prompt]]:
    """The split that a file of id lists defines; ids that it does not list are train."""
    try:
        lists = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {_SPLIT_IDS}") from error
    if not isinstance(lists, dict) or not all(isinstance(ids, list) for ids in lists.values()):
        raise ValueError(f"{path} holds {lists!r:.60}; {_SPLIT_IDS}")
    if unknown := set(lists) - set(SPLITS):
        raise ValueError(f"{path} has the split {sorted(unknown)[0]!r}; use {', '.join(SPLITS)}")
    split_of = {str(prompt_id): split for split, ids in lists.items() for prompt_id in ids}
    result: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
    for prompt in in_order:
        result[split_of.get(prompt.id, "train")].append(prompt)
    result["test"] = without_duplicates(result["test"])
    result["dev"] = without_duplicates(result["dev"], result["test"])
    result["train"] = without_duplicates(result["train"], [*result["dev"], *result["test"]])
    return result
