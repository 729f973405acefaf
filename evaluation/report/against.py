"""Two evaluations of one trace, such as before and after a head was trained again: what every family did on each test
prompt is kept beside the report, and `evaluate --against DIR` compares it, paired by prompt and policy by policy.

Both count at the times of the evaluation that runs now. A stop that it does not know costs its share of a draft step in
the other evaluation.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from decode.loop.counts import Counts
from evaluation.competitor import label_of
from evaluation.contest import Contest, Replays, Result
from evaluation.families import family
from evaluation.gain import conclusion
from evaluation.played import Played
from evaluation.table import Table
from evaluation.times import Times
from evaluation.traces.trace import Trace
from store.shards import write_atomic

PROMPTS = "test_prompts.parquet"
"""In decode.dir: what every family did on the test prompts at the setting that dev chose."""
Record = dict[str, Any]


def write_prompts(path: Path, contests: Mapping[str, Contest], replays: Mapping[str, Replays]) -> Path:
    """Write what every family of each dataset's contest did on each test response; the path."""
    rows = []
    for dataset, contest in contests.items():
        trace = trace_key(replays[dataset].traces.test)
        for name, result in contest.results.items():
            row = {"dataset": dataset, "trace": trace, "family": name, "name": result.competitor.name}
            rows.append(row | _played_record(result, contest.times))
    frame = pd.DataFrame(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, frame.to_parquet(index=False))
    return path


def _played_record(result: Result, times: Times) -> Record:
    played = result.played
    counts = {name: values[0].tolist() for name, values in vars(played.counts).items() if np.ndim(values)}
    return {
        "setting": json.dumps(dict(result.setting)),
        "stop_kind": played.stop_kind,
        "stop_share": times.stop_s(played.stop_kind) / times.t_draft_s,
        "prompt_of_row": played.prompt_of_row.tolist(),
        "rounds_by_length": played.lengths[0].tolist(),
        **counts,
    }


def trace_key(trace: Trace) -> str:
    """Identifies a trace by its texts, the draft's tokens and their outcomes."""
    texts = [(row.id, row.prompt_ids, row.response_ids, row.limit) for row in trace.rows]
    settings = (trace.sampling.as_dict(), trace.max_draft_length)
    key = hashlib.sha256(repr((texts, settings)).encode())
    key.update(np.asarray(trace.token, dtype=np.int64).tobytes())
    key.update(np.asarray(trace.is_rejected, dtype=bool).tobytes())
    return key.hexdigest()


def read_prompts(directory: str) -> pd.DataFrame:
    """What `write_prompts` wrote into an evaluation's directory; FileNotFoundError if there is nothing."""
    path = Path(directory) / PROMPTS
    if not path.is_file():
        raise FileNotFoundError(
            f"--against is {directory}, which has no {PROMPTS}; run `acceptance-heads evaluate` with that decode.dir, "
            "which writes it"
        )
    return pd.read_parquet(path)


def compare_with(
    other: pd.DataFrame, directory: str, contests: Mapping[str, Contest], replays: Mapping[str, Replays]
) -> list[Record]:
    """The gain of every family over the same family of another evaluation, on the same test prompts.

    Raises:
        ValueError: the other evaluation has none of these datasets, or a trace that differs.
    """
    records = []
    for dataset, contest in contests.items():
        rows = other[other["dataset"] == dataset].to_dict("records")
        key = trace_key(replays[dataset].traces.test)
        if any(row["trace"] != key for row in rows):
            raise ValueError(
                f"--against is {directory}, whose trace of {dataset} differs from this one; compare evaluations of the "
                "same models, sampling, seed, prompts and decode.num_test"
            )
        there = {row["family"]: row for row in rows}
        for name, result in contest.results.items():
            if name in there:
                records.append(_compared(dataset, result, there[name], contest.times))
    if not records:
        raise ValueError(
            f"--against is {directory}, which evaluates {', '.join(other['dataset'].unique())}; here are "
            f"{', '.join(contests)}: compare evaluations of the same datasets"
        )
    return records


def _compared(dataset: str, result: Result, row: Mapping[str, Any], times: Times) -> Record:
    counts = {field.name: np.stack([row[field.name]]) for field in fields(Counts) if field.name in row}
    lengths = np.stack([np.stack(row["rounds_by_length"])])
    played = Played(Counts(**counts), lengths, np.asarray(row["prompt_of_row"]), row["stop_kind"])
    if row["stop_kind"] and times.stop_s(row["stop_kind"]) == 0:
        times = replace(times, t_stop_s={**times.t_stop_s, row["stop_kind"]: row["stop_share"] * times.t_draft_s})
    before = replace(result, played=played, arm=None, times=times)
    gain = replace(result, times=times).over(before)
    label = family(result.family).label
    return {
        "dataset": dataset,
        "family": result.family,
        "setting": result.label,
        "setting_there": label_of(row["name"], json.loads(row["setting"])),
        "num_prompts": len(before.throughput.tokens),
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_there": before.tokens_per_s,
        "gain": gain,
        "conclusion": conclusion(f"{label} here", gain, "there", len(before.throughput.tokens)),
    }


def against_table(records: list[Record], directory: str, title: str) -> Table:
    """Every family of one dataset here and there."""
    rows = [
        {
            "policy": family(record["family"]).label,
            "setting here": record["setting"],
            "setting there": record["setting_there"],
            "tokens/s here": f"{record['tokens_per_s']:.1f}",
            "there": f"{record['tokens_per_s_there']:.1f}",
            "gain": record["gain"].text,
        }
        for record in records
    ]
    note = (
        f"there: {directory}, on the same {records[0]['num_prompts']} test prompts. gain: of this evaluation over that "
        "one, with its 95 % interval, paired by prompt; both at the times of this evaluation"
    )
    return Table(f"{records[0]['dataset']} against {directory}; {title}", rows, note, names=3)
