"""errors.jsonl: every prompt that has no row, with the reason. ok + error + skipped = input, asserted.

Each shard's sidecar carries its own problems, so they are as crash-safe as its rows; the file is made from the sidecars when a run ends.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from data_gen.shards import read_sidecar, rows_path, write_atomic


def write_errors(directory: str | Path, shards: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Write DIR/errors.jsonl, one {id, split, shard, outcome, reason} per line; totals of input, ok, error, skipped and tokens."""
    totals = dict.fromkeys(("input", "ok", "error", "skipped", "tokens"), 0)
    lines = []
    for split, index in shards:
        facts = read_sidecar(rows_path(directory, split, index))
        for name in ("input", "ok", "tokens"):
            totals[name] += facts[name]
        for problem in facts["problems"]:
            totals[problem["outcome"]] += 1
            lines.append(
                json.dumps(
                    {"id": problem["id"], "split": split, "shard": index, "outcome": problem["outcome"], "reason": problem["reason"]}
                )
            )
    assert totals["ok"] + totals["error"] + totals["skipped"] == totals["input"], f"prompts unaccounted for: {totals}"
    write_atomic(Path(directory) / "errors.jsonl", "".join(line + "\n" for line in lines).encode())
    return totals
