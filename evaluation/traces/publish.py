"""Copying a trace for publication, without prompts, and with logits of heads instead of the large hidden states."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.paths import local_path
from data_gen.store.manifest import read_manifest
from evaluation.traces.disk import read_shard, shard_keys, write_trace
from evaluation.traces.recording import SPLITS
from heads import AcceptanceHead
from store.shards import atomic_directory, check_sums, read_sidecar, write_atomic


def record(*, decode_dir: str, out: str, heads: tuple[str, ...] = ()) -> None:
    """Copy a trace and its times for others to evaluate, replay and tune on (`--decode.as_recorded true`), without
    prompts and hidden states.

    Args:
        decode_dir: decode.dir of the evaluation; its trace has first draws only, and hidden states.
        out: the folder that becomes another decode.dir.
        heads: directories of the heads whose logits the copy holds.
    """
    source, directory = Path(local_path(decode_dir, "--decode_dir")), Path(local_path(out, "--out"))
    if directory.exists():
        raise ValueError(f"{directory} exists already; choose another --out, or delete it")
    trace, scorers = source / "trace", [AcceptanceHead.from_pretrained(path).eval() for path in heads]
    manifest = read_manifest(trace, command="trace")
    datasets = sorted(folder.parent.name for folder in trace.glob("*/rows"))
    shards = [shard for dataset in datasets for split in SPLITS for shard in shard_keys(trace, dataset, split)]
    check_sums([path for shard in shards for path in shard.paths(trace)], command="trace")
    with atomic_directory(directory) as unfinished:
        if (source / "costs.jsonl").is_file():
            shutil.copy(source / "costs.jsonl", unfinished)
        facts: dict[str, Any] = {**manifest, "trace_hidden": False, "heads": list(heads)}
        write_atomic(unfinished / "trace" / "manifest.json", json.dumps(facts, indent=1).encode())
        for shard in shards:
            if (content := read_shard(trace, shard, manifest)) is not None:
                rows = tuple(replace(row, prompt_ids=()) for row in content.rows)
                for head in scorers:
                    content.logit(head)  # stays in the trace, when its hidden states go
                content = replace(content, rows=rows, inputs=None)
            problems = read_sidecar(shard.paths(trace)[0])["problems"]
            write_trace(unfinished / "trace", shard, trace=content, problems=problems)
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    print(f"{directory}: {len(shards)} shards, logits of {len(heads)} heads, {num_bytes / 1e6:.1f} MB")
