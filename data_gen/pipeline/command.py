"""A run: check the config, settle the manifest, make the shards that are missing, account for every prompt."""

import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from configs.schema import Config, DataConfig
from data_gen.pipeline.engine import run_engine
from data_gen.pipeline.stages import is_done, stages_of
from data_gen.pipeline.worker import FEATURE_DTYPES
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import SPLITS
from data_gen.responses.conversation import ShardSpec
from data_gen.store.errors import account, write_errors
from data_gen.store.manifest import make_manifest, settle
from data_gen.store.shards import clean_partial, rows_path
from lm import Sampling, load_pair_tokenizer


def make(config: Config) -> None:
    """Make or resume the data: rows, features, manifest, errors.jsonl."""
    check(config)
    tokenizer = load_pair_tokenizer(config.pair)
    splits = {split: load_prompts(config.data, split) for split in SPLITS}
    settle(config.data.dir, make_manifest(config, tokenizer, splits))
    clean_partial(config.data.dir)
    specs = [spec for split in SPLITS for spec in cut(split, splits[split], config.data.rows_per_shard)]
    num_missing = sum(not is_done(config.data, spec) for spec in specs)
    for stage in stages_of(config.data):
        missing = [spec for spec in specs if not is_done(config.data, spec, stage)]
        if missing:
            run_engine(config, stage, missing)
    clean_partial(config.data.dir)  # of actors that died in this very run
    shutil.rmtree(Path(config.data.dir) / "stages", ignore_errors=True)
    paths = [rows_path(config.data.dir, spec.split, spec.index) for spec in specs]
    write_errors(config.data.dir, paths)
    totals = account(paths)
    print(
        f"{config.data.dir}: {totals['ok']:,} rows, {totals['tokens']:,} tokens in {len(specs)} shards ({num_missing} made now); "
        f"{totals['error']:,} errors and {totals['skipped']:,} skipped of {totals['input']:,} prompts, see errors.jsonl"
    )


def cut(split: str, prompts: Sequence[Prompt], size: int) -> list[ShardSpec]:
    """The shards of one split: consecutive prompts."""
    return [ShardSpec(split, index, tuple(prompts[start : start + size])) for index, start in enumerate(range(0, len(prompts), size))]


def check(config: Config) -> None:
    """Raise ValueError for a setting that is out of range, before anything is loaded."""
    Sampling(**vars(config.pair.sampling))
    data = config.data
    for name in ("rows_per_shard", "batch_size", "max_new_tokens", "max_prompt_tokens", "mixes", "chunk_mb"):
        _at_least(f"data.{name}", getattr(data, name), 1)
    _at_least("data.server.concurrency", data.server.concurrency, 1)
    _at_least("data.server.max_retries", data.server.max_retries, 0)
    _at_least("data.ray.num_workers", data.ray.num_workers, 1)
    if not 0 <= data.mixing_ratio <= 1:
        raise ValueError(f"data.mixing_ratio is {data.mixing_ratio}; it is a probability, 0 to 1")
    if data.feature_dtype not in FEATURE_DTYPES:
        raise ValueError(f"data.feature_dtype is {data.feature_dtype!r}; one of {', '.join(FEATURE_DTYPES)}")
    _check_source(data)
    if data.engine == "ray":
        _needs("ray.data", "data.engine is ray", extra="ray", instead="engine: local")
    if data.source == "server":
        _needs("openai", "data.source is server", extra="serving", instead="source: transformers")


def _at_least(name: str, value: int, limit: int) -> None:
    if value < limit:
        raise ValueError(f"{name} is {value}; it must be at least {limit}")


def _needs(module: str, setting: str, *, extra: str, instead: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        raise ValueError(f"{setting} and {module} is not installed: install the extra `{extra}`, or use {instead}") from error


def _check_source(data: DataConfig) -> None:
    if data.source == "file" and data.responses is None:
        raise ValueError("data.source is file and data.responses names none; give it the path of a JSONL file")
    if data.source == "file" and not Path(str(data.responses)).is_file():
        raise FileNotFoundError(f"data.responses is {data.responses}; there is no such file")
