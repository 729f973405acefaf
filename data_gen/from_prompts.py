"""`data_gen.make_data`: an experiment with training data from a list of prompts and two models."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.limits import check_limits
from configs.load import yaml_of
from configs.paths import local_path
from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig, SamplingConfig
from configs.shipped import with_shipped_models
from data_gen.loaded import source_of_loaded
from data_gen.pipeline.command import make
from data_gen.prompts.files import Fields
from data_gen.prompts.prompt import is_text, prompt_of
from data_gen.store.manifest import num_prompts as num_of_split
from data_gen.store.manifest import read_manifest
from store.shards import write_atomic

Prompts = Iterable[str | Mapping[str, Any] | Sequence[Mapping[str, Any]]]
"""Strings, records with fields such as prompt or messages, or lists of messages."""
Model = str | ModelSource | PreTrainedModel
"""A directory or hub id, its settings, or a loaded model."""
_SHARE = 0.1
"""Share of the prompts for dev, and for test."""
PROMPTS_FILE = "prompts.jsonl"
_YAML = "experiment.yaml"
_ABOUT_YAML = "# The experiment of make_data, which writes this file again when it is called again; change a copy.\n"


def make_data(
    prompts: Prompts,
    *,
    target: Model,
    draft: Model,
    dir: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    temperature: float = 1.0,
    **settings: Any,
) -> Config:
    """Let the target answer prompts and label the draft's proposals; resumes, as `acceptance-heads data` does.

    Args:
        prompts: at least 3: strings, lists of messages, or records with fields such as prompt or messages, as a
            `datasets.Dataset` has them; a tenth is dev, a tenth is test.
        target: the large model: a directory, a hub id, or a loaded model. An unmodified one is used where it came from
            (`data_gen.loaded` compares every bit); another one is saved in dir/models.
        draft: the small model, with the same tokenizer.
        dir: output directory, with data/, heads/ and decode/, and experiment.yaml for the commands.
        tokenizer: of both models; needed for a loaded model.
        temperature: of the sampling that heads are trained for; 0 is greedy.
        settings: of `configs.schema.DataConfig`, such as max_new_tokens=64.

    Returns:
        The experiment, for `train_heads`, `complete` and every command's function, which also take dir/experiment.yaml.

    Raises:
        ValueError: too few or malformed prompts, an unknown or invalid setting, models that do not fit.
        FileNotFoundError: a model that does not exist.
    """
    records = prompt_records(prompts)
    if (num_different := num_distinct(records)) < 3:
        raise ValueError(f"prompts is {prompts!r:.80}; give a list of at least 3 different ones: train, dev and test")
    known = DataConfig.__dataclass_fields__.keys() - {"dir", "prompts"}
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"{unknown[0]!r} is not a setting of make_data; it takes {', '.join(sorted(known))}")
    root = local_path(dir, "dir")
    pair = pair_of(target, draft, root / "models", tokenizer=tokenizer, temperature=temperature)
    config = _config(pair, root, num_different, settings)
    check_limits(config)
    save_prompts(root / PROMPTS_FILE, records)
    write_atomic(root / _YAML, f"{_ABOUT_YAML}{yaml_of(config)}".encode())
    make(config)
    return config


def prompt_records(prompts: Prompts) -> list[Fields]:
    """Prompts as records of a JSONL file; none for a single string. ValueError for a malformed prompt."""
    if isinstance(prompts, str):
        return []
    return [_record(prompt, index) for index, prompt in enumerate(prompts)]


def num_distinct(records: Sequence[Fields]) -> int:
    """Number of prompts of different content."""
    return len({prompt_of(record, default_id="").content for record in records})


def save_prompts(path: Path, records: Sequence[Fields]) -> None:
    """Write records as a file of prompts."""
    write_atomic(path, "".join(map(_line, records)).encode())


def pair_of(
    target: Model, draft: Model, directory: Path, *, tokenizer: PreTrainedTokenizerBase | None, temperature: float
) -> PairConfig:
    """The models of an experiment, as `make_data` takes them; loaded ones that were modified are saved to
    `directory`.
    """
    pair = PairConfig(
        target=_source(target, directory / "target", tokenizer),
        draft=_source(draft, directory / "draft", tokenizer),
        sampling=SamplingConfig(temperature=temperature),
    )
    return with_shipped_models(pair)


def _config(pair: PairConfig, root: Path, num_prompts: int, settings: dict[str, Any]) -> Config:
    num = max(1, round(_SHARE * num_prompts))
    sizes: Fields = {"num_train": None, "num_dev": num, "num_test": num}
    directory = root / "data"
    if (directory / "manifest.json").is_file():  # prompts may have been added: dev and test keep theirs
        manifest = read_manifest(directory)
        for split in ("dev", "test"):
            sizes[f"num_{split}"] = num_of_split(manifest, split) or num
    data = DataConfig(dir=str(directory), prompts=str(root / PROMPTS_FILE), **sizes | settings)
    decode = DecodeConfig(dir=str(root / "decode"), num_dev=data.num_dev, num_test=data.num_test)
    return Config(pair=pair, data=data, heads=HeadsConfig(dir=str(root / "heads")), decode=decode)


def _record(prompt: object, index: int) -> Fields:
    record = {"id": str(index), "prompt": prompt} if isinstance(prompt, str) else prompt
    record = dict(record) if isinstance(record, Mapping) else {"messages": record}
    try:
        prompt_of(record, default_id=str(index))
        json.dumps(record)
    except (ValueError, TypeError) as error:
        raise ValueError(f"prompts[{index}]: {error}") from error
    return record


def _line(record: Mapping[str, object]) -> str:
    line = json.dumps(record, ensure_ascii=False)
    return f"{line if is_text(line) else json.dumps(record)}\n"  # half a character: `data` names the prompt


def _source(model: Any, path: Path, tokenizer: PreTrainedTokenizerBase | None) -> ModelSource:
    """The source of a model; a loaded one that was modified is saved to `path`."""
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, str | PurePath):
        return ModelSource(path=str(model))
    if not hasattr(model, "save_pretrained"):
        raise ValueError(f"the {path.name} is of {type(model)}; give a directory, a hub id or a model of transformers")
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"the {path.name} is a model with an adapter; pass the merged one (peft: merge_and_unload())")
    if tokenizer is None:
        raise ValueError(f"the {path.name} is a {type(model).__name__}; give its tokenizer too: tokenizer=…")
    return source_of_loaded(model, tokenizer, path)
