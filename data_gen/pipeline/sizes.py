"""Settles what the section `data` leaves open: how many prompts are train, dev and test, and which features are
stored.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from configs.schema import DataConfig, HeadsConfig
from data_gen.prompts.sets import WEIGHTS, load, load_prompts, set_of
from data_gen.prompts.splits import SPLITS, split_by_id
from data_gen.store.manifest import read_manifest

Feature = Literal["fed", "drawn"]


def settled(config: DataConfig, heads: HeadsConfig | None = None, *, is_verbose: bool = True) -> DataConfig:
    """The section with `split_weights` and `num_train` as numbers, and with the features that these heads need. An
    existing directory keeps its shares, so that no prompt moves from one split to another. Evaluation settles the
    section as training did, so none of its test prompts was trained on.
    """
    if config.split_weights is None:
        config = replace(config, split_weights=_weights(config, is_verbose=is_verbose))
    if config.num_train is None:
        if any(source.path == "stories" for source in config.prompt_sources):
            raise ValueError("data.num_train is null, but the generated stories never end; set data.num_train")
        config = replace(config, num_train=len(load_prompts(config, "train")))
    if heads is None:
        return config
    needed = {"fed" if timing == "fed" else "drawn" for timing in heads.timings} | ({"fed"} if heads.specdec else set())
    if config.features is None:
        if (Path(config.dir) / "manifest.json").is_file():
            needed |= set(read_manifest(config.dir).get("features", ()))
        features: tuple[Feature, ...] = ("fed", "drawn")
        return replace(config, features=tuple(name for name in features if name in needed))
    if heads.features == "cached" and (lacking := sorted(needed - set(config.features))):
        raise ValueError(
            f"data.features is [{', '.join(config.features)}], but heads.timings [{', '.join(heads.timings)}] with "
            f"heads.specdec: {str(heads.specdec).lower()} needs {lacking[0]} features; remove data.features to get "
            "what the heads need, choose other heads, or heads.features: online, which needs none"
        )
    return config


def _weights(config: DataConfig, *, is_verbose: bool) -> tuple[int, int, int]:
    """The shares of an existing directory; else `WEIGHTS`, or the exact sizes if these give too few prompts."""
    if (Path(config.dir) / "manifest.json").is_file():
        train, dev, test = read_manifest(config.dir).get("split_weights") or WEIGHTS
        return train, dev, test
    sources = config.prompt_sources
    if len(sources) != 1 or config.split_ids is not None or sources[0].path == "stories":
        return WEIGHTS
    prompt_set = set_of(sources[0])
    if prompt_set.shares is not None:
        return WEIGHTS
    prompts = load(prompt_set)
    num_dev, num_test = config.num_dev, 0 if prompt_set.test_split else config.num_test
    requested = {"train": config.num_train, "dev": num_dev, "test": num_test}
    pools = split_by_id(prompts, weights=WEIGHTS, seed=config.seed)
    if config.num_train is not None and all(len(pools[split]) >= (requested[split] or 0) for split in SPLITS):
        return WEIGHTS
    num_rest = len(prompts) - num_dev - num_test
    if num_rest < (1 if config.num_train is None else config.num_train):
        raise ValueError(
            f"{sources[0].path} has {len(prompts):,} prompts, but data.num_train, num_dev and num_test are "
            f"{config.num_train or 'null'}, {num_dev:,} and {num_test:,}; lower them"
        )
    parts = f"{num_rest:,} for train, {num_dev:,} for dev and {num_test:,} for test"
    if is_verbose:
        print(f"{sources[0].path}: {len(prompts):,} prompts, {parts}")
    return num_rest, num_dev, num_test
