"""`acceptance-heads init`: two models and a file of prompts -> a YAML of what an experiment of one's own needs."""

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from textwrap import wrap
from typing import Any

from configs.paths import local_path
from configs.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    HeadsConfig,
    ModelSource,
    PairConfig,
    PromptSource,
    SamplingConfig,
)
from data_gen.pipeline.command import check_settings, hint_at_few
from data_gen.pipeline.plan import shard_size
from data_gen.prompts.hub import load, set_of
from evaluation.costs.plan import plan
from lm import load_pair_tokenizer
from store.shards import write_atomic

_HELD_OUT_SHARE, _MOST_HELD_OUT, _MOST_TRAIN = 0.1, 100, 4000
_TOLD = ("rows", "response tokens", "disk", "time", "train", "evaluate", "together", "warning", "note", "not measured")
"""Beginnings of the lines of `plan` that the YAML repeats."""
_SAMPLE = 32
"""Prompts that are made and timed, or fewer in half a minute, for what the YAML says of time."""


def init(
    *,
    target: str,
    draft: str,
    prompts: str,
    column: str | None = None,
    temperature: float = 1.0,
    top_p: float | None = None,
    out: str = "experiment.yaml",
    force: bool = False,
) -> Path:
    """Write the YAML of an experiment of your own, with what it will take in its comments.

    Args:
        target: the large model, a directory or a hub id.
        draft: the small one, which shares its tokenizer.
        prompts: a file (JSONL, JSON, CSV, TSV, Parquet), a known set, or org/name on the hub.
        column: the field of a record that holds the prompt, where its name is none that is known.
        temperature: temperature at which both are sampled; heads fit one sampling; 0 is greedy.
        top_p: nucleus of the sampling; null: all tokens.
        out: the file that is written; data and heads go into folders of its name.
        force: replace a file that is there.

    Raises:
        FileNotFoundError: no such model, or no such prompts.
        ValueError: a file that is there, models of several tokenizers, fewer than 10 prompts.
    """
    path = local_path(out, "--out")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already; choose another --out, or pass --force to replace it")
    source = PromptSource(path=prompts, columns={"prompt": column} if column else {})
    pair = PairConfig(
        target=ModelSource(path=target),
        draft=ModelSource(path=draft),
        sampling=SamplingConfig(temperature=temperature, top_p=top_p),
    )
    num_prompts = len(load(set_of(source), "train"))
    config = _experiment(pair, source, num_prompts=num_prompts, name=path.stem)
    check_settings(pair, config.data)
    hint_at_few(num_prompts, prompts)
    lines, totals = _plan(config)
    if rows_per_shard := shard_size(config.data, totals):
        config = replace(config, data=replace(config.data, rows_per_shard=rows_per_shard))
    text = _yaml(config, num_prompts=num_prompts, takes=lines, path=path)
    write_atomic(path, text.encode())
    print(f"{text}\nwrote {path}; next: acceptance-heads all --config {path}")
    return path


def _experiment(pair: PairConfig, source: PromptSource, *, num_prompts: int, name: str) -> Config:
    """The experiment: a tenth of the prompts for each of dev and test, and the rest, up to a limit, for train."""
    num_held_out = min(_MOST_HELD_OUT, int(_HELD_OUT_SHARE * num_prompts))
    if num_held_out < 1:
        raise ValueError(f"{source.path} has {num_prompts} prompts; give at least 10, of which 8 are trained on")
    data = DataConfig(
        dir=f"data/{name}",
        prompts=source,
        template="plain" if load_pair_tokenizer(pair).chat_template is None else "chat",
        num_train=_MOST_TRAIN if num_prompts - 2 * num_held_out > _MOST_TRAIN else None,
        num_dev=num_held_out,
        num_test=num_held_out,
    )
    num_decoded = min(DecodeConfig.num_dev, num_held_out)
    return Config(
        pair=pair,
        data=data,
        heads=HeadsConfig(dir=f"checkpoints/runs/{name}"),
        decode=DecodeConfig(dir=f"data/{name}/decode", num_dev=num_decoded, num_test=num_decoded),
    )


def _plan(config: Config) -> tuple[list[str], dict[str, Any]]:
    """What `plan` says of the experiment on this machine, and its totals; where the models do not fit, the reason
    first.
    """
    said = StringIO()
    with redirect_stdout(said):
        try:
            totals = plan(config, sample=_SAMPLE)
        except ValueError as error:
            print(f"not measured: {error}")
            totals = plan(config, sample=0)
    # of the arithmetic of memory only what does not fit, and no advice that is followed
    lines = map(str.strip, said.getvalue().splitlines())
    return [line for line in lines if line.startswith(_TOLD) and not line.startswith("warning: a shard")], totals


def _yaml(config: Config, *, num_prompts: int, takes: list[str], path: Path) -> str:
    pair, data, decode = config.pair, config.data, config.decode
    [source] = data.prompt_sources
    columns = f", columns: {json.dumps(dict(source.columns))}" if source.columns else ""
    prompts = f"{{path: {json.dumps(source.path)}{columns}}}" if columns else json.dumps(source.path)
    top_p = "" if pair.sampling.top_p is None else f", top_p: {pair.sampling.top_p:g}"
    num_train = "null" if data.num_train is None else f"{data.num_train}"
    left = "all that dev and test leave" if data.num_train is None else f"null takes all of the {num_prompts:,}"
    is_slow = data.rows_per_shard != DataConfig.rows_per_shard
    shard = f", rows_per_shard: {data.rows_per_shard}" if is_slow else ""
    lines = [
        f"# acceptance-heads all --config {path}: data, training, export, evaluation, threshold.",
        f"# {num_prompts:,} prompts; what they take (`acceptance-heads plan --config {path}`):",
        *(part for line in takes for part in wrap(line, 110, initial_indent="#   ", subsequent_indent="#     ")),
        "pair:",
        f"  target: {{path: {json.dumps(pair.target.path)}}}",
        f"  draft: {{path: {json.dumps(pair.draft.path)}}}",
        f"  sampling: {{temperature: {pair.sampling.temperature:g}{top_p}}}  # heads are trained for one sampling",
        f"data: {{dir: {data.dir}, prompts: {prompts}, template: {data.template},",
        f"  num_train: {num_train}, num_dev: {data.num_dev}, num_test: {data.num_test},  # num_train: {left}",
        f"  max_new_tokens: {data.max_new_tokens}{shard}}}",
        f"heads: {{dir: {config.heads.dir}}}",
        f"decode: {{dir: {decode.dir}, num_dev: {decode.num_dev}, num_test: {decode.num_test}}}",
    ]
    return "\n".join(lines) + "\n"
