"""Prompt sets by name, loaded from the hub with `datasets`. A set is one entry of `SETS`; nothing else in the project knows its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_gen.prompts.prompt import Prompt, prompt_of
from data_gen.prompts.splits import Split


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies on the hub, and how its records are read."""

    path: str
    name: str | None = None
    """Configuration of the set, where it has several."""
    part: str = "train"
    """The hub split that is read."""
    test_part: str | None = None
    """A hub split of its own for test."""
    data_files: str | None = None
    """For repositories that hold plain JSONL."""
    weights: tuple[int, int, int] | None = None
    """Shares of train, dev and test for a set that prescribes them; None: those of the run."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """The set's name of a field -> the name under which `prompt_of` looks for it."""


SETS = {
    "alpaca": PromptSet("tatsu-lab/alpaca"),
    "gsm8k": PromptSet("openai/gsm8k", name="main", test_part="test", weights=(4, 1, 0)),
    "humaneval": PromptSet("openai/openai_humaneval", part="test", weights=(0, 0, 1)),
    "mt_bench": PromptSet("HuggingFaceH4/mt_bench_prompts", weights=(0, 0, 1), rename={"prompt": "turns", "prompt_id": "id"}),
    # 480 prompts: 160 to choose thresholds by, 320 to test with
    "spec_bench": PromptSet(
        "json", data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl", weights=(0, 1, 2)
    ),
}
"""The value of data.prompts -> the set."""


def load(name: str, split: Split) -> list[Prompt]:
    """The prompts of a set from which `split` is taken: its own test part for test where it has one, else the part that all splits share.

    Raises:
        FileNotFoundError: the hub cannot be reached and the set is not in its cache.
        ValueError: a record without any of the expected fields.
    """
    place = SETS[name]
    part = place.test_part if split == "test" and place.test_part is not None else place.part
    prompts = []
    for index, record in enumerate(_records(place, part, name)):
        renamed = {place.rename.get(key, key): value for key, value in record.items()}
        try:
            prompts.append(prompt_of(renamed, default_id=str(index)))
        except ValueError as error:
            raise ValueError(f"{place.path} [{part}] record {index}: {error}") from error
    return prompts


def _records(place: PromptSet, part: str, name: str) -> list[dict[str, Any]]:
    """The set's records, in hub order."""
    from datasets import load_dataset  # seconds to import, and only runs on a hub set need it

    try:
        return list(load_dataset(place.path, place.name, split=part, data_files=place.data_files))
    except OSError as error:
        raise FileNotFoundError(
            f"prompt set {name} ({place.path}) cannot be reached and is not in the cache: {error}; set data.prompts to the path of a "
            "JSONL file"
        ) from error
