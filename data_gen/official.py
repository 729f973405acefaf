"""`acceptance-heads import-data`: imports data of the official SpecDec++ code as rows, and labels and features by the
config's draft, so that heads can be trained on them.

The JSON (`data/gen_*.py` of the released code) is one list of objects with the fields prompt and continuation (strings)
and prefix, tokens, draft, log_p_7b (draft), log_p_70b (target), p_acc (lists, or lists written as strings). So it has
Y, log q(Y), log p(Y) and P, under temperature 1 without truncation. The draft adds its hidden states over prompt +
X_<i (drawn-time) and prompt + Z_<=i (fed-time, mixed here with data.mixing_ratio), and H(q). acceptance_rate and
cross_entropy would need the target and are null. Before a shard is written, the draft's log q(Y) is compared with the
file's, so that another draft and swapped keys are refused.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.paths import local_path
from configs.schema import Config, DataConfig, PairConfig
from data_gen.labels.laws import acceptance_prob_of
from data_gen.pipeline import stages
from data_gen.pipeline.command import check_settings
from data_gen.pipeline.worker import Job, Worker, check_lengths, limit_of
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import SPLITS
from data_gen.responses.conversation import ShardSpec
from data_gen.responses.exchange import Answers, Exchange
from data_gen.store.identity import describe_model
from data_gen.store.manifest import FORMAT, settle
from store.json_files import read_json
from store.lock import only_writer
from store.progress import Bar
from store.shards import (
    SHARD_FOLDERS,
    clean_partial,
    forget_broken,
    is_whole,
    rows_path,
    sha256_of,
    shards_in,
    write_atomic,
)

_SAMPLING = {"temperature": 1.0, "top_k": None, "top_p": None}
_TOLERANCE_NATS = 0.1
"""Limit of the median difference in log q(Y): half precision is well below it, another model above."""
_INFINITY, _ROUNDING = re.compile(r"-inf\b"), 1e-3
Row = tuple[Exchange, dict[str, Tensor]]
"""One object of the file, and its draft_ids, log_q, log_p and acceptance_prob, each [token]."""


def import_(
    config: Config,
    *,
    file: str,
    split: str = "train",
    features: bool = True,
    draft_key: str = "log_p_7b",
    target_key: str = "log_p_70b",
) -> None:
    """Import the official SpecDec++ JSON as one split: rows, and features by the draft. Run it once per split, then
    train.

    Args:
        file: the JSON, such as data/alpaca_data/train.json of the official code.
        split: train, dev or test. Training needs train and dev, and test unless data.num_test is 0.
        features: run pair.draft over the rows; false: write rows only, without a model; heads cannot train on them.
        draft_key: field with the draft's log probabilities of the draft tokens.
        target_key: field with the target's log probabilities of the draft tokens.
    """
    pair, data, path = config.pair, config.data, local_path(file, "--file")
    _check_request(pair, data, split, features=features)
    keys, items, size = (draft_key, target_key), _read(path), data.rows_per_shard

    def row(number: int) -> Row:
        return _parse(items[number], f"{split}-{number}", keys=keys, where=f"{file}: item {number}")

    claim = partial(_claim, Path(data.dir), _manifest(pair, data, features=features, keys=keys), split=split, file=path)
    with only_writer(data.dir, setting="data.dir"):
        if Path(data.dir, "manifest.json").is_file():
            claim()
        clean_partial(data.dir, *SHARD_FOLDERS)
        forget_broken(path for path in shards_in(data.dir) if path.name.startswith(f"{split}-"))
        shards = range(-(-len(items) // size))
        is_done = stages.is_done if features else lambda spec, data: is_whole(rows_path(data.dir, split, spec.index))
        missing = [index for index in shards if not is_done(ShardSpec(split, index, ()), data)]
        worker = None
        if features and missing:
            check_lengths(pair, data, names=("draft",))
            worker = Worker(Job(pair=pair, data=data, stage="draft"))
        # every item before the first forward; not kept in memory, since a file may hold 40,000
        for exchange, columns in map(row, range(len(items))):
            if worker is not None:
                _check_fit(exchange, columns["draft_ids"].tolist(), worker)
        for index in Bar(missing, unit="shards", desc=split, disable=worker is None):
            part = [row(number) for number in range(index * size, min((index + 1) * size, len(items)))]
            _write(split, index, part, data=data, worker=worker, claim=claim)
    print(f"{data.dir}: {len(items):,} rows of {split} from {file}, {'with' if features else 'no'} features")


def _check_request(pair: PairConfig, data: DataConfig, split: str, *, features: bool) -> None:
    if split not in SPLITS:
        raise ValueError(f"--split is {split!r}; it must be one of {', '.join(SPLITS)}")
    if features:  # rows alone need no model
        check_settings(pair, data)
    if features and asdict(pair.sampling) != _SAMPLING:
        raise ValueError(
            f"pair.sampling is {asdict(pair.sampling)}, but the official labels are of temperature 1 without "
            "truncation; pass --pair.sampling.temperature 1 --pair.sampling.top_k null --pair.sampling.top_p null, "
            "here and for train.py"
        )


def _write(
    split: str,
    index: int,
    part: Sequence[Row],
    *,
    data: DataConfig,
    worker: Worker | None,
    claim: Callable[[], None],
) -> None:
    """Write one shard; `claim` is called just before, so that a refused file leaves no folder."""
    spec = ShardSpec(split, index, tuple(Prompt(exchange.id, (exchange.prompt,)) for exchange, _ in part))
    answers = Answers([exchange for exchange, _ in part], [])
    columns = {name: torch.cat([table[name] for _, table in part]) for name in part[0][1]}
    if worker is None:
        claim()
        stages.write_rows(spec, answers, columns=columns, data=data)
        return
    known = {"draft_ids": columns["draft_ids"]}
    labelled = worker.label_and_mix(spec, answers.exchanges, known, lambda count: None)
    for number, reason in labelled.broken.items():
        raise ValueError(f"{answers.exchanges[number].id}: {reason}, or remove this row from the file")
    difference = float((labelled.columns["log_q"] - columns["log_q"]).abs().median())
    if not difference <= _TOLERANCE_NATS:
        raise ValueError(
            f"log q of the draft at {worker.job.pair.draft.path} differs from the file's by {difference:.2f} nats in "
            f"the median (at most {_TOLERANCE_NATS}): set pair.draft to the model that made the file, check "
            "--draft_key, or import rows only with --features false"
        )
    claim()
    stages.write_files(spec, answers, columns=labelled.columns | columns, data=data)


def _check_fit(exchange: Exchange, draft_ids: list[int], worker: Worker) -> None:
    limit, last = limit_of(worker.job.pair.draft), worker.labeller.vocab_size - 1
    ids = [*exchange.prompt_ids, *exchange.response_ids, *draft_ids]
    length = len(exchange.prompt_ids) + len(exchange.response_ids)
    if not exchange.prompt_ids or not exchange.response_ids:
        raise ValueError(f"{exchange.id} has no prompt or no response tokens; remove it from the file")
    if not 0 <= min(ids) <= max(ids) <= last:
        raise ValueError(
            f"{exchange.id} has token ids {min(ids)} to {max(ids)}, but pair.draft's are 0 to {last}; set pair.draft "
            "to the model of the file"
        )
    if limit is not None and length > limit:
        raise ValueError(
            f"{exchange.id} is {length} tokens long, but pair.draft reads at most {limit}; remove it from the file"
        )


def _claim(directory: Path, manifest: Mapping[str, Any], *, split: str, file: Path) -> None:
    """Settle the manifest, and record the file of the split, so that no other file can continue its shards."""
    settle(directory, manifest)
    path = directory / "imported" / f"{split}.json"
    source = {"name": file.name, "sha256": sha256_of(file)}
    earlier = read_json(path, remedy="delete it if its split is this file's", keys=source) if path.is_file() else source
    if earlier["sha256"] != source["sha256"]:
        raise ValueError(
            f"{directory} holds {split} rows of another file ({earlier['name']}, sha256 {earlier['sha256'][:12]}); "
            "choose another data.dir"
        )
    write_atomic(path, json.dumps(source).encode())


def _manifest(pair: PairConfig, data: DataConfig, *, features: bool, keys: tuple[str, str]) -> dict[str, Any]:
    settings = {name: getattr(data, name) for name in ("feature_dtype", "mixing_ratio", "mixes", "seed")}
    # a target that was never downloaded is described by its name
    needs_hash = {"target": Path(pair.target.path).is_dir(), "draft": features or Path(pair.draft.path).is_dir()}
    sources = {name: getattr(pair, name) for name in needs_hash}
    return {
        "format": FORMAT,
        "source": "specdec++",
        "prompts": "specdec++",
        **{
            name: describe_model(source) if needs_hash[name] else {"name": source.path, "revision": source.revision}
            for name, source in sources.items()
        },
        "sampling": _SAMPLING,
        "keys": list(keys),
        "rows_per_shard": data.rows_per_shard,
        **({"features": list(data.feature_sets), **settings} if features else {}),
        "recorded": {"target_path": pair.target.path, "draft_path": pair.draft.path},
    }


def _parse(item: Any, name: str, *, keys: tuple[str, str], where: str) -> Row:
    """One object of the file as the row `name`; `keys` are the fields of log q and log p, `where` is for messages."""
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object, got {type(item).__name__}")
    lists = {key: _list(item, key, where, is_id=key not in keys) for key in ("prefix", "tokens", "draft", *keys)}
    lengths = {key: len(values) for key, values in lists.items() if key != "prefix"}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: expected one number per response token, got lengths {lengths}")
    log_q, log_p = (torch.tensor(lists[key], dtype=torch.float32) for key in keys)
    columns = {
        "draft_ids": torch.tensor(lists["draft"], dtype=torch.int64),
        "log_q": log_q,
        "log_p": log_p,
        "acceptance_prob": acceptance_prob_of(log_p, log_q),
    }
    return Exchange(name, str(item.get("prompt", "")), lists["prefix"], lists["tokens"], None), columns


def _list(item: dict[str, Any], key: str, where: str, *, is_id: bool) -> list[Any]:
    """A list of token ids or log probabilities, which Python may have written as a string."""

    def is_valid(value: Any) -> bool:
        if is_id:
            return type(value) is int and 0 <= value < 2**31
        return type(value) in (int, float) and value <= _ROUNDING

    value = item.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(_INFINITY.sub("-Infinity", value))  # Python's -inf in JSON
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: expected {key} to be a list of numbers written as a string; {error}") from error
    if not isinstance(value, list) or not all(map(is_valid, value)):
        kind = "token ids" if is_id else "numbers of at most 0"
        raise ValueError(f"{where}: expected {key} to be a list of {kind}, got {value!r:.60}; fields: {sorted(item)}")
    return value


def _read(path: Path) -> list[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; set --file to the path of the official JSON")
    try:
        items = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path}: expected the official JSON; {error}; download it again") from error
    if not isinstance(items, list) or not items:
        raise ValueError(f"{path}: expected a list of objects, got {type(items).__name__}")
    return items
