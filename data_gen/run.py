"""A run: check the config, settle the manifest, make the shards that are missing, account for every prompt."""

from collections.abc import Iterable, Sequence

import torch
from tqdm import tqdm

from configs.schema import Config
from data_gen.errors import write_errors
from data_gen.labelling import Labeller
from data_gen.manifest import make_manifest, settle
from data_gen.prompts import SPLITS, load_prompts
from data_gen.responses import TargetInProcess
from data_gen.shard_maker import ShardSpec, is_done, make_shard
from data_gen.shards import clean_partial
from lm import Sampling, load_pair, load_tokenizer

FEATURE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make(config: Config) -> None:
    """Make or resume the data: rows, features, manifest."""
    check(config)
    tokenizer = load_tokenizer(config.pair.target, trust_remote_code=config.pair.trust_remote_code)
    splits = {split: load_prompts(config.data, split) for split in SPLITS}
    settle(config.data.dir, make_manifest(config, tokenizer, splits))
    clean_partial(config.data.dir)
    specs = [spec for split in SPLITS for spec in cut(split, splits[split], config.data.rows_per_shard)]
    missing = [spec for spec in specs if not is_done(config, spec)]
    if missing:
        make_here(config, missing)
    totals = write_errors(config.data.dir, [(spec.split, spec.index) for spec in specs])
    print(
        f"{config.data.dir}: {totals['ok']:,} rows, {totals['tokens']:,} tokens in {len(specs)} shards ({len(missing)} made now); "
        f"{totals['error']:,} errors + {totals['skipped']:,} skipped of {totals['input']:,} prompts, see errors.jsonl"
    )


def check(config: Config) -> None:
    """Raise ValueError for a setting that is out of range."""
    data = config.data
    for name in ("rows_per_shard", "batch_size", "max_new_tokens", "max_prompt_tokens", "mixes", "chunk_mb"):
        if getattr(data, name) < 1:
            raise ValueError(f"data.{name} is {getattr(data, name)}; it must be at least 1")
    if not 0 <= data.mixing_ratio <= 1:
        raise ValueError(f"data.mixing_ratio is {data.mixing_ratio}; it is a probability, 0 to 1")
    if data.feature_dtype not in FEATURE_DTYPES:
        raise ValueError(f"data.feature_dtype is {data.feature_dtype!r}; one of {', '.join(FEATURE_DTYPES)}")


def cut(split: str, prompts: Sequence, size: int) -> list[ShardSpec]:
    """The shards of one split."""
    return [ShardSpec(split, index, tuple(prompts[start : start + size])) for index, start in enumerate(range(0, len(prompts), size))]


def make_here(config: Config, specs: Iterable[ShardSpec]) -> None:
    """`engine: local`: one shard after the other in this process."""
    specs = list(specs)
    with tqdm(total=2 * sum(spec.num_requests for spec in specs), unit="step", desc="loading models", mininterval=0.2) as bar:
        pair = load_pair(config.pair)
        sampling = Sampling(**vars(config.pair.sampling))
        source = TargetInProcess(pair.target, sampling, pair.vocab_size, pair.eos_ids, config.data.max_new_tokens, config.data.batch_size)
        labeller = Labeller(
            pair.draft,
            pair.target,
            sampling,
            pair.vocab_size,
            config.data.batch_size,
            config.data.chunk_mb,
            FEATURE_DTYPES[config.data.feature_dtype],
        )
        for spec in specs:
            bar.set_description(f"{spec.split}-{spec.index:05d}")
            make_shard(spec, source, labeller, pair.tokenizer, config, bar.update)
