"""`acceptance-heads init`, which writes an experiment's YAML from two models and a file of prompts, and
`acceptance-heads plan`, which estimates size and time of the data (`data_gen.pipeline.plan`), of training, and of
`evaluate`.
"""

import math
import re
import timeit
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import Any

import torch
import yaml

from configs import schema
from configs.hints import say_next
from configs.limits import check_limits
from configs.load import accepts_yaml
from configs.paths import local_path
from data_gen.pipeline.checks import check_settings, hint_at_few, limit_of
from data_gen.pipeline.plan import Say, duration, printed, shard_size
from data_gen.pipeline.plan import plan as plan_data
from data_gen.prompts.sets import is_generated, load, set_of, splittable
from data_gen.prompts.templates import show_first
from evaluation.costs.defaults import default_sampling, refuse_large_draft
from evaluation.costs.machine import ABOUT_TIMING, TIMING_S
from evaluation.costs.stability import SKIP
from evaluation.gain import MIN_PROMPTS
from heads.grid import specs
from heads.training.command import epochs_of
from lm import load_pair_tokenizer, model_config
from lm.features.released import width_of
from lm.folders import refuse_no_model
from lm.pair import check_widths
from store.shards import write_atomic

_FEWEST = 10
"""Prompts that an experiment needs."""
_MOST_HELD_OUT = 100
_MOST_TRAIN = 4000
_REPEATED = ("rows", "response_tokens", "disk", "time", "train", "evaluate", "together", "warning", "note")
"""What the lines of `plan` that the YAML repeats are about. It has no memory table, only its warnings; and no
warning about shards, which `init` follows.
"""
_SAMPLE = 32  # prompts to time, at most half a minute
_NO_BFLOAT16 = (
    "note: this CPU has no bfloat16 arithmetic; with `dtype: float32, packed: true` for target and draft (4 "
    "bytes per weight) verifying a few tokens takes little longer than one, without it a draft seldom pays"
)
_FLOPS_PER_WEIGHT = 6
_OVER_PRODUCTS = 4.0
"""Operations per weight and token in a training step, and the time of a step relative to its matrix products
(`checkpoints/tiny`: 4; wider heads less).
"""
_LARGE_STEP_FLOP = 1e12
"""Operations of a training step from which `plan` names the precision that saves time."""


def init(
    *,
    target: str,
    draft: str,
    prompts: str,
    column: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    out: str = "experiment.yaml",
    allow_large_draft: bool = False,
    force: bool = False,
) -> Path:
    """Run `acceptance-heads init`; `configs.making` documents its flags."""
    path = local_path(out, "--out")
    if path.exists() and not force:
        raise ValueError(f"{path} already exists; choose another --out, or pass --force to replace it")
    target_source = schema.ModelSource(path=target)
    sampling, notes = default_sampling(target_source, {"temperature": temperature, "top_p": top_p, "top_k": top_k})
    if torch.backends.cpu.get_cpu_capability() == "AVX2" and not torch.cuda.is_available():
        notes.append(_NO_BFLOAT16)
    pair = schema.PairConfig(target=target_source, draft=schema.ModelSource(path=draft), sampling=sampling)
    source = schema.PromptSource(path=prompts, columns={"prompt": column} if column else {})
    text = _experiment_file(pair, source, path, notes=notes, allow_large_draft=allow_large_draft)
    write_atomic(path, text.encode())
    print(f"{text}\nwrote {path}; next: acceptance-heads all --config {quote(str(path))}")
    return path


def _experiment_file(
    pair: schema.PairConfig, source: schema.PromptSource, path: Path, *, notes: list[str], allow_large_draft: bool
) -> str:
    """The content of the file, which these models and prompts were checked for.

    Raises:
        FileNotFoundError: no such model, or no such prompts.
        ValueError: models with different tokenizers or too few logits, a draft that is not smaller, too few prompts.
    """
    if is_generated(source):
        raise ValueError("--prompts is stories, of which there is no end; give a file of prompts, or use --config tiny")
    for model in (pair.target, pair.draft):
        refuse_no_model(model.path)
    prompt_set = set_of(source)
    prompts = splittable(prompt_set, schema.DataConfig.seed)
    config = _experiment(pair, source, num_prompts=len(prompts), num_records=len(load(prompt_set)), name=path.stem)
    check_limits(config)
    check_settings(pair, config.data)
    if not allow_large_draft:
        refuse_large_draft(pair)
    hint_at_few(len(prompts), source.path)
    check_widths(pair)
    show_first(prompts, load_pair_tokenizer(pair), config.data.template)
    lines, totals = _plan(config)
    if rows_per_shard := shard_size(config.data, totals):
        config = replace(config, data=replace(config.data, rows_per_shard=rows_per_shard))
    return _yaml(config, num_prompts=len(prompts), takes=[*notes, *lines], path=path)


def _experiment(
    pair: schema.PairConfig, source: schema.PromptSource, *, num_prompts: int, num_records: int, name: str
) -> schema.Config:
    """The experiment: a tenth of the prompts for each of dev and test, or a quarter if that is too few for a verdict;
    and the rest, up to a limit, for train.
    """
    if num_prompts < _FEWEST:
        repeats = f" ({num_records - num_prompts} of {num_records} repeat another)" if num_prompts < num_records else ""
        raise ValueError(f"{source.path} has {num_prompts} different prompts{repeats}; give at least {_FEWEST}")
    num_held_out = max(min(MIN_PROMPTS, num_prompts // 4), min(_MOST_HELD_OUT, num_prompts // 10))
    # the longest text is a prompt, a response and a draft beyond it
    limits = (limit_of(source) or 2**31 for source in (pair.target, pair.draft))
    num_positions = min(limits) - schema.DecodeConfig.max_draft_length
    num_new = min(schema.DataConfig.max_new_tokens, num_positions // 2)
    data = schema.DataConfig(
        dir=f"data/{name}",
        prompts=source,
        template="plain" if load_pair_tokenizer(pair).chat_template is None else "chat",
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
    lines: list[str] = []

    def keep(name: str, line: str) -> None:
        if name in _REPEATED:
            lines.append(line.strip())

    try:
        totals = _estimated(config, keep, sample=_SAMPLE)
    except ValueError as error:
        lines.append(f"not measured: {error}")
        totals = _estimated(config, keep, sample=0)
    return lines, totals


def _yaml(config: schema.Config, *, num_prompts: int, takes: list[str], path: Path) -> str:
    pair = config.pair
    data = config.data
    decode = config.decode
    [source] = data.prompt_sources
    prompts = _quoted(source.path)
    if source.columns:
        [(name, column)] = source.columns.items()
        prompts = f"{{path: {prompts}, columns: {{{name}: {_quoted(column)}}}}}"
    values = {name: value for name, value in asdict(pair.sampling).items() if value is not None}
    sampling = ", ".join(f"{name}: {str(value).removesuffix('.0')}" for name, value in values.items())
    num_train = "null" if data.num_train is None else data.num_train
    note = "all prompts that dev and test leave" if data.num_train is None else f"null: use all {num_prompts:,}"
    sizes = {name: getattr(data, name) for name in ("max_prompt_tokens", "rows_per_shard")}
    others = "".join(f", {name}: {size}" for name, size in sizes.items() if size != getattr(schema.DataConfig, name))
    lines = [
        f"# acceptance-heads all --config {quote(str(path))}: data, training, export, evaluation, threshold.",
        f"# {num_prompts:,} prompts; estimated size and time (`acceptance-heads plan --config {quote(str(path))}`):",
        *(part for line in takes for part in wrap(line, 110, initial_indent="#   ", subsequent_indent="#     ")),
        "pair:",
        f"  target: {{path: {_quoted(pair.target.path)}}}",
        f"  draft: {{path: {_quoted(pair.draft.path)}}}",
        f"  sampling: {{{sampling}}}  # heads are trained for one sampling",
        f"data: {{dir: {_quoted(data.dir)}, prompts: {prompts}, template: {data.template},",
        f"  num_train: {num_train}, num_dev: {data.num_dev}, num_test: {data.num_test},  # num_train: {note}",
        f"  max_new_tokens: {data.max_new_tokens}{others}}}",
        f"heads: {{dir: {_quoted(config.heads.dir)}}}",
        f"decode: {{dir: {_quoted(decode.dir)}, num_dev: {decode.num_dev}, num_test: {decode.num_test},",
        f"  max_new_tokens: {decode.max_new_tokens}}}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text as a YAML scalar in ASCII: quoted if it has more than letters, digits, dots, dashes and slashes."""
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text, re.ASCII):
        return text
    return str(yaml.safe_dump(text, default_style='"', width=math.inf)).rstrip("\n")


@accepts_yaml
def plan(config: schema.Config, *, sample: int = 32) -> dict[str, Any]:
    """Run `acceptance-heads plan`; `configs.making` documents its flags."""
    totals = _estimated(config, printed, sample=sample)
    say_next(config, "all", " (every step; finished work is kept), or data (the first step)")
    return totals


def _estimated(config: schema.Config, say: Say, *, sample: int) -> dict[str, Any]:
    """The totals of the data; `say` gets the lines about data, training and evaluation."""
    num_weights = head_weights(config)
    totals = plan_data(config, sample=sample, head_weights=num_weights, say=say)
    say("heads", f"heads: {num_weights:,} weights in total, {len(specs(config.heads))} heads")
    step_flop = float(_FLOPS_PER_WEIGHT) * num_weights * config.heads.batch_size * config.data.max_new_tokens
    if step_flop >= _LARGE_STEP_FLOP and config.trainer.get("precision") in (None, "32-true", "32", 32):
        say(
            "train",
            f"train: up to {step_flop / 1e12:,.0f} TFLOP per step; on GPUs, --trainer.precision bf16-mixed would save "
            "half of their time in TF32 (the default), by the rates of tensor cores",
        )
    line, timing_s = timing_line(config)
    if data_s := totals.get("time_s"):
        train_s = training_s(config, totals, num_weights)
        say("train", f"train: about {duration(train_s)} on this machine's CPU, or less")
    say("evaluate", line)
    if data_s:
        say("together", f"together about {duration(data_s + train_s + timing_s)}, plus the traces of evaluate and tune")
    return totals


def head_weights(config: schema.Config) -> int:
    """Weights of all heads of the grid."""
    width = width_of(config.pair.draft) or model_config(config.pair.draft).get_text_config().hidden_size
    with torch.device("meta"):
        return sum(spec.shape.head(width).num_parameters for spec in specs(config.heads))


def training_s(config: schema.Config, totals: dict[str, Any], num_weights: int) -> float:
    """Estimated seconds of training, from the speed of matrix products on this machine."""
    data = config.data
    width = 256
    num_train = totals["rows"] if data.num_train is None else min(totals["rows"], data.num_train)
    num_epochs = config.trainer.get("max_epochs") or epochs_of(num_train, config.heads.batch_size)
    tokens = totals["response_tokens"] / max(1, totals["rows"]) * num_train
    matrix = torch.ones(width, width)
    product_s = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
    return _OVER_PRODUCTS * _FLOPS_PER_WEIGHT * num_weights * tokens * num_epochs * product_s / (2 * width**3)


def timing_line(config: schema.Config) -> tuple[str, float]:
    """One line about the timing of `evaluate`, and its seconds on a small pair."""
    if config.decode.t_draft_s is not None:
        return "evaluate: no timing, as decode.t_draft_s and decode.t_target_s are set", 0.0
    return f"evaluate: measures this machine once, {ABOUT_TIMING}; skip it with {SKIP}", TIMING_S
