"""The stages that take one shard from prompts to files: one stage with both models (`mode: together`), or three with
one model at a time (`sequential`), which keep their results in DIR/stages until the last has written the shard.

    together    responses, labels of both models, mixings, features
    respond     responses                                    target (or none: a server or a file answers)
    draft       Y, log q, entropy, mixings, hidden states    draft
    target      log p, acceptance_prob                       target

Hidden states are written once, by the stage `draft`; the stage `target` moves the file. With `labels: server` the
responses come with the target's distributions, and there is no stage `target`.

A larger run keeps the shards of the smaller one; only a short last shard is made again. Each shard's sidecar has a
digest of every prompt that it was made from, so that shards of other prompts are refused.

Every random number of a shard comes from seeds of (run seed, stage, split, shard index). So a shard has the same bytes
on any engine, in any order, and after any interruption.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from configs.schema import DataConfig
from data_gen.labels.chains import ChainLabeller
from data_gen.labels.labeller import Labelled, Labeller
from data_gen.labels.laws import mixed
from data_gen.labels.layout import Layout, layout_of
from data_gen.prompts.pool import load_prompts, sources_of
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import SPLITS
from data_gen.responses.conversation import ShardSpec, without
from data_gen.responses.exchange import Answers, Distributions, Exchange, Problem, Progress, Response
from data_gen.responses.top_logprobs import joined
from data_gen.store import labels, rows
from lm.draws import seed_of, uniforms
from lm.sampling import REMEDY
from store.json_files import read_json
from store.shards import (
    features_path,
    is_whole,
    labels_path,
    move_shard,
    read_sidecar,
    rows_path,
    sidecar_path,
    write_shard,
)

Stage = Literal["together", "respond", "draft", "target"]
_SUFFIXES = {"respond": "responses"} | dict.fromkeys(("distributions", "draft", "fed", "drawn"), "safetensors")
"""Result of a stage -> the suffix of its file. `distributions`: the target's, of the stage respond with `labels:
server`; `fed` and `drawn`: hidden states of the stage draft.
"""
_OF_EVERY_MIXING = ("from_target", "fed")
"""Columns that hold each row once per mixing."""


def stages_of(data: DataConfig) -> tuple[Stage, ...]:
    """The stages of a run, in order."""
    if data.mode == "together":
        return ("together",)
    return ("respond", "draft") if data.labels == "server" else ("respond", "draft", "target")


def name_of(spec: ShardSpec) -> str:
    """A shard in files and messages: train-00012."""
    return f"{spec.split}-{spec.index:05d}"


def shards_of(data: DataConfig) -> list[ShardSpec]:
    """The shards of all splits, in the order in which they are made.

    Raises:
        ValueError: fewer prompts than requested.
    """
    return [spec for split in SPLITS for spec in cut_shards(split, load_prompts(data, split), data.rows_per_shard)]


def cut_shards(split: str, prompts: Sequence[Prompt], size: int) -> list[ShardSpec]:
    """Shards of `size` consecutive prompts."""
    starts = range(0, len(prompts), size)
    return [ShardSpec(split, index, tuple(prompts[start : start + size])) for index, start in enumerate(starts)]


def refuse_other_prompts(specs: Iterable[ShardSpec], data: DataConfig) -> None:
    """Forget short shards that have grown.

    Raises:
        ValueError: a shard was made from other prompts.
    """
    sources = ", ".join(str(Path(source.path)) for source in data.prompt_sources)
    for spec in specs:
        for made in _prompts_made(spec, data):
            num = min(len(made), len(spec.digests))
            if made[:num] != spec.digests[:num]:
                raise ValueError(
                    f"{name_of(spec)} of {data.dir} was made from other prompts than {sources} has now; restore "
                    f"the earlier prompts, choose another data.dir, or delete {data.dir} to start over"
                )
            if num < len(spec.digests):
                _forget(spec, data)


def is_done(spec: ShardSpec, data: DataConfig, stage: Stage = "together") -> bool:
    """Whether the result of this stage or the whole shard is on disk."""
    name = (spec.split, spec.index)
    states = [features_path(data.dir, timing, *name) for timing in data.feature_sets]
    if all(map(is_whole, [rows_path(data.dir, *name), labels_path(data.dir, *name), *states])):
        return True
    distributions = ("distributions",) if data.labels == "server" else ()
    results = {"respond": ("respond", *distributions), "draft": ("draft",)}.get(stage, ())
    stored = [_states_path(spec, data, timing) for timing in data.feature_sets] if stage == "draft" else []
    return bool(results) and all(map(is_whole, [*(_stage_path(spec, data, name) for name in results), *stored]))


def label_and_mix(
    spec: ShardSpec,
    exchanges: Sequence[Exchange],
    *,
    labeller: Labeller,
    data: DataConfig,
    progress: Progress,
    known_columns: Mapping[str, Tensor] | None = None,
) -> Labelled:
    """The labels of the loaded models, the coins `from_target`, and the requested hidden states `drawn` and `fed`.

    Broken rows are labelled too, so that the random numbers, batches and bytes of all other rows do not change.

    Args:
        spec: the shard.
        exchanges: the rows of the shard.
        labeller: a labeller that has the draft, and perhaps the target.
        data: the section of the config.
        progress: called with the number of rows of each batch.
        known_columns: `target_states` (replace the target's forward), `p_ids` and `p_probs` (replace the target), and
            `draft_ids` (Y was drawn elsewhere).
    """
    layout = layout_of(exchanges)
    inputs = {
        "uniform": uniforms(seed_of(data.seed, "draft", spec.split, spec.index), layout.num_tokens),
        **(known_columns or {}),
    }
    columns, broken = labeller.label(exchanges, inputs, with_hidden="drawn" in data.feature_sets, progress=progress)
    coins = uniforms(seed_of(data.seed, "mixing", spec.split, spec.index), layout.num_tokens * data.mixes)
    columns["from_target"] = coins < data.mixing_ratio
    if "fed" in data.feature_sets:
        order = layout.order(data.mixes)
        response_ids = torch.tensor(
            [token for exchange in exchanges for token in exchange.response_ids], dtype=torch.int64
        )
        mixed_ids = mixed(response_ids[order], columns["draft_ids"][order], columns["from_target"])
        columns["fed"] = labeller.fed_hidden(exchanges, mixed_ids, mixes=data.mixes)
    for timing in data.feature_sets:
        mixes = data.mixes if timing == "fed" else 1
        infinite_rows = layout.repeated(mixes).rows_with(~columns[timing].isfinite().all(-1))
        reason = (
            f"the draft's {timing} hidden states are not finite in data.feature_dtype {data.feature_dtype}; {REMEDY}"
        )
        broken = {row // mixes: reason for row in infinite_rows} | broken
    return Labelled(columns, broken)


def without_broken(
    spec: ShardSpec, answers: Answers, labelled: Labelled, *, mixes: int
) -> tuple[Answers, dict[str, Tensor]]:
    """The answers and columns without broken rows, each of which becomes a problem."""
    if not labelled.broken:
        return answers, labelled.columns
    layout = layout_of(answers.exchanges)
    sound = [row for row in range(len(answers.exchanges)) if row not in labelled.broken]
    once = layout.positions(sound)
    repeated = layout.repeated(mixes).positions([row * mixes + mix for row in sound for mix in range(mixes)])
    positions = {name: repeated if name in _OF_EVERY_MIXING else once for name in labelled.columns}
    return without(spec, answers, labelled.broken), {
        name: values[positions[name]] for name, values in labelled.columns.items()
    }


def write_files(
    spec: ShardSpec,
    answers: Answers,
    *,
    columns: Mapping[str, Tensor],
    layout: Layout,
    rows_columns: Mapping[str, Tensor] | None = None,
    data: DataConfig,
) -> None:
    """Write the hidden states, the labels and then the rows of a shard, so that rows on disk always have both.

    Args:
        spec: the shard.
        answers: its exchanges and problems.
        columns: the labels, and the hidden states by timing; missing ones are those of the stage `draft`.
        layout: the tokens of each response in `columns`.
        rows_columns: the columns of the rows, if they differ (feature drafts).
        data: the section of the config.
    """
    for timing in data.feature_sets:
        path = features_path(data.dir, timing, spec.split, spec.index)
        if timing in columns:
            _write_states(path, columns[timing], answers, data, timing)
        elif (source := _stage_path(spec, data, timing)).is_file():  # else moved by a run that was killed afterwards
            move_shard(source, path)
    facts = {"rows": len(answers.exchanges), "tokens": layout.num_tokens}
    write_shard(labels_path(data.dir, spec.split, spec.index), labels.to_safetensors(columns, layout), **facts)
    write_rows(spec, answers, columns=rows_columns or columns, data=data)


def _write_states(path: Path, hidden: Tensor, answers: Answers, data: DataConfig, timing: str) -> None:
    num_rows = len(answers.exchanges) * (data.mixes if timing == "fed" else 1)
    write_shard(path, safetensors.torch.save({"hidden": hidden.contiguous()}), rows=num_rows, tokens=len(hidden))


def write_drafts(
    spec: ShardSpec, answers: Answers, *, labeller: ChainLabeller, data: DataConfig, progress: Progress
) -> Answers:
    """Label a shard with a feature draft's drafts and write it. Returns the answers with new problems."""
    shape = (layout_of(answers.exchanges).num_tokens, data.draft_length)
    uniform = uniforms(seed_of(data.seed, "draft", spec.split, spec.index), *shape)
    drafts = labeller.label(answers.exchanges, uniform, timings=data.feature_sets, progress=progress)
    answers, lengths = without(spec, answers, drafts.broken), [length for row in drafts.lengths for length in row]
    columns = drafts.columns | drafts.hidden | {"draft_lengths": torch.tensor(lengths, dtype=torch.int64)}
    layout = Layout(tuple(map(sum, drafts.lengths)))
    write_files(spec, answers, columns=columns, layout=layout, rows_columns=drafts.rows, data=data)
    return answers


def write_rows(spec: ShardSpec, answers: Answers, *, columns: Mapping[str, Tensor], data: DataConfig) -> None:
    """Write the rows of a shard, and into their sidecar the outcome of every prompt."""
    from_target, has_sets = columns.get("from_target"), len(sources_of(data)) > 1
    table = rows.to_parquet(answers.exchanges, columns, from_target=from_target, mixes=data.mixes, has_sets=has_sets)
    num_rows, num_tokens = len(answers.exchanges), layout_of(answers.exchanges).num_tokens
    problems = [problem._asdict() for problem in answers.problems]
    account = {"prompts": spec.digests, "input": spec.num_requests, "ok": num_rows, "problems": problems}
    sizes = {"batch_size": data.batch_size, "chunk_mb": data.chunk_mb}  # the rounding of forwards depends on them
    write_shard(
        rows_path(data.dir, spec.split, spec.index), table, rows=num_rows, tokens=num_tokens, **account, **sizes
    )


def kept_responses(spec: ShardSpec, data: DataConfig) -> dict[str, Response]:
    """The responses of a shard that is on disk, by row id."""
    table = rows.read_rows(rows_path(data.dir, spec.split, spec.index), ["id", "response_ids", "finish_reason"])
    return {row["id"]: Response(list(row["response_ids"]), row["finish_reason"]) for row in table.to_pylist()}


def save_responses(spec: ShardSpec, answers: Answers, data: DataConfig) -> None:
    """Save the result of the stage `respond`, without the target's states; distributions first, so that a complete
    stage has them.
    """
    if data.labels == "server":
        tensors = safetensors.torch.save(joined(answers.distributions)._asdict())
        write_shard(_stage_path(spec, data, "distributions"), tensors)
    content = {
        "exchanges": [exchange._asdict() for exchange in answers.exchanges],
        "problems": [problem._asdict() for problem in answers.problems],
    }
    write_shard(_stage_path(spec, data, "respond"), json.dumps(content).encode(), prompts=spec.digests)


def load_responses(spec: ShardSpec, data: DataConfig) -> Answers:
    """The answers that `save_responses` saved."""
    answers = answers_in(_stage_path(spec, data, "respond"))
    if data.labels == "target":
        return answers
    lengths, stored = (
        layout_of(answers.exchanges).lengths,
        labels.read_tensors(_stage_path(spec, data, "distributions")),
    )
    parts = zip(stored["ids"].split(lengths), stored["probs"].split(lengths), strict=True) if lengths else ()
    return answers._replace(distributions=[Distributions(ids, probs) for ids, probs in parts])


def answers_in(path: Path) -> Answers:
    """The answers in a file of the stage `respond`."""
    content = read_json(path, remedy="delete it and run the same command again", keys=("exchanges", "problems"))
    return Answers(
        [Exchange(**exchange) for exchange in content["exchanges"]],
        [Problem(**problem) for problem in content["problems"]],
    )


def save_drafted(spec: ShardSpec, answers: Answers, columns: dict[str, Tensor], data: DataConfig) -> None:
    """Save the result of the stage `draft`: first the hidden states, then the other columns and the problems."""
    for timing in data.feature_sets:
        _write_states(_stage_path(spec, data, timing), columns[timing], answers, data, timing)
    problems = json.dumps([problem._asdict() for problem in answers.problems])
    small = {name: values for name, values in columns.items() if name not in data.feature_sets}
    write_shard(_stage_path(spec, data, "draft"), safetensors.torch.save(small, metadata={"problems": problems}))


def load_drafted(spec: ShardSpec, data: DataConfig) -> tuple[Answers, dict[str, Tensor]]:
    """The answers and the columns that `save_responses` and `save_drafted` saved, without the hidden states."""
    path = _stage_path(spec, data, "draft")
    with safe_open(path, framework="pt") as file:
        problems = [Problem(**problem) for problem in json.loads(file.metadata()["problems"])]
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, the file is not a mapping
    exchanges, failed_ids = load_responses(spec, data).exchanges, {problem.id for problem in problems}
    return Answers([exchange for exchange in exchanges if exchange.id not in failed_ids], problems), columns


def add_target(
    spec: ShardSpec,
    answers: Answers,
    columns: dict[str, Tensor],
    *,
    labeller: Labeller,
    data: DataConfig,
    progress: Progress,
) -> Labelled:
    """The stage `target`: the columns of `load_drafted` with log_p and acceptance_prob. If rows are broken, also the
    hidden states, so that theirs can be removed.
    """
    inputs = {name: columns[name] for name in ("draft_ids", "log_q")}
    labelled = labeller.label(answers.exchanges, inputs, with_hidden=False, progress=progress)
    hidden = {
        timing: labels.read_tensors(_states_path(spec, data, timing))["hidden"]
        for timing in (data.feature_sets if labelled.broken else ())
    }
    return Labelled(columns | hidden | labelled.columns, labelled.broken)


def _prompts_made(spec: ShardSpec, data: DataConfig) -> Iterator[list[str]]:
    for path in (rows_path(data.dir, spec.split, spec.index), _stage_path(spec, data, "respond")):
        if sidecar_path(path).is_file():
            yield read_sidecar(path, keys=("prompts",))["prompts"]


def _forget(spec: ShardSpec, data: DataConfig) -> None:
    sidecar_path(rows_path(data.dir, spec.split, spec.index)).unlink(missing_ok=True)
    forget_stages(spec, data)


def forget_stages(spec: ShardSpec, data: DataConfig) -> None:
    """Remove the results of the earlier stages of a complete shard."""
    for stage in _SUFFIXES:
        path = _stage_path(spec, data, stage)
        for file in (path, sidecar_path(path)):
            file.unlink(missing_ok=True)


def forget_all_stages(specs: Sequence[ShardSpec], data: DataConfig) -> None:
    """Remove the results of earlier stages of complete shards, and then the empty folders."""
    for spec in specs:
        forget_stages(spec, data)
    for folder in (*(Path(data.dir) / "stages" / stage for stage in _SUFFIXES), Path(data.dir) / "stages"):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _states_path(spec: ShardSpec, data: DataConfig, timing: str) -> Path:
    """The hidden states of the stage draft: its file, or the shard itself if a run was killed after moving them
    there.
    """
    path = _stage_path(spec, data, timing)
    return path if path.is_file() else features_path(data.dir, timing, spec.split, spec.index)


def _stage_path(spec: ShardSpec, data: DataConfig, stage: str) -> Path:
    return Path(data.dir) / "stages" / stage / f"{name_of(spec)}.{_SUFFIXES[stage]}"
