"""`acceptance-heads init`, which writes an experiment's YAML from two models and a file of prompts, and
`acceptance-heads plan`, which estimates size and time of the data (`data_gen.pipeline.plan`), of training, and of
`evaluate`.
"""

import json
import re
import timeit
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import Any

import torch

from configs import schema
from configs.hints import say_next
from configs.load import accepts_yaml
from configs.paths import local_path
from data_gen.pipeline.command import check_settings, hint_at_few
from data_gen.pipeline.plan import duration, shard_size
from data_gen.pipeline.plan import plan as plan_data
from data_gen.pipeline.worker import limit_of
from data_gen.prompts.sets import load, set_of
from data_gen.prompts.templates import show_first
from evaluation.costs.machine import ABOUT_TIMING, TIMING_S
from evaluation.costs.stability import SKIP
from heads.grid import specs
from heads.training.command import epochs_of
from lm import load_pair_tokenizer, model_config
from lm.features.released import width_of
from lm.pair import check_widths
from store.shards import write_atomic

_HELD_OUT_SHARE, _MOST_HELD_OUT, _MOST_TRAIN = 0.1, 100, 4000
_PLAN_LINES = (
    "rows",
    "response tokens",
    "disk",
    "time",
    "train:",
    "evaluate",
    "together",
    "warning",
    "note",
    "not measured",
)
"""First words of the lines of `plan` that the YAML repeats."""
_SAMPLE = 32
"""Number of sample prompts to time, at most half a minute."""
_FLOPS_PER_WEIGHT, _OVER_PRODUCTS = 6, 4.0
"""Operations per weight and token in a training step, and the time of a step relative to its matrix products
(`checkpoints/tiny`: 4; wider heads less).
"""


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
    """Write the YAML of a new experiment, with its estimated time and size in comments.

    Args:
        target: the large model, a directory or a hub id.
        draft: the small model, with the same tokenizer.
        prompts: a file (JSONL, JSON, CSV, TSV, Parquet), a known set, or org/name on the hub.
        column: the field that holds the prompt, if its name is not recognised.
        temperature: sampling temperature of both models; heads are trained for it; 0 is greedy.
        top_p: nucleus of the sampling; null: all tokens.
        out: output file; data and heads go into folders of its name.
        force: replace an existing file.

    Raises:
        FileNotFoundError: no such model, or no such prompts.
        ValueError: an existing file, models with different tokenizers or too few logits, fewer than 10 prompts.
    """
    path = local_path(out, "--out")
    if path.exists() and not force:
        raise ValueError(f"{path} already exists; choose another --out, or pass --force to replace it")
    source = schema.PromptSource(path=prompts, columns={"prompt": column} if column else {})
    sampling = schema.SamplingConfig(temperature=temperature, top_p=top_p)
    sources = schema.ModelSource(path=target), schema.ModelSource(path=draft)
    pair = schema.PairConfig(target=sources[0], draft=sources[1], sampling=sampling)
    all_prompts = load(set_of(source))
    num_prompts = len(all_prompts)
    config = _experiment(pair, source, num_prompts=num_prompts, name=path.stem)
    check_settings(pair, config.data)
    hint_at_few(num_prompts, prompts)
    check_widths(pair)
    show_first(all_prompts, load_pair_tokenizer(pair), config.data.template)
    lines, totals = _plan(config)
    if rows_per_shard := shard_size(config.data, totals):
        config = replace(config, data=replace(config.data, rows_per_shard=rows_per_shard))
    text = _yaml(config, num_prompts=num_prompts, takes=lines, path=path)
    write_atomic(path, text.encode())
    print(f"{text}\nwrote {path}; next: acceptance-heads all --config {quote(str(path))}")
    return path


def _experiment(pair: schema.PairConfig, source: schema.PromptSource, *, num_prompts: int, name: str) -> schema.Config:
    """The experiment: a tenth of the prompts for each of dev and test, and the rest, up to a limit, for train."""
    num_held_out = min(_MOST_HELD_OUT, int(_HELD_OUT_SHARE * num_prompts))
    if num_held_out < 1:
        raise ValueError(f"{source.path} has {num_prompts} prompts; give at least 10, of which 8 are for training")
    has_template = load_pair_tokenizer(pair).chat_template is not None
    # the longest text is a prompt, a response and a draft beyond it
    limits = (limit_of(source) or 2**31 for source in (pair.target, pair.draft))
    num_positions = min(limits) - schema.DecodeConfig.max_draft_length
    num_new = min(schema.DataConfig.max_new_tokens, num_positions // 2)
    data = schema.DataConfig(
        dir=f"data/{name}",
        prompts=source,
        template="chat" if has_template else "plain",
        num_train=_MOST_TRAIN if num_prompts - 2 * num_held_out > _MOST_TRAIN else None,
        num_dev=num_held_out,
        num_test=num_held_out,
        max_prompt_tokens=min(schema.DataConfig.max_prompt_tokens, num_positions - num_new),
        max_new_tokens=num_new,
    )
    num = min(schema.DecodeConfig.num_dev, num_held_out)
    decode = schema.DecodeConfig(dir=f"data/{name}/decode", num_dev=num, num_test=num, max_new_tokens=num_new)
    return schema.Config(pair=pair, data=data, heads=schema.HeadsConfig(dir=f"checkpoints/runs/{name}"), decode=decode)


def _plan(config: schema.Config) -> tuple[list[str], dict[str, Any]]:
    """Lines of `plan` on this machine, and its totals; if the models do not fit, the reason comes first."""
    with redirect_stdout(StringIO()) as output:
        try:
            totals = plan(config, sample=_SAMPLE)
        except ValueError as error:
            print(f"not measured: {error}")
            totals = plan(config, sample=0)
    # no memory table, only its warnings; and no warning about shards, which `init` follows
    lines = map(str.strip, output.getvalue().splitlines())
    return [line for line in lines if line.startswith(_PLAN_LINES) and not line.startswith("warning: a shard")], totals


def _yaml(config: schema.Config, *, num_prompts: int, takes: list[str], path: Path) -> str:
    pair, data, decode = config.pair, config.data, config.decode
    [source] = data.prompt_sources
    columns = f", columns: {json.dumps(dict(source.columns))}" if source.columns else ""
    prompts = f"{{path: {json.dumps(source.path)}{columns}}}" if columns else json.dumps(source.path)
    top_p = "" if pair.sampling.top_p is None else f", top_p: {pair.sampling.top_p:g}"
    num_train = "null" if data.num_train is None else data.num_train
    note = "all prompts that dev and test leave" if data.num_train is None else f"null: use all {num_prompts:,}"
    names = ("max_prompt_tokens", "rows_per_shard")
    changed = [name for name in names if getattr(data, name) != getattr(schema.DataConfig, name)]
    others = "".join(f", {name}: {getattr(data, name)}" for name in changed)
    lines = [
        f"# acceptance-heads all --config {quote(str(path))}: data, training, export, evaluation, threshold.",
        f"# {num_prompts:,} prompts; estimated size and time (`acceptance-heads plan --config {quote(str(path))}`):",
        *(part for line in takes for part in wrap(line, 110, initial_indent="#   ", subsequent_indent="#     ")),
        "pair:",
        f"  target: {{path: {json.dumps(pair.target.path)}}}",
        f"  draft: {{path: {json.dumps(pair.draft.path)}}}",
        f"  sampling: {{temperature: {pair.sampling.temperature:g}{top_p}}}  # heads are trained for one sampling",
        f"data: {{dir: {_quoted(data.dir)}, prompts: {prompts}, template: {data.template},",
        f"  num_train: {num_train}, num_dev: {data.num_dev}, num_test: {data.num_test},  # num_train: {note}",
        f"  max_new_tokens: {data.max_new_tokens}{others}}}",
        f"heads: {{dir: {_quoted(config.heads.dir)}}}",
        f"decode: {{dir: {_quoted(decode.dir)}, num_dev: {decode.num_dev}, num_test: {decode.num_test},",
        f"  max_new_tokens: {decode.max_new_tokens}}}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: str) -> str:
    """A path as a YAML scalar: quoted if it has more than letters, digits, dots, dashes and slashes."""
    return path if re.fullmatch(r"[A-Za-z_][\w./-]*", path, re.ASCII) else json.dumps(path)


@accepts_yaml
def plan(config: schema.Config, *, sample: int = 32) -> dict[str, Any]:
    """Estimate rows, tokens, forward passes, disk space and time of a run before running it.

    Args:
        config: the experiment.
        sample: number of prompts to make and time, at most half a minute; 0 loads no model.
    """
    num_weights = head_weights(config)
    totals = plan_data(config, sample=sample, head_weights=num_weights)
    print(f"heads: {num_weights:,} weights in total, {len(specs(config.heads))} heads")
    known_s = [totals["time_s"]] if totals.get("time_s") else []
    if known_s:
        known_s.append(training_s(config, totals, num_weights))
        print(f"train: about {duration(known_s[-1])} on this machine's CPU, or less")
    line, timing_s = timing_line(config)
    print(line)
    if known_s:
        print(f"together about {duration(sum(known_s) + timing_s)}, plus the traces of evaluate and tune")
    say_next(config, "all", " (every step; finished work is kept), or data (the first step)")
    return totals


def head_weights(config: schema.Config) -> int:
    """Weights of all heads of the grid."""
    width = width_of(config.pair.draft) or model_config(config.pair.draft).get_text_config().hidden_size
    with torch.device("meta"):
        return sum(spec.shape.head(width).num_parameters for spec in specs(config.heads))


def training_s(config: schema.Config, totals: dict[str, Any], num_weights: int) -> float:
    """Estimated seconds of training, from the speed of matrix products on this machine."""
    data, heads, width = config.data, config.heads, 256
    num_train = totals["rows"] if data.num_train is None else min(totals["rows"], data.num_train)
    num_epochs = config.trainer.get("max_epochs") or epochs_of(num_train, heads.batch_size)
    tokens = totals["response_tokens"] / max(1, totals["rows"]) * num_train
    matrix = torch.ones(width, width)
    product_s = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
    return _OVER_PRODUCTS * _FLOPS_PER_WEIGHT * num_weights * tokens * num_epochs * product_s / (2 * width**3)


def timing_line(config: schema.Config) -> tuple[str, float]:
    """One line about the timing of `evaluate`, and its seconds on a small pair."""
    if config.decode.t_draft_s is not None:
        return "evaluate: no timing, as decode.t_draft_s and decode.t_target_s are set", 0.0
    return f"evaluate: measures this machine once, {ABOUT_TIMING}; skip it with {SKIP}", TIMING_S
