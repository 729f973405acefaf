"""The splits that a file of ids prescribes (`data.split_ids`)."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from data_gen.prompts.prompt import say_once

_FORM = 'data.split_ids takes a JSON object of id lists such as {"dev": [3, 5], "test": [8]}'


def listed_splits(path: str, splits: Collection[str]) -> dict[str, str]:
    """Id -> split, as the file lists them; ValueError for another form, an unknown split, or an id in two splits."""
    try:
        lists = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_object)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {_FORM}") from error
    if not isinstance(lists, dict) or not all(isinstance(ids, list) for ids in lists.values()):
        raise ValueError(f"{path} holds {lists!r:.60}; {_FORM}")
    if unknown := set(lists) - set(splits):
        raise ValueError(f"{path} has the split {sorted(unknown)[0]!r}; use {', '.join(splits)}")
    split_of: dict[str, str] = {}
    for split, ids in lists.items():
        for prompt_id in map(str, ids):
            if split_of.setdefault(prompt_id, split) != split:
                raise ValueError(
                    f"{path} (data.split_ids) lists the id {prompt_id!r} for {split_of[prompt_id]} and for {split}; "
                    "remove it from one of them"
                )
    return split_of


def check_listed(path: str, split_of: Mapping[str, str], ids: Collection[str]) -> None:
    """Report how many prompts the file lists; ValueError if no prompt has one of its ids.

    Args:
        path: the file, for messages.
        split_of: its ids and their splits.
        ids: the ids of all prompts.
    """
    if missing := [prompt_id for prompt_id in split_of if prompt_id not in ids]:
        alike = _alike(missing[0], ids)
        hint = f"; did you mean {alike!r}?" if alike else "."
        raise ValueError(
            f"{path} (data.split_ids) lists {len(missing)} of {len(split_of)} ids that no prompt has, the first "
            f"{missing[0]!r}{hint} An id is the record's id, idx, task_id or question_id, else its number from 0; "
            "correct or remove them"
        )
    splits = list(split_of.values())
    counts = ", ".join(f"{splits.count(split)} {split}" for split in dict.fromkeys(splits))
    say_once(f"data.split_ids: {len(splits)} of {len(ids)} prompts are listed ({counts}); all others are train")


def _alike(prompt_id: str, ids: Collection[str]) -> str | None:
    """The id that differs only in leading zeros."""
    short = prompt_id.lstrip("0") or "0"
    return next((known for known in ids if (known.lstrip("0") or "0") == short), None)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"it has {repeated[0]!r} twice; join the two lists")
    return dict(pairs)
