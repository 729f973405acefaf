"""Bad input in the thousands: every boundary reads it, or refuses it in one clear line that names the file or the
setting.

    python -m benchmarks.fuzz [--cases 12000] [--commands 300] [--only TEXT] [--seed 0]

hypothesis breaks valid files (a value of another type, a key removed, bytes cut, flipped or inserted) and valid configs
(one setting of any kind), and each boundary reads the result in this process. `commands` are whole commands in forked
children with one bad setting each. A case fails that ends in another exception than the command line tells in one line,
in a message that does not name its file, or not at all. The last line is one JSON document.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.boundaries import boundaries
from benchmarks.breakage import fuzz_boundary
from benchmarks.fuzzed_commands import refuse_or_run
from configs.command import run


def fuzz(*, cases: int = 12_000, commands: int = 300, only: str = "", seed: int = 0) -> dict[str, Any]:
    """Break, read, count.

    Args:
        cases: over all boundaries, in equal parts.
        commands: whole commands with a bad setting.
        only: boundaries whose name has this text in it.
        seed: of hypothesis.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        chosen = [boundary for boundary in boundaries(Path(name)) if only in boundary.name]
        counts = {
            boundary.name: told(boundary.name, fuzz_boundary(boundary, cases // len(chosen), seed))
            for boundary in chosen
        }
        if commands and only in "commands":
            counts["commands"] = told("commands", refuse_or_run(Path(name) / "commands", commands, seed))
    total = {key: sum(count[key] for count in counts.values()) for key in ("cases", "read", "refused", "failed")}
    result = {**total, "seconds": round(time.monotonic() - began, 1), "boundaries": counts}
    print(json.dumps(result))
    return result


def told(name: str, count: dict[str, Any]) -> dict[str, Any]:
    """Print what came of one boundary, and return it."""
    print(
        f"{name:<28} " + ", ".join(f"{count[key]:>6} {key}" for key in ("cases", "read", "refused", "failed")),
        flush=True,
    )
    for failure, number in count["failures"].items():
        print(f"    {number} x {failure}", flush=True)
    return count


if __name__ == "__main__":
    run({"fuzz": fuzz}, default="fuzz")
