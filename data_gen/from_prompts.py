"""`data_gen.make_data`: an experiment with training data from a list of prompts and two models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.limits import check_limits
from configs.paths import local_path
from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig, SamplingConfig
from configs.shipped import with_shipped_models
from data_gen.pipeline.command import make
from store.shards import write_atomic

_SHARE = 0.1
"""Share of the prompts for dev, and for test."""
_FEWEST = 3


def make_data(
    prompts: Sequence[str],
    *,
    target: str | ModelSource,
    draft: str | ModelSource,
    dir: str,
    temperature: float = 1.0,
    **settings: Any,
) -> Config:
    """Let the target answer prompts and label the draft's proposals; resumes, as `acceptance-heads data` does.

    Args:
        prompts: at least 3; a tenth is dev, a tenth is test.
        target: the large model, a directory or a hub id.
        draft: the small model, with the same tokenizer.
        dir: output directory, with data/, heads/ and decode/.
        temperature: of the sampling that heads are trained for; 0 is greedy.
        settings: of `configs.schema.DataConfig`, such as max_new_tokens=64.

    Returns:
        The experiment, for `heads.train_heads`, `decode.complete` and every command's function.

    Raises:
        ValueError: too few prompts, an unknown or invalid setting, models that do not fit.
        FileNotFoundError: a model that does not exist.
    """
    if isinstance(prompts, str) or len(prompts) < _FEWEST:
        raise ValueError(f"prompts is {prompts!r:.80}; give a list of at least {_FEWEST}, for train, dev and test")
    known = DataConfig.__dataclass_fields__.keys() - {"dir", "prompts"}
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"{unknown[0]!r} is not a setting of make_data; it takes {', '.join(sorted(known))}")
    sampling = SamplingConfig(temperature=temperature)
    pair = with_shipped_models(PairConfig(target=_source(target), draft=_source(draft), sampling=sampling))
    root = local_path(dir, "dir")
    config = _config(pair, root, _written(prompts, root), len(prompts), settings)
    check_limits(config)
    make(config)
    return config


def _config(pair: PairConfig, root: Path, file: Path, num_prompts: int, settings: Mapping[str, Any]) -> Config:
    held_out = max(1, round(_SHARE * num_prompts))
    num_train = num_prompts - 2 * held_out
    numbers = {"num_train": num_train, "num_dev": held_out, "num_test": held_out}
    split: dict[str, Any] = {"split_weights": (num_train, held_out, held_out), **numbers}
    return Config(
        pair=pair,
        data=DataConfig(dir=str(root / "data"), prompts=str(file), **split | dict(settings)),
        heads=HeadsConfig(dir=str(root / "heads"), specdec=False),
        decode=DecodeConfig(dir=str(root / "decode"), num_dev=held_out, num_test=held_out),
    )


def _source(model: str | ModelSource) -> ModelSource:
    return model if isinstance(model, ModelSource) else ModelSource(path=model)


def _written(prompts: Sequence[str], root: Path) -> Path:
    """The file of the prompts; an existing file with this content is kept."""
    path = root / "prompts.jsonl"
    lines = [
        json.dumps({"id": str(index), "prompt": prompt}, ensure_ascii=False) for index, prompt in enumerate(prompts)
    ]
    text = "\n".join(lines) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomic(path, text.encode())
    return path
