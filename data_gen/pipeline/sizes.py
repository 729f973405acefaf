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
    if config.features is None and heads is not None:
        manifest = Path(config.dir) / "manifest.json"
        existing = read_manifest(config.dir).get("features", ()) if manifest.is_file() else ()
        features: tuple[Feature, ...] = ("fed", "drawn")
        needed = (*_read_by(heads), *existing)
        config = replace(config, features=tuple(name for name in features if name in needed))
    elif heads is not None and heads.features == "cached":
        for name, setting in _read_by(heads).items():
            if name not in config.feature_sets:
                others = "heads.specdec: false" if setting == "heads.specdec" else "other heads.timings"
                raise ValueError(
                    f"data.features is [{', '.join(config.feature_sets)}], but {setting} needs {name} features; remove "
                    f"data.features to get what the heads need, or choose {others}, or heads.features: online, which "
                    "needs none"
                )
    return config


def _read_by(heads: HeadsConfig) -> dict[str, str]:
    """Feature set -> the setting that needs it."""
    timings: dict[str, list[str]] = {"fed": [], "drawn": []}
    for timing in heads.timings:
        timings["fed" if timing == "fed" else "drawn"].append(timing)
    settings = {name: f"heads.timings [{', '.join(names)}]" for name, names in timings.items() if names}
    return ({"fed": "heads.specdec"} if heads.specdec else {}) | settings


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
