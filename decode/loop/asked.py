"""What a caller asks of a generation, in any integer type: Python's, numpy's and torch's numbers, and arrays and
tensors of them.
"""

from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex

Ids = Iterable[SupportsIndex]
Limits = SupportsIndex | Iterable[SupportsIndex]


def integer_of(value: Any, name: str) -> int:
    """The number as Python's own.

    Raises:
        ValueError: it is no integer.
    """
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); it must be an integer") from None


def ids_of(prompt_ids: Ids) -> list[int]:
    """The ids of one prompt.

    Raises:
        ValueError: one of them is no integer, as in a tensor of several prompts or of floats.
    """
    return [integer_of(token_id, "a token id of a prompt") for token_id in _listed(prompt_ids)]


def limits_of(max_new_tokens: Any, num_prompts: int) -> list[int]:
    """The length limit of each prompt; one number is that of all.

    Raises:
        ValueError: one of them is no integer; there are more or fewer of them than prompts.
    """
    limits = _listed(max_new_tokens)
    if not isinstance(limits, Iterable) or isinstance(limits, str):
        return [integer_of(limits, "max_new_tokens")] * num_prompts
    limits = [integer_of(limit, "an entry of max_new_tokens") for limit in limits]
    if len(limits) != num_prompts:
        raise ValueError(
            f"max_new_tokens has {len(limits)} entries for {num_prompts} prompts; give one number, or one for each "
            "prompt"
        )
    return limits


def _listed(numbers: Any) -> Any:
    """Arrays and tensors as Python's numbers, which costs one copy in place of one for each entry."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers
