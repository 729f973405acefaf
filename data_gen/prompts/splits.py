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
    `split_ids`. Of duplicates one is kept, in test before dev before train. ValueError: no share, or a file of another
    form.
    """
    in_order = in_hash_order(prompts, seed)
    if split_ids is not None:
        listed = _listed(split_ids)  # other ids are train
        parts = {split: [p for p in in_order if listed.get(p.id, "train") == split] for split in SPLITS}
        test = without_duplicates(parts["test"])
        dev = without_duplicates(parts["dev"], test)
        return {"train": without_duplicates(parts["train"], [*dev, *test]), "dev": dev, "test": test}
    if sum(weights) == 0:
        raise ValueError(f"data.split_weights is {list(weights)}; give train, dev or test a share above 0")
    in_order = without_duplicates(in_order)
    num_test, num_dev = (round(len(in_order) * weight / sum(weights)) for weight in (weights[2], weights[1]))
    test, dev, train = in_order[:num_test], in_order[num_test:][:num_dev], in_order[num_test + num_dev :]
    return {"train": train, "dev": dev, "test": test}


def in_hash_order(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """The prompts by the hash of seed and content: a shuffle that other prompts do not change."""
    return sorted(prompts, key=lambda prompt: (seed_of(seed, "split", ascii(prompt.content)), prompt.id))


def without_duplicates(prompts: Iterable[Prompt], earlier: Iterable[Prompt] = ()) -> list[Prompt]:
    """The prompts whose content neither an earlier one has nor one of `earlier`."""
    excluded, first_of = {prompt.content for prompt in earlier}, dict[tuple[str, ...], Prompt]()
    for prompt in prompts:
        first_of.setdefault(prompt.content, prompt)
    return [prompt for content, prompt in first_of.items() if content not in excluded]


def _listed(path: str) -> dict[str, str]:
    """Id -> split, as a file of id lists defines it."""
    try:
        lists = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {_SPLIT_IDS}") from error
    if not isinstance(lists, dict) or not all(isinstance(ids, list) for ids in lists.values()):
        raise ValueError(f"{path} holds {lists!r:.60}; {_SPLIT_IDS}")
    if unknown := set(lists) - set(SPLITS):
        raise ValueError(f"{path} has the split {sorted(unknown)[0]!r}; use {', '.join(SPLITS)}")
    return {str(prompt_id): split for split, ids in lists.items() for prompt_id in ids}
