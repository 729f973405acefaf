"""`acceptance-heads import-data`: imports data of the official SpecDec++ code as rows and labels, so that heads
can be trained on them.

The JSON (`data/gen_*.py` of the released code) is one list of objects with the fields prompt and continuation
(strings) and prefix, tokens, draft, log_p_7b (draft), log_p_70b (target), p_acc (lists, or lists written as
strings). So it has Y, log q(Y), log p(Y) and P, under temperature 1 without truncation. The draft adds H(q) and
the logits of q, and the coins of the mixed sequence are drawn here (data.mixing_ratio). acceptance_rate and
cross_entropy would need the target and are null. Before a shard is written, the draft's log q(Y) is compared
with the file's, so that another draft and swapped keys are refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.load import accepts_yaml
from configs.paths import local_path
from configs.schema import Config, DataConfig, PairConfig
from data_gen.labels.labeller import Labelled
from data_gen.labels.laws import acceptance_prob_of
from data_gen.pipeline import stages
from data_gen.pipeline.checks import check_lengths, check_settings, limit_of
from data_gen.pipeline.worker import Job, Worker
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.sets import SPLITS
from data_gen.responses.exchange import Answers, Exchange, ShardSpec
from data_gen.store.manifest import FORMAT, describe_model, settle
from lm import load_pair_tokenizer, model_config
from lm.pair import vocab_size_of
from store.json_files import read_json
from store.lock import only_writer
from store.progress import Bar
from store.shards import DATA_FOLDERS, clean_partial, forget_broken, sha256_of, shards_in, write_atomic

_SAMPLING = {"temperature": 1.0, "top_k": None, "top_p": None}
_KEYS = ("log_p_7b", "log_p_70b")
"""Fields of log q and log p, whatever the models."""
_TOLERANCE_NATS = 0.1
"""Limit of the median difference in log q(Y): half precision is well below it, another model above."""
_INFINITY = re.compile(r"-inf\b")
_ROUNDING = 1e-3
Row = tuple[Exchange, dict[str, Tensor]]
"""One object of the file, and its draft_ids, log_q, log_p and acceptance_prob, each [token]."""


@accepts_yaml
def import_(config: Config, *, file: str, split: str = "train") -> None:
    """Run `acceptance-heads import-data`; `configs.making` documents its flags."""
    pair = config.pair
    data = config.data
    path = local_path(file, "--file")
    if split not in SPLITS:
        raise ValueError(f"--split is {split!r}; it must be one of {', '.join(SPLITS)}")
    check_settings(pair, data)
    _check_sampling(pair)
    items = _read(path)
    size = data.rows_per_shard
    manifest = _manifest(pair, data)
    check_lengths(pair, data, names=("draft",))
    num_ids = vocab_size_of(load_pair_tokenizer(pair), model_config(pair.draft))

    def row(number: int) -> Row:
        return _parse(items[number], f"{split}-{number}", where=f"{file}: item {number}")

    with only_writer(data.dir, setting="data.dir"):
        if Path(data.dir, "manifest.json").is_file():
            _claim(data.dir, manifest, split, path)
        for number in range(len(items)):  # not kept in memory, since a file may hold 40,000
            _check_fit(*row(number), num_ids=num_ids, limit=limit_of(pair.draft))
        clean_partial(data.dir, *DATA_FOLDERS)
        forget_broken(path for path in shards_in(data.dir, DATA_FOLDERS) if path.name.startswith(f"{split}-"))
        starts = range(0, len(items), size)
        missing = [start for start in starts if not stages.is_done(ShardSpec(split, start // size, ()), data)]
        worker = Worker(Job(pair=pair, data=data, stage="draft")) if missing else None
        for start in Bar(missing, unit="shards", desc=split):
            assert worker is not None
            rows = [row(number) for number in range(start, min(start + size, len(items)))]
            exchanges = [exchange for exchange, _ in rows]
            known = {name: torch.cat([columns[name] for _, columns in rows]) for name in rows[0][1]}
            spec = ShardSpec(split, start // size, tuple(Prompt(one.id, (one.prompt,)) for one in exchanges))
            columns = _labelled(spec, exchanges, known, worker) | known
            _claim(data.dir, manifest, split, path)  # not before: a refused file leaves no folder
            stages.write_files(spec, Answers(exchanges, []), Labelled(columns, {}), data)
    print(f"{data.dir}: {len(items):,} rows of {split} from {file}")


def _check_sampling(pair: PairConfig) -> None:
    if asdict(pair.sampling) != _SAMPLING:
        raise ValueError(
            f"pair.sampling is {asdict(pair.sampling)}, but the official labels are of temperature 1 without "
            "truncation; pass --pair.sampling.temperature 1 --pair.sampling.top_k null --pair.sampling.top_p null, "
            "here and for train.py"
        )


def _labelled(
    spec: ShardSpec, exchanges: Sequence[Exchange], known: Mapping[str, Tensor], worker: Worker
) -> dict[str, Tensor]:
    """The columns of the draft at the file's draft_ids; ValueError if its log q differs from the file's."""
    columns, broken, *_ = worker.label_and_mix(spec, exchanges, {"draft_ids": known["draft_ids"]}, lambda count: None)
    for number, reason in broken.items():
        raise ValueError(f"{exchanges[number].id}: {reason}, or remove this row from the file")
    difference = float((columns["log_q"] - known["log_q"]).abs().median())
    if not difference <= _TOLERANCE_NATS:
        raise ValueError(
            f"log q of the draft at {worker.job.pair.draft.path} differs from {_KEYS[0]} of the file by "
            f"{difference:.2f} nats in the median (at most {_TOLERANCE_NATS}); set pair.draft to the model that made "
            "the file"
        )
    return columns


def _check_fit(exchange: Exchange, columns: Mapping[str, Tensor], *, num_ids: int, limit: int | None) -> None:
    if not exchange.prompt_ids or not exchange.response_ids:
        raise ValueError(f"{exchange.id} has no prompt or no response tokens; remove it from the file")
    ids = [*exchange.prompt_ids, *exchange.response_ids]
    highest = max(*ids, *columns["draft_ids"].tolist())
    if highest >= num_ids:
        raise ValueError(
            f"{exchange.id} has token ids up to {highest}, but pair.draft's are 0 to {num_ids - 1}; set pair.draft to "
            "the model of the file"
        )
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"{exchange.id} is {len(ids)} tokens long, but pair.draft reads at most {limit}; remove it from the file"
        )


def _claim(directory: str, manifest: Mapping[str, object], split: str, file: Path) -> None:
    """Settle the manifest, and record the file of the split, so that no other file can continue its shards."""
    settle(directory, manifest)
    path = Path(directory, "imported", f"{split}.json")
    source = {"name": file.name, "sha256": sha256_of(file)}
    earlier = read_json(path, remedy="delete it if its split is this file's", keys=source) if path.is_file() else source
    if earlier["sha256"] != source["sha256"]:
        raise ValueError(
            f"{directory} holds {split} rows of another file ({earlier['name']}, sha256 {earlier['sha256'][:12]}); "
            "choose another data.dir"
        )
    write_atomic(path, json.dumps(source).encode())


def _manifest(pair: PairConfig, data: DataConfig) -> dict[str, object]:
    target = pair.target  # described by its name if it was never downloaded
    is_here = Path(target.path).is_dir()
    return {
        "format": FORMAT,
        "source": "specdec++",
        "prompts": "specdec++",
        "target": describe_model(target) if is_here else {"name": target.path, "revision": target.revision},
        "draft": describe_model(pair.draft),
        "sampling": _SAMPLING,
        "keys": list(_KEYS),
        "rows_per_shard": data.rows_per_shard,
        "mixing_ratio": data.mixing_ratio,
        "seed": data.seed,
        "recorded": {"target_path": target.path, "draft_path": pair.draft.path},
    }


def _parse(item: object, name: str, *, where: str) -> Row:
    """One object of the file as the row `name`; `where` is for messages."""
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object, got {type(item).__name__}")
    lists = {key: _list(item, key, where) for key in ("prefix", "tokens", "draft", *_KEYS)}
    lengths = {key: len(values) for key, values in lists.items() if key != "prefix"}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: expected one number per response token, got lengths {lengths}")
    log_q, log_p = (torch.tensor(lists[key], dtype=torch.float32) for key in _KEYS)
    columns = {
        "draft_ids": torch.tensor(lists["draft"], dtype=torch.int64),
        "log_q": log_q,
        "log_p": log_p,
        "acceptance_prob": acceptance_prob_of(log_p, log_q),
    }
    return Exchange(name, str(item.get("prompt", "")), lists["prefix"], lists["tokens"], None), columns


def _list(item: dict[str, Any], key: str, where: str) -> list[Any]:
    """A list of token ids or log probabilities, which Python may have written as a string."""
    value = item.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(_INFINITY.sub("-Infinity", value))  # Python's -inf in JSON
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: expected {key} to be a list of numbers written as a string; {error}") from error

    def is_valid(number: Any) -> bool:
        if key in _KEYS:
            return type(number) in (int, float) and number <= _ROUNDING
        return type(number) is int and 0 <= number < 2**31

    if not isinstance(value, list) or not all(map(is_valid, value)):
        kind = "numbers of at most 0" if key in _KEYS else "token ids"
        raise ValueError(f"{where}: expected {key} to be a list of {kind}, got {value!r:.60}; fields: {sorted(item)}")
    return value


def _read(path: Path) -> list[object]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; set --file to the path of the official JSON")
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path}: expected the official JSON; {error}; download it again") from error
    if not isinstance(items, list) or not items:
        raise ValueError(f"{path}: expected a list of objects, got {type(items).__name__}")
    return items
