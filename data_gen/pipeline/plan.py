"""`python -m data_gen plan`: what a run will take, before anything large starts.

First the memory of each stage, by arithmetic (`data_gen.pipeline.memory`), beside the GPUs that the YAML states. Then
the run is made twice for a few prompts in a temporary folder and timed, one stage's models at a time; the rest is
extrapolated by steps and tokens (`data_gen.pipeline.pace`). Without a sample (`--sample 0`, which needs each model's
config.json and nothing else of it) sizes are upper bounds from the YAML, and no time is estimated.
"""

import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import Config, DataConfig, PairConfig
from data_gen.pipeline import memory
from data_gen.pipeline.command import check_settings
from data_gen.pipeline.growth import shards_of
from data_gen.pipeline.pace import Effort, Pace
from data_gen.pipeline.sizes import settled
from data_gen.pipeline.stages import is_done, stages_of
from data_gen.pipeline.worker import FEATURE_DTYPES, Job, Worker, check_lengths
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import Split
from data_gen.responses.conversation import ShardSpec
from data_gen.store.rows import read_rows
from lm import free_memory, load_config
from lm.features.released import released_layout_of, width_of
from lm.parallel import refuse_sliced
from store.shards import rows_path

_ROW_BYTES_PER_TOKEN = 32
"""Upper bound of the Parquet bytes of one response position: six numbers, two ids, a coin, and the text."""
_SAFETENSORS_BYTES_PER_TOKEN = 29
"""Bytes of one feature position without its hidden state: six float32, one int32, one bool."""


_FEWER = 8
"""How many times as many prompts the larger of the two samples has."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a row takes: means that were measured on a sample, or upper bounds."""

    prompt_tokens: float
    response_tokens: float
    longest_response: int
    row_bytes: float
    feature_bytes: float
    pace: Pace | None
    """None where nothing was measured."""


def plan(config: Config, *, sample: int = 32) -> dict[str, Any]:
    """Rows, tokens, forward passes, disk and time of a run, before running it.

    Args:
        sample: prompts that are made and timed; 0 loads no model.
    """
    check_settings(config.pair, config.data)
    _check_memory(config, is_measured=sample > 0)  # from config.json alone, so before prompts are looked for
    pair, data = config.pair, _settled(config, is_needed=sample > 0)
    missing = _missing(data, is_needed=sample > 0)
    prompts = [prompt for spec in missing or () for prompt in spec.prompts]
    shards = _shards_of(data) if missing is None else [spec.num_requests for spec in missing]
    num_rows = sum(shards)
    if num_rows == 0:
        print(f"{data.dir}: every shard is there, nothing to do")
        return {"rows": 0}
    if sample:
        check_lengths(pair, data)
    if sample:
        refuse_sliced(config.pair, "a measured plan (--sample 0 measures nothing)")
    estimate = _measure(pair, data, prompts[:sample]) if sample else _bound(pair, data)
    totals = _totals(data, shards, estimate)
    sets = Counter(prompt.set for prompt in prompts if prompt.set)
    origin = f"measured on {sample} prompts" if sample else "upper bounds, nothing measured"
    print(f"{data.dir}: {num_rows:,} rows to make ({origin})")
    if sets:
        print("  prompts           " + ", ".join(f"{name} {count:,}" for name, count in sets.items()))
    print(_report(data, totals))
    return totals


def _check_memory(config: Config, *, is_measured: bool) -> None:
    """Print the arithmetic; what does not fit is refused before models are loaded, and else warned of."""
    if released_layout_of(config.pair.draft):
        print("memory is not reckoned with a feature draft, which takes about as much as one layer of the target")
        return
    gpus = memory.gpus_of(config.pair.gpus)
    needs = memory.needs(config, max(1, len(gpus)))
    whose = "the GPUs of this machine"
    if config.pair.gpus:
        whose = f"the GPUs that the YAML names, pair.gpus {config.pair.gpus} (null: {whose})"
    print(f"memory, beside {whose}:\n{memory.memory_report(needs, gpus)}")
    for problem in memory.problems(needs, gpus):
        if is_measured:
            raise ValueError(f"{problem} (or pass --sample 0 to plan without loading)")
        print(f"warning: {problem}")


def _settled(config: Config, *, is_needed: bool) -> DataConfig:
    """The section with all its sizes; as it is, where the prompts are not at hand and its own sizes do."""
    try:
        return settled(config.data, config.heads)
    except FileNotFoundError:
        if is_needed or config.data.num_train is None:
            raise
        return config.data


def _missing(data: DataConfig, *, is_needed: bool) -> list[ShardSpec] | None:
    """The shards that are still to make; None, and a note, where the prompts are not at hand and not needed."""
    try:
        return [spec for spec in shards_of(data) if not is_done(spec, data)]
    except (FileNotFoundError, ValueError) as error:
        if is_needed:
            raise
        print(f"note: prompts are not at hand, so rows are data.num_train + num_dev + num_test ({error})")
        return None


def _shards_of(data: DataConfig) -> list[int]:
    """Rows of each shard, where prompts are not at hand and every one is taken to be of one turn."""
    per_shard = data.rows_per_shard
    return [
        min(per_shard, num_rows - start)
        for num_rows in (data.num_train or 0, data.num_dev, data.num_test)
        for start in range(0, num_rows, per_shard)
    ]


def _totals(data: DataConfig, shards: Sequence[int], estimate: Estimate) -> dict[str, Any]:
    """The totals of shards of so many rows."""
    num_rows, effort = sum(shards), _effort_of(data, shards, estimate.longest_response, estimate.response_tokens)
    disk_bytes = num_rows * (estimate.row_bytes + estimate.feature_bytes)
    # disk_usage needs a folder that exists, and data.dir may not yet
    folder = next(path for path in (Path(data.dir).absolute(), *Path(data.dir).absolute().parents) if path.exists())
    return {
        "rows": num_rows,
        "prompt_tokens": round(num_rows * estimate.prompt_tokens),
        "response_tokens": round(num_rows * estimate.response_tokens),
        "target_decode_forwards": round(effort.num_steps),
        "target_sequence_forwards": num_rows if data.labels == "target" else 0,
        "draft_sequence_forwards": num_rows * (1 + (data.mixes if "fed" in data.feature_sets else 0)),
        "disk_bytes": round(disk_bytes),
        "free_bytes": shutil.disk_usage(folder).free,
        "time_s": None if estimate.pace is None else estimate.pace.seconds(effort),
    }


def _effort_of(data: DataConfig, shards: Sequence[int], longest: int | float, mean: int | float) -> Effort:
    return Effort.of(
        shards, longest=longest, mean=mean, batch_size=data.batch_size, is_decoded=data.source == "transformers"
    )


def _measure(pair: PairConfig, data: DataConfig, prompts: list[Prompt]) -> Estimate:
    """The estimate of a run on some prompts; two of them warm up first, and the time to load models is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        sampled = replace(data, dir=folder)
        samples: dict[Split, list[Prompt]] = {"dev": prompts[: max(1, len(prompts) // _FEWER)], "test": prompts}
        seconds = dict.fromkeys(samples, 0.0)
        for stage in stages_of(data):
            worker = Worker(Job(pair=pair, data=sampled, stage=stage))
            worker.make(ShardSpec("train", 0, tuple(prompts[:2])), lambda count: None)
            for split, sample in samples.items():
                start = time.perf_counter()
                worker.make(ShardSpec(split, 0, tuple(sample)), lambda count: None)
                seconds[split] += time.perf_counter() - start
            del worker
            free_memory()  # the next stage loads models of its own
        table = read_rows(rows_path(folder, "test", 0), ["prompt_ids", "response_ids"]).to_pydict()
        num_rows = len(table["prompt_ids"])
        if num_rows == 0:
            raise ValueError(
                f"none of the {len(prompts)} sampled prompts gave a row; see errors.jsonl of a small run for the "
                "reasons, or raise --sample"
            )
        efforts = [_effort_made(data, folder, split) for split in samples]
        return Estimate(
            prompt_tokens=statistics.fmean(map(len, table["prompt_ids"])),
            response_tokens=statistics.fmean(map(len, table["response_ids"])),
            longest_response=max(map(len, table["response_ids"])),
            row_bytes=sum(path.stat().st_size for path in Path(folder, "rows").glob("test-*.parquet")) / num_rows,
            feature_bytes=sum(path.stat().st_size for path in Path(folder, "features").rglob("test-*.safetensors"))
            / num_rows,
            pace=Pace.of(efforts, list(seconds.values())),
        )


def _effort_made(data: DataConfig, folder: str, split: Split) -> Effort:
    """The effort of a sample's one shard."""
    responses = read_rows(rows_path(folder, split, 0), ["response_ids"]).to_pydict()["response_ids"]
    lengths = [len(ids) for ids in responses] or [0]
    return _effort_of(data, [len(lengths)], max(lengths), statistics.fmean(lengths))


def _bound(pair: PairConfig, data: DataConfig) -> Estimate:
    """Upper bounds from the YAML and the draft's config.json."""
    tokens = data.max_new_tokens
    num_features: float = (data.mixes if "fed" in data.feature_sets else 0) + ("drawn" in data.feature_sets)
    width = width_of(pair.draft)
    if width is None:
        width = load_config(pair.draft).get_text_config().hidden_size
    else:  # a feature draft
        num_features *= data.draft_length / data.draft_every
    position_bytes = width * FEATURE_DTYPES[data.feature_dtype].itemsize + _SAFETENSORS_BYTES_PER_TOKEN
    return Estimate(
        prompt_tokens=float(data.max_prompt_tokens),
        response_tokens=float(tokens),
        longest_response=tokens,
        row_bytes=float(tokens * _ROW_BYTES_PER_TOKEN),
        feature_bytes=float(num_features * tokens * position_bytes),
        pace=None,
    )


def _report(data: DataConfig, totals: dict[str, Any]) -> str:
    """The totals as text, with a warning when the disk is too small."""
    workers = data.ray.num_workers if data.engine == "ray" else 1
    lines = [
        f"  rows              {totals['rows']:>15,}",
        f"  prompt tokens     {totals['prompt_tokens']:>15,}",
        f"  response tokens   {totals['response_tokens']:>15,}",
        (
            f"  target forwards   {totals['target_decode_forwards']:>15,} decoding steps of up to {data.batch_size} "
            "sequences"
        ),
        (
            f"                    {totals['target_sequence_forwards']:>15,} whole sequences"
            + (", as the server tells the labels" if data.labels == "server" else "")
        ),
        f"  draft forwards    {totals['draft_sequence_forwards']:>15,} whole sequences",
        f"  disk              {totals['disk_bytes'] / 1e9:>15,.3f} GB, free {totals['free_bytes'] / 1e9:,.1f} GB",
    ]
    if totals["time_s"] is not None:
        shared = f" / {workers} workers = {duration(totals['time_s'] / workers)}" if workers > 1 else ""
        lines.append(f"  time              {duration(totals['time_s']):>15} on this machine{shared}")
    if totals["disk_bytes"] > totals["free_bytes"]:
        lines.append(
            "warning: the disk is too small; use a larger one, fewer prompts, one timing of data.features, or fewer "
            "data.mixes"
        )
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 2.5 min, 3.0 h."""
    return (
        f"{seconds / 3600:,.1f} h"
        if seconds >= 5400
        else f"{seconds / 60:,.1f} min"
        if seconds >= 90
        else f"{seconds:,.0f} s"
    )
