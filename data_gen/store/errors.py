"""errors.jsonl: every prompt that has no row, with the reason; ok + error + skipped = input.

Each shard's sidecar lists its problems, so they survive a crash; the file is built from the sidecars when a run ends.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from store.shards import SIDECAR_REMEDY, read_sidecar, sidecar_path, write_atomic

_COUNTED = ("input", "ok", "tokens")


def account(paths: Iterable[Path]) -> dict[str, int]:
    """Totals of input, ok, error, skipped (prompts, turn by turn) and tokens over some shards of rows."""
    totals = Counter(dict.fromkeys((*_COUNTED, "error", "skipped"), 0))
    for path in paths:
        facts = read_sidecar(path, keys=(*_COUNTED, "problems"))
        try:
            outcomes = [problem["outcome"] for problem in facts["problems"]]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{sidecar_path(path)}: problems have another form; {SIDECAR_REMEDY}") from error
        if facts["ok"] + len(outcomes) != facts["input"]:
            raise ValueError(f"{sidecar_path(path)}: some prompts have neither a row nor a reason; {SIDECAR_REMEDY}")
        totals.update({name: facts[name] for name in _COUNTED})
        totals.update({name: outcomes.count(name) for name in ("error", "skipped")})
    return dict(totals)


def has_errors(path: Path) -> bool:
    """Whether a prompt of this shard of rows ended in an error (a skipped prompt did not)."""
    return any(problem["outcome"] == "error" for problem in read_sidecar(path, keys=("problems",))["problems"])


def write_errors(directory: str | Path, paths: Iterable[Path], unreadable: Mapping[str, str] | None = None) -> None:
    """Write DIR/errors.jsonl, one {id, outcome, reason, shard} per line, in the order of the shards of rows in `paths`.
    `unreadable`: location -> reason of each record of data.prompts that cannot be read.
    """
    unread = [{"id": where, "outcome": "error", "reason": reason} for where, reason in (unreadable or {}).items()]
    lines = [json.dumps({**problem, "shard": None}) + "\n" for problem in unread]
    lines += [
        json.dumps({**problem, "shard": path.stem}) + "\n"
        for path in paths
        for problem in read_sidecar(path)["problems"]
    ]
    write_atomic(Path(directory) / "errors.jsonl", "".join(lines).encode())
