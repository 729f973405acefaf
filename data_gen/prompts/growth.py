"""Splits that stay when a set of prompts grows.

The first run in a directory of data or traces writes into its manifest, as `split_by`, how it split each set:

    path                    the set
    num_first               number of its prompts; num_first_test: of its test part
    seed, split_weights     for a transfer set, which the manifest of a trace has: those of its split
    dev_from, train_from    a later prompt is in test if its hash is below dev_from, in dev if it is below train_from,
                            else in train; absent if data.split_ids lists the splits

Each limit lies between the hashes of the first prompts of two splits, as close to the requested share of all
hashes as these allow. Within a split, later prompts come after the first ones in the order of the set, so shards
of the first prompts keep their content.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from configs.schema import DataConfig, PromptSource
from data_gen.prompts.prompt import Prompt
from lm.draws import seed_of
from store.json_files import read_json

FirstSplit = Mapping[str, Any]
"""The entry of one set."""
_KEYS = {"path", "num_first", "num_first_test"}
_NUM_HASHES = 2**63


def hash_of(prompt: Prompt, seed: int) -> int:
    """The hash of seed and content by which a prompt is split."""
    return seed_of(seed, "split", ascii(prompt.content))


def first_split(config: DataConfig, name: str, source: PromptSource) -> FirstSplit | None:
    """How the first run in data.dir split a set; None if there was none, or if it split by other shares or seed."""
    path = Path(config.dir) / "manifest.json"
    if not path.is_file():
        return None
    remedy = f"restore the original, or delete {config.dir} to start over"
    manifest = read_json(path, remedy=remedy)
    entries = manifest.get("split_by", {})
    first = entries.get(name) if isinstance(entries, dict) else entries
    if first is not None and not (isinstance(first, dict) and first.keys() >= _KEYS):
        raise ValueError(f"{path}: split_by is {entries!r:.80}, but must have {', '.join(sorted(_KEYS))}; {remedy}")
    weights = None if config.split_weights is None else list(config.split_weights)
    in_run = {"path": source.path, "seed": config.seed, "split_weights": weights}
    if first is None or any(value != first.get(key, manifest.get(key)) for key, value in in_run.items()):
        return None
    return first if "dev_from" in first or config.split_ids is not None else None


def limits_between(*parts: Sequence[Prompt], weights: tuple[int, int, int], seed: int) -> dict[str, int]:
    """dev_from and train_from, from the first prompts of train, dev and test and the shares of these three."""
    train, dev, test = ([hash_of(prompt, seed) for prompt in part] for part in parts)
    share_of_test = weights[2] / sum(weights)
    share_held_out = (weights[1] + weights[2]) / sum(weights)
    return {
        "dev_from": _limit(test, [*dev, *train], share_of_test),
        "train_from": _limit([*test, *dev], train, share_held_out),
    }


def split_within(prompt: Prompt, first: FirstSplit, seed: int) -> Literal["train", "dev", "test"]:
    """The split of a prompt by the limits of the first run."""
    value = hash_of(prompt, seed)
    if value < first["dev_from"]:
        return "test"
    return "dev" if value < first["train_from"] else "train"


def _limit(below: Sequence[int], above: Sequence[int], share: float) -> int:
    lowest = max(below, default=-1) + 1
    highest = min(above, default=_NUM_HASHES)
    return min(max(int(share * _NUM_HASHES), lowest), highest)
