"""What the YAML's `data` leaves open, settled once, before anything reads it: how many prompts are train, dev and test,
and which features are kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from configs.schema import DataConfig, HeadsConfig
from data_gen.prompts.hub import load, set_of
from data_gen.prompts.pool import WEIGHTS, load_prompts
from data_gen.prompts.splits import SPLITS, split_by_id
from data_gen.store.manifest import read_manifest

Feature = Literal["fed", "drawn"]


def settled(config: DataConfig, heads: HeadsConfig | None = None, *, is_told: bool = True) -> DataConfig:
    """The section with `split_weights` and `num_train` as numbers, and with the features that these heads need.

    What a directory was made with stays, so that no prompt moves from one split to another. Evaluation settles the same
    section as training did, so none of its test prompts was trained on.

    Args:
        config: the section.
        heads: what reads the features; None: features stay open.
        is_told: print the parts where the prompts are too few for the usual shares.

    Raises:
        ValueError: fewer prompts than dev and test ask for, stories without a number of them, or features that lack
            what these heads read.
    """
    if config.split_weights is None:
        config = replace(config, split_weights=_weights(config, is_told=is_told))
    if config.num_train is None:
        if any(source.path == "stories" for source in config.prompt_sources):
            raise ValueError("data.num_train is null and stories are written here without an end; set data.num_train")
        config = replace(config, num_train=len(load_prompts(config, "train")))
    if config.features is None and heads is not None:
        config = replace(config, features=_features(config, heads))
    elif heads is not None and heads.features == "cached":
        _check_features(config.feature_sets, heads)
    return config


def _features(config: DataConfig, heads: HeadsConfig) -> tuple[Feature, ...]:
    """The feature sets that heads of these timings read; more, where the directory was made with more."""
    manifest = Path(config.dir) / "manifest.json"
    made = read_manifest(config.dir).get("features", ()) if manifest.is_file() else ()
    read = _read_by(heads)
    fed: tuple[Feature, ...] = ("fed",) if "fed" in (*read, *made) else ()
    drawn: tuple[Feature, ...] = ("drawn",) if "drawn" in (*read, *made) else ()
    return (*fed, *drawn)


def _read_by(heads: HeadsConfig) -> dict[Feature, str]:
    """The feature sets that heads read -> the settings that ask for them."""
    of_timings: dict[Feature, list[str]] = {"fed": [], "drawn": []}
    for timing in heads.timings:
        of_timings["fed" if timing == "fed" else "drawn"].append(timing)
    asked: dict[Feature, str] = {
        name: f"heads.timings [{', '.join(timings)}]" for name, timings in of_timings.items() if timings
    }
    if heads.specdec:
        asked.setdefault("fed", "heads.specdec")
    return asked


def _check_features(features: Sequence[Feature], heads: HeadsConfig) -> None:
    """Raise ValueError where features that somebody chose lack some that the heads read."""
    for name, setting in _read_by(heads).items():
        if name not in features:
            others = "heads.specdec: false" if setting == "heads.specdec" else "other heads.timings"
            raise ValueError(
                f"data.features is [{', '.join(features)}], and {setting} reads {name} features; leave data.features "
                f"out, so that it follows from the heads, or choose {others}, or heads.features: online, which reads "
                "none of them"
            )


def _weights(config: DataConfig, *, is_told: bool) -> tuple[int, int, int]:
    """The shares that a directory was made with; else `WEIGHTS`, or the sizes themselves where those have too few."""
    if (Path(config.dir) / "manifest.json").is_file():
        train, dev, test = read_manifest(config.dir).get("split_weights") or WEIGHTS
        return train, dev, test
    sources = config.prompt_sources
    if len(sources) != 1 or config.split_ids is not None or sources[0].path == "stories":
        return WEIGHTS
    prompt_set = set_of(sources[0])
    if prompt_set.shares is not None:
        return WEIGHTS
    prompts = load(prompt_set, "train")
    num_dev, num_test = config.num_dev, 0 if prompt_set.test_split else config.num_test
    asked = {"train": config.num_train, "dev": num_dev, "test": num_test}
    pools = split_by_id(prompts, weights=WEIGHTS, seed=config.seed)
    if config.num_train is not None and all(len(pools[split]) >= (asked[split] or 0) for split in SPLITS):
        return WEIGHTS
    num_rest = len(prompts) - num_dev - num_test
    if num_rest < (1 if config.num_train is None else config.num_train):
        raise ValueError(
            f"{sources[0].path} has {len(prompts):,} prompts, and data.num_train, num_dev and num_test ask for "
            f"{config.num_train or 'all'}, {num_dev:,} and {num_test:,}; lower them"
        )
    parts = f"{num_rest:,} for train, {num_dev:,} for dev and {num_test:,} for test"
    if is_told:
        print(f"{sources[0].path}: {len(prompts):,} prompts, {parts}")
    return num_rest, num_dev, num_test
