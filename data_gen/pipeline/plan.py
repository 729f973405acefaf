"""Estimates what a run takes before anything large starts.

First the memory of each stage is computed (`data_gen.pipeline.memory`) and compared with the GPUs. Then a sample
is made in a temporary folder and timed in about half a minute, and extrapolated by tokens. Without a sample
(`--sample 0`, which needs only each model's config.json) sizes are upper bounds from the YAML, and no time is
estimated.
"""

import math
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.schema import Config, DataConfig, HeadsConfig, PairConfig
from data_gen.pipeline import memory
from data_gen.pipeline.checks import check_lengths, check_settings
from data_gen.pipeline.stages import is_done, settled, shards_of, stages_of
from data_gen.pipeline.worker import Job, Worker
from data_gen.prompts.prompt import Prompt
from data_gen.responses.exchange import ShardSpec
from data_gen.store.rows import read_rows
from lm import model_config
from lm.features.released import released_layout_of, width_of
from lm.pair import free_memory
from lm.parallel import refuse_sliced
from store.progress import Bar
from store.shards import shard_path

_ROW_BYTES_PER_TOKEN = 32
"""Upper bound of the Parquet bytes of one response position: six numbers, two ids, a coin, and the text."""
_LABEL_BYTES_PER_TOKEN = 37
"""Bytes of the labels of one token: eight float32, one int32, one bool."""
_BUDGET_S = 30.0
"""Seconds that a sample may take, without loading the models."""
_WARM_PROMPTS = 2
_WARM_TOKENS = 8
_FEWEST_PROMPTS = 4
_BATCHES_PER_SHARD = 4
"""Batches per shard from which `plan` accepts that a batch drains at a shard's end, where it cannot go on with the
next shard. Of 256 sequences with 16 to 256 tokens, 135 are active on average at 1 batch per shard, 194 at 4, 218 at 8.
"""
_SHARD_S = 600.0
"""Recommend smaller shards if one takes longer: an interrupted run loses its unfinished ones."""
Say = Callable[[str, str], None]
"""Takes the lines of a plan, each after the name of what it is about: a total, disk, time, note, warning, …"""


def printed(_: str, line: str) -> None:
    """Print a line of a plan."""
    print(line)


def plan(config: Config, *, sample: int = 32, head_weights: int = 0, say: Say = printed) -> dict[str, Any]:
    """Rows, tokens, forward passes, disk, time and memory by stage (bytes) of a run, before running it.

    Args:
        config: the experiment.
        sample: number of prompts to make and time, at most half a minute; 0 loads no model.
        head_weights: weights of all heads together.
        say: gets each line of the report.
    """
    data = config.data
    specs = list[ShardSpec]()
    check_settings(config.pair, data)
    needs = _check_memory(config, say, is_measured=sample > 0, head_weights=head_weights)  # first: it needs no prompts
    try:
        data = settled(data, say=partial(say, "splits"))
        specs = [spec for spec in shards_of(data) if not is_done(spec, data)]
        num_rows = sum(spec.num_requests for spec in specs)
    except FileNotFoundError as error:
        if sample or data.num_train is None:
            raise
        num_rows = data.num_train + data.num_dev + data.num_test
        say("note", f"note: prompts are not available, so rows are data.num_train + num_dev + num_test ({error})")
    if num_rows == 0:
        say("done", f"{data.dir}: all shards are complete, nothing to do")
        return {"rows": 0}
    prompts = [prompt for spec in specs for prompt in spec.prompts]
    row, is_cut, origin = _measured(config.pair, data, prompts[:sample]) if sample else _bound(config.pair, data)
    totals = _totals(config, data, num_rows, row) | {"is_cut": is_cut}
    totals["memory_bytes"] = {need.stage: need.total for need in needs}
    say("origin", f"{data.dir}: {num_rows:,} rows to make ({origin})")
    if sets := Counter(prompt.set for prompt in prompts if prompt.set):
        say("sets", "  prompts           " + ", ".join(f"{name} {count:,}" for name, count in sets.items()))
    _report(config.heads, data, totals, say)
    return totals


def _check_memory(config: Config, say: Say, *, is_measured: bool, head_weights: int) -> list[memory.Need]:
    """Say the memory of each stage; refuse a measured plan that does not fit, else warn."""
    if released_layout_of(config.pair.draft):
        say("memory", "memory: not estimated for a feature draft, which takes about as much as one layer of the target")
        return []
    gpus = memory.gpus_of(config.pair.gpus)
    whose = "the GPUs of this machine"
    needs = memory.needs(config, max(1, len(gpus)), head_weights=head_weights)
    if config.pair.gpus:
        whose = f"pair.gpus {config.pair.gpus} (null: {whose})"
    say("memory", f"memory, compared with {whose}:")
    for need in needs:
        room = f" of {need.memory(gpus) / memory.GB:,.0f} GB" if gpus else ""
        say("memory", f"  {need.stage:<24} {need.total / memory.GB:>8,.1f} GB{room} = {need}")
    for problem in filter(None, (need.problem(gpus) for need in needs)):
        if is_measured:
            raise ValueError(f"{problem} (or pass --sample 0 to plan without loading)")
        say("warning", f"warning: {problem}")
    return needs


def _totals(config: Config, data: DataConfig, num_rows: int, row: Mapping[str, float]) -> dict[str, Any]:
    """What so many rows take, by the means of one row, and what training computes from them."""
    num_tokens = num_rows * row["response_tokens"]
    width, num_drafted = _drafted(config.pair, data)
    num_states = len(config.heads.state_timings) if config.heads.states == "cached" else 0
    state_bytes = num_drafted * width * getattr(torch, config.heads.state_dtype).itemsize
    has_feature_draft = released_layout_of(config.pair.draft) is not None
    # disk_usage needs an existing folder, and data.dir may not exist yet
    folder = next(path for path in (Path(data.dir).absolute(), *Path(data.dir).absolute().parents) if path.exists())
    return {
        "rows": num_rows,
        "prompt_tokens": round(num_rows * row["prompt_tokens"]),
        "response_tokens": round(num_tokens),
        "target_decode_forwards": round(num_tokens / data.batch_size) if data.source == "transformers" else 0,
        "target_sequence_forwards": num_rows if data.labels == "target" else 0,
        "draft_sequence_forwards": num_rows,
        "disk_bytes": round(num_rows * row["disk_bytes"]),
        "state_forwards": num_rows * num_states,
        "state_target_forwards": num_rows * num_states if has_feature_draft else 0,
        "state_bytes": round(num_tokens * state_bytes) * num_states,
        "free_bytes": shutil.disk_usage(folder).free,
        "time_s": row["token_s"] * num_tokens if "token_s" in row else None,
    }


def _measured(pair: PairConfig, data: DataConfig, prompts: list[Prompt]) -> tuple[dict[str, float], bool, str]:
    """Means of a row of a sample, whether the sample was shortened to stay within its time, and a phrase about it."""
    check_lengths(pair, data)
    refuse_sliced(pair, "a measured plan (--sample 0 measures nothing)")
    with tempfile.TemporaryDirectory() as folder:
        sampled = replace(data, dir=folder)
        seconds = 0.0
        for number, stage in enumerate(stages_of(data)):
            with Bar(total=len(prompts), unit="steps", desc="sample: loading models") as bar:
                worker = Worker(Job(pair=pair, data=sampled, stage=stage))
                bar.set_description(f"sample: {stage}")
                if number == 0:
                    sampled, spec = _sized(worker, sampled, prompts, bar)
                worker.resize(sampled)
                seconds += _timed(worker, spec, bar)
            del worker
            free_memory()  # the next stage loads other models
        table = read_rows(
            shard_path(folder, "rows", spec.split, spec.index), ["prompt_ids", "response_ids"]
        ).to_pydict()
        responses = list(map(len, table["response_ids"]))
        limit = sampled.max_new_tokens
        if not responses:
            raise ValueError(
                f"none of the {len(prompts)} sampled prompts gave a row; raise --sample, or run `data` on few prompts"
            )
        is_cut = limit < data.max_new_tokens
        # a response that was cut short may have any length up to the limit
        mean = statistics.fmean(data.max_new_tokens if is_cut and num == limit else num for num in responses)
        files = [path for path in Path(folder).rglob(f"{spec.name}.*") if path.suffix != ".json"]
        row = {
            "prompt_tokens": statistics.fmean(map(len, table["prompt_ids"])),
            "response_tokens": mean,
            "disk_bytes": sum(path.stat().st_size for path in files) / sum(responses) * mean,
            "token_s": seconds / sum(responses),
        }
        about = f"estimated from {len(spec.prompts)} sample prompts"
        if is_cut:
            about += f" of at most {limit} tokens"
        return row, is_cut or len(spec.prompts) < len(prompts), about


def _sized(worker: Worker, data: DataConfig, prompts: Sequence[Prompt], bar: Bar) -> tuple[DataConfig, ShardSpec]:
    """The settings and the shard that fit the budget, by the time of two short responses."""
    worker.resize(replace(data, max_new_tokens=min(_WARM_TOKENS, data.max_new_tokens)))
    warm_up = ShardSpec("dev", 0, tuple(prompts[:_WARM_PROMPTS]))
    token_s = [_timed(worker, warm_up, bar) for _ in range(2)][-1] / _WARM_PROMPTS / _WARM_TOKENS
    limit = min(data.max_new_tokens, max(_WARM_TOKENS, int(_BUDGET_S / token_s / _FEWEST_PROMPTS)))
    num = max(_FEWEST_PROMPTS, int(_BUDGET_S / token_s / limit))
    return replace(data, max_new_tokens=limit), ShardSpec("train", 0, tuple(prompts[:num]))


def _timed(worker: Worker, spec: ShardSpec, bar: Bar) -> float:
    bar.reset(total=worker.job.num_steps * spec.num_requests)
    start_s = time.perf_counter()
    worker.make(spec, bar.update)
    return time.perf_counter() - start_s


def _drafted(pair: PairConfig, data: DataConfig) -> tuple[int, float]:
    """Width of the draft's hidden states, and at most so many drafted tokens per response token."""
    width = width_of(pair.draft)
    if width is None:  # not a feature draft
        return model_config(pair.draft).get_text_config().hidden_size, 1.0
    return width, data.draft_length / data.draft_every


def _bound(pair: PairConfig, data: DataConfig) -> tuple[dict[str, float], bool, str]:
    """Upper bounds of a row, from the YAML; as `_measured` returns them."""
    _, num_drafted = _drafted(pair, data)
    token_bytes = _ROW_BYTES_PER_TOKEN + num_drafted * _LABEL_BYTES_PER_TOKEN
    row = {
        "prompt_tokens": float(data.max_prompt_tokens),
        "response_tokens": float(data.max_new_tokens),
        "disk_bytes": data.max_new_tokens * token_bytes,
    }
    return row, False, "upper bounds, nothing measured"


def _report(heads: HeadsConfig, data: DataConfig, totals: Mapping[str, Any], say: Say) -> None:
    by_server = ", as the server provides the labels" if data.labels == "server" else ""
    facts = (
        ("rows", "rows", ""),
        ("prompt tokens", "prompt_tokens", ""),
        ("response tokens", "response_tokens", ""),
        ("target forwards", "target_decode_forwards", f" decoding steps of up to {data.batch_size} sequences"),
        ("", "target_sequence_forwards", f" whole sequences{by_server}"),
        ("draft forwards", "draft_sequence_forwards", " whole sequences"),
    )
    for label, name, unit in facts:
        say(name, f"  {label:<18}{totals[name]:>15,}{unit}")
    disk_gb = totals["disk_bytes"] / 1e9
    free_gb = totals["free_bytes"] / 1e9
    say("disk", f"  disk              {disk_gb:>15,.3f} GB of rows and labels, free {free_gb:,.1f} GB")
    _report_states(heads, totals, say)
    is_drained = data.rows_per_shard < _BATCHES_PER_SHARD * data.batch_size and totals["rows"] > data.rows_per_shard
    if is_drained and (cause := _cause_of_drains(data)) is not None:
        say(
            "note",
            f"note: with {cause} a batch drains at the end of each shard, so {data.batch_size} sequences "
            f"(data.batch_size) with {data.rows_per_shard} rows per shard leave a part of it idle, half if a shard is "
            f"one batch; data.rows_per_shard {2 * _BATCHES_PER_SHARD * data.batch_size} leaves a seventh, and "
            "data.mode: sequential with engine: local, whose batches serve the next shard too, next to nothing",
        )
    if (time_s := totals["time_s"]) is not None:
        workers = data.ray.num_workers if data.engine == "ray" else 1
        shared = f" / {workers} workers = {duration(time_s / workers)}" if workers > 1 else ""
        say("time", f"  time        about {duration(time_s):>15} on this machine, or less{shared}")
        if advised := shard_size(data, totals):
            say(
                "shard size",
                f"warning: a shard of {data.rows_per_shard} responses takes about "
                f"{duration(time_s / totals['rows'] * data.rows_per_shard)}, which an interrupted run would "
                f"lose; set data.rows_per_shard to {advised}",
            )
    if totals["disk_bytes"] + totals["state_bytes"] > totals["free_bytes"]:
        say("warning", "warning: not enough free disk space; free some, use fewer prompts, or heads.states: online")


def _cause_of_drains(data: DataConfig) -> str | None:
    """The setting with which the target answers one shard at a time; None if requests of the next shard join."""
    if data.source != "transformers":
        return None
    if data.engine == "ray":
        return "data.engine: ray"
    return "data.mode: together" if data.mode == "together" else None


def _report_states(heads: HeadsConfig, totals: Mapping[str, Any], say: Say) -> None:
    """What training adds: hidden states, in a cache or for each batch."""
    timings = " and ".join(heads.state_timings)
    if heads.states == "online":
        say("states", f"  hidden states     none on disk: training runs the draft over each batch ({timings})")
        return
    num_forwards = f"{totals['state_forwards']:,} whole sequences of the draft"
    if totals["state_target_forwards"]:
        num_forwards += " and of the target, whose states it reads"
    size_gb = totals["state_bytes"] / 1e9
    say("states", f"  hidden states     {size_gb:>15,.3f} GB ({timings}), cached by `train`: {num_forwards}")


def shard_size(data: DataConfig, totals: Mapping[str, Any]) -> int | None:
    """Responses per shard of about ten minutes; None if shards take less already."""
    row_s = (totals.get("time_s") or 0) / max(1, totals["rows"])
    if row_s * min(data.rows_per_shard, totals["rows"]) <= _SHARD_S:
        return None
    return max(1, 2 ** int(math.log2(max(1, _SHARD_S / row_s))))


def duration(seconds: float) -> str:
    """A duration as text: 45 s, 2.5 min, 3.0 h."""
    if seconds >= 5400:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:,.1f} min" if seconds >= 90 else f"{seconds:,.0f} s"
