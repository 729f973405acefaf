"""A run with `engine: ray` whose actors get SIGKILL on the way (a fault of `benchmarks.faults`)."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.injected import SAME, Bench
from benchmarks.stages_under_fault import STAGES, at, differing, results
from configs.schema import RayConfig
from tests.data_gen.processes import ray_actors

_ROOT = Path(__file__).resolve().parents[1]


def kill_actors(bench: Bench, chance: random.Random, *, count: int) -> tuple[str, int]:
    """Run `python -m data_gen` to its end and SIGKILL up to `count` actors, each a random moment after a new shard."""
    config = at(bench.config, bench.place)
    config = replace(config, data=replace(config.data, engine="ray", ray=RayConfig(num_workers=2)))
    bench.place.mkdir(parents=True, exist_ok=True)
    settings = bench.place / "ray.json"
    settings.write_text(json.dumps(asdict(config)))
    command = [sys.executable, "-m", "data_gen", "--config", str(settings)]
    with (bench.place / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=log, stderr=log, start_new_session=True)
        num_killed = num_shards = 0
        while process.poll() is None:
            time.sleep(0.02)
            now = len(list((bench.place / "data" / "rows").glob("*.parquet")))
            if num_killed < count and now > num_shards:
                time.sleep(chance.uniform(0, 0.2))
                for pid in ray_actors(process.pid)[:1]:
                    os.kill(pid, signal.SIGKILL)
                    num_killed, num_shards = num_killed + 1, now
    if process.returncode:
        return f"FAILED: {process.returncode}: {(bench.place / 'log').read_text()[-400:]}", num_killed
    wrong = differing(bench.reference["data"], results(bench.place, STAGES["data"]))
    return (SAME if not wrong else f"FAILED: {len(wrong)} files differ, first {wrong[0]}"), num_killed
