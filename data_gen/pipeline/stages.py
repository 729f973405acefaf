"""The settled section `data`, its shards, and the stages that take one shard from prompts to files: one stage
with both models (`mode: together`), or three with one model at a time (`sequential`), which keep their results
in DIR/stages until the last has written the shard.

    together    responses, labels of both models, mixings
    respond     responses                      target (or none: a server or a file answers)
    draft       Y, log q, entropy, mixings     draft
    target      log p, acceptance_prob         target

With `labels: server` the responses come with the target's distributions, and there is no stage `target`.

A larger run keeps the shards of the smaller one; only a short last shard is made again. Each shard's sidecar has
a digest of every prompt that it was made from, so that shards of other prompts are refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from configs.schema import DataConfig
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.sets import SPLITS, WEIGHTS, load_prompts, set_of, sources_of, split_by_id, splittable
from data_gen.responses.exchange import Answers, Exchange, Problem, ShardSpec
from data_gen.store import rows
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import layout_of
from store.shards import is_whole, read_sidecar, shard_path, sidecar_path, write_shard

if TYPE_CHECKING:  # models take seconds to import
    from data_gen.labels.labeller import Labelled

_FACTS = Exchange._fields[:5]
"""All fields of an exchange but tensors."""
Stage = Literal["together", "respond", "draft", "target"]


def stages_of(data: DataConfig) -> tuple[Stage, ...]:
    """The stages of a run, in order."""
    if data.mode == "together":
        return ("together",)
    return ("respond", "draft") if data.labels == "server" else ("respond", "draft", "target")


def stage_before(stage: Stage, data: DataConfig) -> Stage | None:
    """The stage whose results this one reads; None for the first."""
    return dict(pairwise(reversed(stages_of(data)))).get(stage)


def settled(config: DataConfig, *, say: Callable[[str], None] | None = print) -> DataConfig:
    """The section with `split_weights` and `num_train` as numbers. An existing directory keeps its shares, so
    that no prompt moves from one split to another. Evaluation settles the section as `data` did, so none of its
    test prompts was trained on. `say` gets a line about new sizes.
    """
    if config.split_weights is None:
        if (Path(config.dir) / "manifest.json").is_file():
            train, dev, test = read_manifest(config.dir).get("split_weights") or WEIGHTS
            weights: tuple[int, int, int] | None = (train, dev, test)
        elif (weights := _exact_sizes(config)) is not None and say is not None:
            parts = "{:,} for train, {:,} for dev and {:,} for test".format(*weights)
            say(f"{config.prompt_sources[0].path}: {sum(weights):,} prompts, {parts}")
        config = replace(config, split_weights=weights or WEIGHTS)
    if config.num_train is None:
        if any(source.path == "stories" for source in config.prompt_sources):
            raise ValueError("data.num_train is null, but the generated stories never end; set data.num_train")
        config = replace(config, num_train=len(load_prompts(config, "train")))
    return config


def _exact_sizes(config: DataConfig) -> tuple[int, int, int] | None:
    """The sizes of train, dev and test, which are then the shares, if `WEIGHTS` give a split of a single set too
    few prompts; else None. ValueError if the set is too small.
    """
    sources = config.prompt_sources
    if len(sources) != 1 or config.split_ids is not None or sources[0].path == "stories":
        return None
    prompt_set = set_of(sources[0])
    if prompt_set.shares is not None:
        return None
    prompts = splittable(prompt_set, config.seed)
    num_dev = config.num_dev
    num_test = 0 if prompt_set.test_split else config.num_test
    pools = split_by_id(prompts, weights=WEIGHTS, seed=config.seed)
    requested = {"train": config.num_train or 0, "dev": num_dev, "test": num_test}
    if config.num_train is not None and all(len(pools[split]) >= requested[split] for split in SPLITS):
        return None
    num_rest = len(prompts) - num_dev - num_test
    if num_rest < (1 if config.num_train is None else config.num_train):
        raise ValueError(
            f"{sources[0].path} has {len(prompts):,} different prompts, but data.num_train, num_dev and num_test are "
            f"{config.num_train or 'null'}, {num_dev:,} and {num_test:,}; lower them, or add prompts"
        )
    return num_rest, num_dev, num_test


def shards_of(data: DataConfig) -> list[ShardSpec]:
    """The shards of all splits, in the order in which they are made; ValueError for fewer prompts than requested."""
    return [spec for split in SPLITS for spec in cut_shards(split, load_prompts(data, split), data.rows_per_shard)]


def cut_shards(split: str, prompts: Sequence[Prompt], size: int) -> list[ShardSpec]:
    """Shards of `size` consecutive prompts."""
    starts = range(0, len(prompts), size)
    return [ShardSpec(split, index, tuple(prompts[start : start + size])) for index, start in enumerate(starts)]


def refuse_other_prompts(specs: Iterable[ShardSpec], data: DataConfig) -> None:
    """Raise ValueError if a shard was made from other prompts."""
    for spec in specs:
        made = _made_from(spec, data)
        num = min(len(made), len(spec.digests))
        if made[:num] != spec.digests[:num]:
            sources = ", ".join(str(Path(source.path)) for source in data.prompt_sources)
            raise ValueError(
                f"{spec.name} of {data.dir} was made from other prompts than {sources} has now; restore the earlier "
                f"prompts and add new ones only after the last, choose another data.dir, or delete {data.dir} to start "
                "over"
            )


def forget_short(specs: Iterable[ShardSpec], data: DataConfig) -> None:
    """Forget short shards that have grown, so that they are made again."""
    for spec in specs:
        if len(_made_from(spec, data)) < len(spec.digests):
            sidecar_path(shard_path(data.dir, "rows", spec.split, spec.index)).unlink(missing_ok=True)
            forget_stages([spec], data)


def _made_from(spec: ShardSpec, data: DataConfig) -> list[str]:
    """Digests of the prompts that a shard was made from, or only its responses; those of `spec` if there is none."""
    made = spec.digests
    for file in (stage_path(spec, data, "respond"), shard_path(data.dir, "rows", spec.split, spec.index)):
        if sidecar_path(file).is_file():
            made = read_sidecar(file, keys=("prompts",))["prompts"]
    return made


def is_done(spec: ShardSpec, data: DataConfig, stage: Stage = "together") -> bool:
    """Whether the result of this stage or the whole shard is on disk."""
    if all(is_whole(shard_path(data.dir, folder, spec.split, spec.index)) for folder in ("rows", "labels")):
        return True
    return stage in ("respond", "draft") and is_whole(stage_path(spec, data, stage))


def write_files(spec: ShardSpec, answers: Answers, labelled: "Labelled", data: DataConfig) -> None:
    """Write the labels and then the rows of a shard, so that rows on disk always have labels; the sidecar of the
    rows has the outcome of every prompt.
    """
    num_rows = len(answers.exchanges)
    path_in = partial(shard_path, data.dir, split=spec.split, index=spec.index)
    layout = layout_of(answers.exchanges)
    label_layout = labelled.layout or layout
    sidecar_path(path_in("rows")).unlink(missing_ok=True)  # rows on disk have no other labels than these
    labels = rows.to_safetensors(labelled.columns, label_layout)
    write_shard(path_in("labels"), labels, rows=num_rows, tokens=label_layout.num_tokens)
    write_shard(
        path_in("rows"),
        rows.to_parquet(answers.exchanges, labelled.of_rows or labelled.columns, has_sets=len(sources_of(data)) > 1),
        rows=num_rows,
        tokens=layout.num_tokens,
        prompts=spec.digests,
        input=spec.num_requests,
        ok=num_rows,
        problems=[problem._asdict() for problem in answers.problems],
        batch_size=data.batch_size,  # the rounding of forwards depends on it and on chunk_mb
        chunk_mb=data.chunk_mb,
    )
    forget_stages([spec], data)


def save(spec: ShardSpec, stage: Stage, answers: Answers, columns: Mapping[str, Tensor], data: DataConfig) -> None:
    """Save the result of the stage `respond` or `draft` in one file."""
    metadata = {
        "exchanges": json.dumps([dict(zip(_FACTS, exchange, strict=False)) for exchange in answers.exchanges]),
        "problems": json.dumps([problem._asdict() for problem in answers.problems]),
    }
    tensors = {name: values.contiguous() for name, values in columns.items()}
    content = safetensors.torch.save(tensors, metadata=metadata)
    write_shard(stage_path(spec, data, stage), content, prompts=spec.digests)


def answers_in(path: Path) -> Answers:
    """The answers in a file of the stage `respond` or `draft`, or those with a row in a shard of rows."""
    if path.suffix == ".parquet":
        return Answers([Exchange(**row) for row in rows.read_rows(path, _FACTS).to_pylist()], [])
    with safe_open(path, framework="pt") as file:
        turns = {name: json.loads(text) for name, text in file.metadata().items()}
    return Answers([Exchange(**turn) for turn in turns["exchanges"]], [Problem(**turn) for turn in turns["problems"]])


def forget_stages(specs: Iterable[ShardSpec], data: DataConfig) -> None:
    """Remove the results of the earlier stages of complete shards."""
    for path in [stage_path(spec, data, stage) for spec in specs for stage in ("respond", "draft")]:
        path.unlink(missing_ok=True)
        sidecar_path(path).unlink(missing_ok=True)


def stage_path(spec: ShardSpec, data: DataConfig, stage: str) -> Path:
    """The result of the stage `respond` or `draft`."""
    return Path(data.dir) / "stages" / stage / f"{spec.name}.safetensors"
