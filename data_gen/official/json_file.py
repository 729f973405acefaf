"""The official SpecDec++ JSON (`data/gen_*.py` of the released code), object by object.

The file is one list of objects with the fields prompt and continuation (strings) and prefix, tokens, draft, log_p_7b
(draft), log_p_70b (target), p_acc (lists, or lists written as strings). Probabilities are those of temperature 1
without truncation. The file has no acceptance_rate, no entropies, no coins and no finish_reason.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_gen.labels.laws import acceptance_prob_of
from data_gen.responses.exchange import Exchange

_INFINITY = re.compile(r"-inf\b")
_ROUNDING = 1e-3


Row = tuple[Exchange, dict[str, Tensor]]
"""One object of the file, and its draft_ids, log_q, log_p and acceptance_prob, each [token]."""


def parse(item: Any, name: str, *, keys: tuple[str, str], where: str) -> Row:
    """One object of the file as the row `name`.

    Args:
        item: the parsed object.
        name: the id that the row gets.
        keys: the fields with the draft's and the target's log probabilities of the draft tokens.
        where: file and item, for messages.

    Raises:
        ValueError: a field that is missing or not a list of numbers, or lists of different lengths.
    """
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object, got {type(item).__name__}")
    prefix, tokens, draft = (_list(item, key, where, check=_is_id) for key in ("prefix", "tokens", "draft"))
    log_q, log_p = (_list(item, key, where, check=_is_log_prob) for key in keys)
    lengths = {"tokens": len(tokens), "draft": len(draft), keys[0]: len(log_q), keys[1]: len(log_p)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: expected one number per response token, got lengths {lengths}")
    columns = {
        "draft_ids": torch.tensor(draft, dtype=torch.int64),
        "log_q": torch.tensor(log_q, dtype=torch.float32),
        "log_p": torch.tensor(log_p, dtype=torch.float32),
    }
    columns["acceptance_prob"] = acceptance_prob_of(columns["log_p"], columns["log_q"])
    return Exchange(name, str(item.get("prompt", "")), prefix, tokens, None), columns


def _list(item: dict[str, Any], key: str, where: str, *, check: Callable[[Any], bool]) -> list[Any]:
    """A list of token ids or log probabilities, possibly written as a string."""
    value = item.get(key)
    # Python wrote these strings, and its -inf is -Infinity in JSON.
    if isinstance(value, str):
        try:
            value = json.loads(_INFINITY.sub("-Infinity", value))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: expected {key} to be a list of numbers written as a string; {error}") from error
    if not isinstance(value, list) or not all(map(check, value)):
        kind = "token ids" if check is _is_id else "numbers of at most 0"
        raise ValueError(f"{where}: expected {key} to be a list of {kind}, got {value!r:.60}; fields: {sorted(item)}")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_log_prob(value: Any) -> bool:
    """Whether a value is at most 0, up to rounding; -inf means probability 0."""
    return type(value) in (int, float) and value <= _ROUNDING


def read(path: Path) -> list[Any]:
    """The objects of a file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file of another form.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; set --file to the path of the official JSON")
    try:
        items = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: expected the official JSON; {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected the official JSON, but the file is not text; download it again") from error
    if not isinstance(items, list) or not items:
        raise ValueError(f"{path}: expected a list of objects, got {type(items).__name__}")
    return items
