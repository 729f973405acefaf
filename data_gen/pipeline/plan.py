"""`python -m data_gen plan`: what a run will take, before anything large starts.

A few prompts are made for real into a temporary folder and timed; the rest is extrapolated per row. Without a sample (`--sample 0`: the
models are not loaded) sizes are upper bounds from `max_new_tokens` and the draft's width, and there is no time.
"""

import math
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import Config
from data_gen.pipeline.command import check, cut
from data_gen.pipeline.stages import is_done, stages_of
from data_gen.pipeline.worker import FEATURE_DTYPES, Worker
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import SPLITS
from data_gen.prompts.templates import encode
from data_gen.responses.conversation import ShardSpec
from data_gen.store.manifest import describe_model
from data_gen.store.rows import read_rows
from data_gen.store.shards import rows_path
from lm import load_pair_tokenizer

_ROW_BYTES_PER_TOKEN = 40
"""Upper bound of the Parquet bytes of one response position: six float32, two ids, a coin, and the text."""
_SAFETENSORS_BYTES_PER_TOKEN = 25
"""Of one feature position beside its hidden state: five float32, one int32, one bool."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Per row, measured on a sample or bounded."""

    prompt_tokens: float
    response_tokens: float
    longest_response: int
    """A batch takes as many decoding steps as its longest response has tokens."""
    row_bytes: float
    feature_bytes: float
    seconds: float | None


def plan(config: Config, *, sample: int = 32) -> dict[str, Any]:
    """Rows, tokens, forward passes, disk and time of a run, before running it.

    Args:
        sample: prompts that are made and timed; 0 loads no model.
    """
    check(config)
    splits = {split: load_prompts(config.data, split) for split in SPLITS}
    specs = [spec for split in SPLITS for spec in cut(split, splits[split], config.data.rows_per_shard)]
    missing = [spec for spec in specs if not is_done(config.data, spec)]
    prompts = [prompt for spec in missing for prompt in spec.prompts]
    num_rows = sum(spec.num_requests for spec in missing)
    if num_rows == 0:
        print(f"{config.data.dir}: every shard is there, nothing to do")
        return {"rows": 0}
    estimate = _measured(config, prompts[:sample]) if sample else _bounded(config, prompts)
    result = _totals(config, num_rows, estimate)
    print(_report(config, result, len(missing), len(specs), sample))
    return result


def _totals(config: Config, num_rows: int, estimate: Estimate) -> dict[str, Any]:
    """The numbers of the report."""
    tokens = num_rows * estimate.response_tokens
    num_batches = math.ceil(num_rows / min(config.data.batch_size, config.data.rows_per_shard))
    disk_bytes = num_rows * (estimate.row_bytes + estimate.feature_bytes)
    folder = next(path for path in (Path(config.data.dir).absolute(), *Path(config.data.dir).absolute().parents) if path.exists())
    return {
        "rows": num_rows,
        "prompt_tokens": round(num_rows * estimate.prompt_tokens),
        "response_tokens": round(tokens),
        "target_decode_forwards": num_batches * estimate.longest_response if config.data.source == "transformers" else 0,
        "target_sequence_forwards": num_rows,
        "draft_sequence_forwards": num_rows * (1 + (config.data.mixes if "fed" in config.data.features else 0)),
        "disk_bytes": round(disk_bytes * (1 if config.data.mode == "together" else 2)),
        "free_bytes": shutil.disk_usage(folder).free,
        "time_s": None if estimate.seconds is None else num_rows * estimate.seconds,
    }


def _measured(config: Config, prompts: list[Prompt]) -> Estimate:
    """Make a sample of prompts and look at it; two prompts warm up first, and loading is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        here = replace(config, data=replace(config.data, dir=folder, engine="local"))
        seconds = 0.0
        for stage in stages_of(config.data):
            worker = Worker(here, stage)
            worker.make(ShardSpec("train", 0, tuple(prompts[:2])), lambda count: None)
            start = time.perf_counter()
            worker.make(ShardSpec("test", 0, tuple(prompts)), lambda count: None)
            seconds += time.perf_counter() - start
        table = read_rows(rows_path(folder, "test", 0), ["prompt_ids", "response_ids"]).to_pydict()
        num_rows = len(table["prompt_ids"])
        if num_rows == 0:
            raise ValueError(
                f"none of the {len(prompts)} sampled prompts gave a row; look at them with a small run, or take a larger --sample"
            )
        return Estimate(
            prompt_tokens=statistics.fmean(map(len, table["prompt_ids"])),
            response_tokens=statistics.fmean(map(len, table["response_ids"])),
            longest_response=max(map(len, table["response_ids"])),
            row_bytes=sum(path.stat().st_size for path in Path(folder, "rows").glob("test-*.parquet")) / num_rows,
            feature_bytes=sum(path.stat().st_size for path in Path(folder, "features").rglob("test-*.safetensors")) / num_rows,
            seconds=seconds / num_rows,
        )


def _bounded(config: Config, prompts: list[Prompt]) -> Estimate:
    """Upper bounds without a model; prompt lengths from up to 200 prompts."""
    tokenizer = load_pair_tokenizer(config.pair)
    lengths = [len(encode(prompt, tokenizer, config.data.template)) for prompt in prompts[:200]]
    data, tokens = config.data, config.data.max_new_tokens
    width = describe_model(config.pair.draft, trust_remote_code=config.pair.trust_remote_code)["hidden_size"]
    sets = (data.mixes if "fed" in data.features else 0) + ("drawn" in data.features)
    position_bytes = width * FEATURE_DTYPES[data.feature_dtype].itemsize + _SAFETENSORS_BYTES_PER_TOKEN
    return Estimate(
        prompt_tokens=statistics.fmean(lengths),
        response_tokens=float(tokens),
        longest_response=tokens,
        row_bytes=float(tokens * _ROW_BYTES_PER_TOKEN),
        feature_bytes=float(sets * tokens * position_bytes),
        seconds=None,
    )


def _report(config: Config, result: dict[str, Any], num_missing: int, num_shards: int, sample: int) -> str:
    """The plan as text, with a warning when the disk will not do."""
    source = f"measured on {sample} prompts" if sample else "upper bounds, nothing measured"
    workers = config.data.ray.num_workers if config.data.engine == "ray" else 1
    lines = [
        f"{config.data.dir}: {num_missing} of {num_shards} shards to make ({source})",
        f"  rows              {result['rows']:>15,}",
        f"  prompt tokens     {result['prompt_tokens']:>15,}",
        f"  response tokens   {result['response_tokens']:>15,}",
        f"  target forwards   {result['target_decode_forwards']:>15,} decoding steps of up to {config.data.batch_size} sequences",
        f"                    {result['target_sequence_forwards']:>15,} whole sequences",
        f"  draft forwards    {result['draft_sequence_forwards']:>15,} whole sequences",
        f"  disk              {result['disk_bytes'] / 1e9:>15,.3f} GB, free {result['free_bytes'] / 1e9:,.1f} GB",
    ]
    if result["time_s"] is not None:
        shared = f" / {workers} workers = {_hours(result['time_s'] / workers)}" if workers > 1 else ""
        lines.append(f"  time              {_hours(result['time_s']):>15} on this machine{shared}")
    if result["disk_bytes"] > result["free_bytes"]:
        lines.append("warning: the disk will not do; use a larger one, fewer prompts, one timing of data.features, fewer data.mixes")
    return "\n".join(lines)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 5400 else f"{seconds / 60:,.1f} min" if seconds >= 90 else f"{seconds:,.0f} s"
