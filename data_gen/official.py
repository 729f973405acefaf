"""`python -m data_gen import`: data made by the official SpecDec++ code -> our rows.

Its JSON (`data/gen_*.py` of the released code) is one list of objects: prompt, continuation, and prefix, tokens, draft, log_p_7b (draft),
log_p_70b (target), p_acc, each of the last six a list or a list written as a string. Its numbers are of raw temperature-1 distributions, so
the manifest says temperature 1 without truncation; what it did not keep (acceptance_rate, entropies, the coins, finish_reason) is null.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from data_gen import rows
from data_gen.labels import acceptance_prob_of
from data_gen.manifest import FORMAT, settle
from data_gen.prompts import SPLITS
from data_gen.rows import Exchange
from data_gen.shards import rows_path, write_shard

_INFINITY = re.compile(r"-inf\b")


def import_(config: Config, *, file: str, split: str = "train", draft_key: str = "log_p_7b", target_key: str = "log_p_70b") -> None:
    """Import the official SpecDec++ JSON as rows of one split.

    Args:
        file: the JSON, such as data/alpaca_data/train.json of the official code.
        split: train, dev or test.
        draft_key: field with the draft's log probabilities of the draft tokens.
        target_key: field with the target's.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; one of {', '.join(SPLITS)}")
    items = _read(Path(file))
    settle(config.data.dir, _manifest(config, draft_key, target_key))
    size = config.data.rows_per_shard
    for index, start in enumerate(range(0, len(items), size)):
        parsed = [
            _row(items[number], f"{file}: item {number}", f"{split}-{number}", draft_key, target_key)
            for number in range(start, min(start + size, len(items)))
        ]
        columns = {name: torch.cat([values[name] for _, values in parsed]) for name in parsed[0][1]}
        exchanges = [exchange for exchange, _ in parsed]
        facts = {"rows": len(exchanges), "tokens": len(columns["log_p"]), "input": len(exchanges), "ok": len(exchanges), "problems": []}
        write_shard(rows_path(config.data.dir, split, index), rows.to_parquet(exchanges, columns, None), **facts)
    print(f"{config.data.dir}: {len(items):,} rows of {split} from {file}")


def _row(item: Any, where: str, name: str, draft_key: str, target_key: str) -> tuple[Exchange, dict[str, Tensor]]:
    """One object of the JSON; its lists must be of one length."""
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object, got {type(item).__name__}")
    prefix, tokens, draft, log_q, log_p = (_list(item, key, where) for key in ("prefix", "tokens", "draft", draft_key, target_key))
    lengths = {"tokens": len(tokens), "draft": len(draft), draft_key: len(log_q), target_key: len(log_p)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: expected one number per response token, got lengths {lengths}")
    columns = {
        "draft_ids": torch.tensor(draft, dtype=torch.int64),
        "log_q": torch.tensor(log_q, dtype=torch.float32),
        "log_p": torch.tensor(log_p, dtype=torch.float32),
    }
    columns["acceptance_prob"] = acceptance_prob_of(columns["log_p"], columns["log_q"])
    return Exchange(name, str(item.get("prompt", "")), [int(token) for token in prefix], [int(token) for token in tokens], None), columns


def _list(item: dict[str, Any], key: str, where: str) -> list[int | float]:
    """A list of numbers, which may be written as a string."""
    value = item.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(_INFINITY.sub("-Infinity", value))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: expected {key} to be a list of numbers written as a string; {error}") from error
    if not isinstance(value, list) or not all(isinstance(number, int | float) for number in value):
        raise ValueError(f"{where}: expected {key} to be a list of numbers, got {value!r:.60}; fields: {sorted(item)}")
    return value


def _read(path: Path) -> list[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        items = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: expected the official JSON; {error.msg}") from error
    if not isinstance(items, list) or not items:
        raise ValueError(f"{path}: expected a list of objects, got {type(items).__name__}")
    return items


def _manifest(config: Config, draft_key: str, target_key: str) -> dict[str, Any]:
    """What is known about imported data."""
    names = {
        name: {"name": getattr(config.pair, name).path, "revision": getattr(config.pair, name).revision} for name in ("target", "draft")
    }
    keys = hashlib.sha256(f"{draft_key} {target_key}".encode()).hexdigest()
    sampling = {"temperature": 1.0, "top_k": None, "top_p": None}
    return {"format": FORMAT, "source": "specdec++", **names, "sampling": sampling, "keys": keys, "recorded": {}}
