"""Prompt sets by name, loaded from the hub with `datasets`.

Alpaca has one split and is cut 40k/10k/2k; GSM8K brings train and test (its train part gives train and dev); HumanEval and
MT-Bench are for testing only; Spec-Bench (480 prompts) gives 160 for choosing thresholds and 320 for testing.
"""

from dataclasses import dataclass

from data_gen.prompts.prompt import Prompt, prompt_of
from data_gen.prompts.splits import Split


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies on the hub."""

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
    """Shares of train, dev and test where they are no choice; None: the run's."""


SETS = {
    "alpaca": PromptSet("tatsu-lab/alpaca"),
    "gsm8k": PromptSet("openai/gsm8k", name="main", test_part="test", weights=(4, 1, 0)),
    "humaneval": PromptSet("openai/openai_humaneval", part="test", weights=(0, 0, 1)),
    "mt_bench": PromptSet("HuggingFaceH4/mt_bench_prompts", weights=(0, 0, 1)),
    "spec_bench": PromptSet(
        "json", data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl", weights=(0, 1, 2)
    ),
}
"""name -> place"""


def load(name: str, split: Split) -> tuple[bool, list[Prompt]]:
    """(whether these are the prompts of `split` alone, prompts) of a set.

    Raises:
        FileNotFoundError: the hub cannot be reached and the set is not in its cache.
        ValueError: a record that does not look as expected.
    """
    known = SETS[name]
    has_own = split == "test" and known.test_part is not None
    part = known.test_part if has_own else known.part
    prompts = []
    for index, record in enumerate(_records(known, str(part), name)):
        record = {"turns": record["prompt"], "id": record.get("prompt_id"), **_kept(record)} if name == "mt_bench" else record
        try:
            prompts.append(prompt_of(record, default_id=str(index)))
        except ValueError as error:
            raise ValueError(f"{known.path} [{part}] record {index}: {error}") from error
    return has_own, prompts


def _kept(record: dict) -> dict:
    return {"category": record.get("category", "")}


def _records(known: PromptSet, part: str, name: str) -> list[dict]:
    """The set's records, in hub order."""
    from datasets import load_dataset

    try:
        return list(load_dataset(known.path, known.name, split=part, data_files=known.data_files))
    except OSError as error:
        raise FileNotFoundError(
            f"prompt set {name} ({known.path}) can neither be reached nor is it in the cache: {error}; give data.prompts the path of a "
            "JSONL file"
        ) from error
