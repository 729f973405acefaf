"""`python -m data_gen import`: data made by the official SpecDec++ code -> rows, and with the draft of the config the features of both
timings, so that `python train.py` runs on them.

The file keeps Y, log q(Y), log p(Y) and so P, all under temperature 1 without truncation. What else heads read comes from the draft: its
hidden states over prompt + X_<i (drawn-time) and prompt + Z_<=i (fed-time, mixed here with data.mixing_ratio), and H(q). So neither timing
lacks anything; acceptance_rate and cross_entropy would need the target and stay null. Before a shard is written, the draft's own log q(Y)
is held against the file's: another draft, or swapped keys, are refused.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from configs.schema import Config, ModelSource
from data_gen.official import json_file
from data_gen.pipeline import stages
from data_gen.pipeline.command import check
from data_gen.pipeline.worker import Worker
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import SPLITS
from data_gen.responses.conversation import ShardSpec
from data_gen.responses.exchange import Exchange
from data_gen.store import rows
from data_gen.store.manifest import FORMAT, describe_model, settle
from data_gen.store.shards import clean_partial, is_whole, rows_path, write_atomic, write_shard

_SAMPLING = {"temperature": 1.0, "top_k": None, "top_p": None}
_TOLERANCE_NATS = 0.1
"""Of log q(Y), in the median: half precision stays well under it, another model does not."""

Parsed = tuple[Exchange, dict[str, Tensor]]


def import_(
    config: Config, *, file: str, split: str = "train", features: bool = True, draft_key: str = "log_p_7b", target_key: str = "log_p_70b"
) -> None:
    """Import the official SpecDec++ JSON as one split: rows, and features by the draft. Once per split; then train.py.

    Args:
        file: the JSON, such as data/alpaca_data/train.json of the official code.
        split: train, dev or test. Training needs train and dev, and test unless data.num_test is 0.
        features: run pair.draft over the rows; false: rows only, no model is loaded, and heads cannot train on them.
        draft_key: field with the draft's log probabilities of the draft tokens.
        target_key: field with the target's.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; one of {', '.join(SPLITS)}")
    check(config)
    if features and asdict(config.pair.sampling) != _SAMPLING:
        raise ValueError(
            f"pair.sampling is {asdict(config.pair.sampling)} and the official labels are of temperature 1 without truncation; pass "
            "--pair.sampling.temperature 1 --pair.sampling.top_k null --pair.sampling.top_p null, here and for train.py"
        )
    items, size = json_file.read(Path(file)), config.data.rows_per_shard

    def row(number: int) -> Parsed:
        return json_file.parse(items[number], f"{file}: item {number}", f"{split}-{number}", (draft_key, target_key))

    claim = partial(_claim, Path(config.data.dir), _manifest(config, features, (draft_key, target_key)), split, Path(file))
    if Path(config.data.dir, "manifest.json").is_file():
        claim()
    clean_partial(config.data.dir)
    missing = [index for index in range(-(-len(items) // size)) if not _is_done(config, split, index, features)]
    worker = Worker(config, "draft") if features and missing else None
    for number in range(len(items)):  # every item before the first forward; rows are not kept, a file may hold 40,000
        _check_fit(row(number), worker)
    for index in tqdm(missing, unit="shard", desc=split, disable=worker is None):
        part = [row(number) for number in range(index * size, min((index + 1) * size, len(items)))]
        spec = ShardSpec(split, index, tuple(Prompt(exchange.id, (exchange.prompt,)) for exchange, _ in part))
        _write(config, spec, part, worker, claim)
    print(f"{config.data.dir}: {len(items):,} rows of {split} from {file}" + (", with features" if features else ", no features"))


def _write(config: Config, spec: ShardSpec, part: Sequence[Parsed], worker: Worker | None, claim: Callable[[], None]) -> None:
    """One shard; the folder is claimed when the first is about to be written, so that a refusal leaves none."""
    exchanges = [exchange for exchange, _ in part]
    columns = {name: torch.cat([values[name] for _, values in part]) for name in part[0][1]}
    if worker is None:
        claim()
        facts = {"rows": len(part), "tokens": len(columns["log_p"]), "input": len(part), "ok": len(part), "problems": []}
        write_shard(rows_path(config.data.dir, spec.split, spec.index), rows.to_parquet(exchanges, columns, from_target=None), **facts)
        return
    known = {"draft_ids": columns["draft_ids"]}
    ours = stages.label_and_mix(exchanges, spec, worker.labeller, config.data, lambda count: None, known)
    _check_draft(ours["log_q"], columns["log_q"], config.pair.draft.path)
    claim()
    stages.write_files(exchanges, [], ours | columns, spec, config.data)


def _is_done(config: Config, split: str, index: int, features: bool) -> bool:
    if features:
        return stages.is_done(config.data, ShardSpec(split, index, ()))
    return is_whole(rows_path(config.data.dir, split, index))


def _check_fit(row: Parsed, worker: Worker | None) -> None:
    """Raise ValueError for a row that the draft, if there is one, cannot read."""
    if worker is None:
        return
    assert worker.labeller.draft is not None
    limit = getattr(worker.labeller.draft.config.get_text_config(), "max_position_embeddings", None)
    (exchange, columns), last = row, worker.labeller.vocab_size - 1
    ids = [*exchange.prompt_ids, *exchange.response_ids, *columns["draft_ids"].tolist()]
    if not exchange.prompt_ids or not exchange.response_ids:
        raise ValueError(f"{exchange.id} has no prompt or no response tokens; remove it from the file")
    if not 0 <= min(ids) <= max(ids) <= last:
        raise ValueError(f"{exchange.id} has token ids {min(ids)} to {max(ids)} and pair.draft's tokenizer 0 to {last}")
    length = len(exchange.prompt_ids) + len(exchange.response_ids)
    if limit is not None and length > limit:
        raise ValueError(f"{exchange.id} is {length} tokens long and pair.draft reads at most {limit}; remove it from the file")


def _check_draft(ours: Tensor, theirs: Tensor, path: str) -> None:
    difference = float((ours - theirs).abs().median())
    if not difference <= _TOLERANCE_NATS:
        raise ValueError(
            f"log q of the draft at {path} differs from the file's by {difference:.2f} nats in the median (at most {_TOLERANCE_NATS}): set "
            "pair.draft to the model that made the file, check --draft_key, or import rows only with --features false"
        )


def _claim(directory: Path, manifest: Mapping[str, Any], split: str, file: Path) -> None:
    """Settle the manifest, and which file the split is of, so that another one is not taken for done."""
    settle(directory, manifest)
    path, here = directory / "imported" / f"{split}.json", {"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    there = json.loads(path.read_text()) if path.is_file() else here
    if there["sha256"] != here["sha256"]:
        raise ValueError(
            f"{directory} holds {split} rows of another file ({there['name']}, sha256 {there['sha256'][:12]}); choose another data.dir"
        )
    write_atomic(path, json.dumps(here).encode())


def _manifest(config: Config, features: bool, keys: tuple[str, str]) -> dict[str, Any]:
    """What is known about imported data, and how its features were made."""
    data, pair = config.data, config.pair
    made = {"features": list(data.features), "feature_dtype": data.feature_dtype, "mixing_ratio": data.mixing_ratio, "mixes": data.mixes}
    return {
        "format": FORMAT,
        "source": "specdec++",
        "prompts": "specdec++",
        "target": _describe(pair.target, needed=False),
        "draft": _describe(pair.draft, needed=features),
        "sampling": _SAMPLING,
        "keys": list(keys),
        "rows_per_shard": data.rows_per_shard,
        **(made | {"seed": data.seed} if features else {}),
        "recorded": {"target_path": pair.target.path, "draft_path": pair.draft.path},
    }


def _describe(source: ModelSource, *, needed: bool) -> dict[str, Any]:
    """A model by its fingerprint where it is at hand or needed, else by its name alone."""
    if needed or Path(source.path).is_dir():
        return describe_model(source)
    return {"name": source.path, "revision": source.revision}
