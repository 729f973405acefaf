"""Types of flags of the commands (`configs.making`)."""

from dataclasses import dataclass
from typing import Literal

Sizes = tuple[int, ...] | int | str
"""Sizes of batches as a command line names them: [1, 4, 16], 4, or 1,4,16."""
EngineName = Literal["llama.cpp", "vllm", "sglang", "transformers"]
Milliseconds = float | int | str
"""A number, or numbers of tokens with theirs: 1:30,5:33."""


@dataclass(frozen=True, kw_only=True)
class RaceRules:
    """Rules of a race, on the command line `--race.NAME`."""

    datasets: tuple[str, ...] = ()
    """Names of the sets of decode.datasets to race on, one cell each; empty: the first."""
    run: int = 0
    """Number of an independent repetition with other seeds, which is kept beside the others."""
    ignore_eos: bool = True
    """Every generation has `num_tokens` tokens; false: at most so many, ending at EOS."""
    assistant: str | None = None
    """Directory of a language model that drafts for transformers beside a feature draft."""
    transformers: bool = True
    """Also race transformers' own generation, without a draft and by its schedules."""


def sizes_of(given: Sizes | None) -> tuple[int, ...] | None:
    """The sizes of batches that a command line asks for; None: no batches. ValueError without a size of at least 1."""
    if given is None:
        return None
    listed = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else given
    sizes = tuple(int(size) if str(size).strip().isdecimal() else 0 for size in listed)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--batch is {given}; name sizes of at least 1 sequence, such as 1,4,16, or leave it out")
    return sizes
