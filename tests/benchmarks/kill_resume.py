"""SIGKILL at random moments, resume, and compare the sha256 of every file with those of an uninterrupted run.

    python -m tests.benchmarks.kill_resume --config configs/tiny.yaml --data.rows_per_shard 4 --data.num_train 96 --data.num_dev 0
        --data.num_test 0 [--kills 10] [--actor_kills 2] [--seed 0]

Every run is `python -m data_gen` in a process of its own, as a user starts it. A kill waits until the run has written a random number of
files, at most its share of all files, and then for a random moment more; so there is work left for each of the `kills`. With `actor_kills`
the same data are then made with `engine: ray`, and that many of its actors get SIGKILL on the way. The last line is one JSON document.
"""

import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from configs.command import run
from configs.schema import Config
from tests.data_gen.processes import ray_actors

_ROOT = Path(__file__).resolve().parents[2]


def kill_resume(config: Config, *, kills: int = 10, actor_kills: int = 0, seed: int = 0) -> dict[str, Any]:
    """Kill, resume, compare.

    Args:
        kills: SIGKILLs of the whole run before it may end.
        actor_kills: SIGKILLs of a Ray actor in one more run; 0: no such run.
        seed: of the moments.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(config, folder / "whole")
        whole = digests(folder / "whole")
        share = sum(path.endswith(".json") for path in whole) // kills
        moments = [run_and_kill(config, folder / "killed", chance.randint(0, share - 1), chance) for _ in range(kills)]
        finish(config, folder / "killed")
        result = {
            "files": len(whole),
            "shards": sum(path.endswith(".parquet") for path in whole),
            "kills": sum(moment["was_killed"] for moment in moments),
            "moments": moments,
            "differing_files": differing(whole, digests(folder / "killed")),
        }
        if actor_kills:
            ray = replace(config, data=replace(config.data, engine="ray"))
            result["actor_kills"] = kill_actors(ray, folder / "ray", actor_kills, chance)
            result["ray_differing_files"] = differing(whole, digests(folder / "ray"))
    result |= {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "cores": os.cpu_count(), "command": sys.argv[1:]}
    print(json.dumps(result))
    return result


def start(config: Config, directory: Path) -> subprocess.Popen:
    """A run into `directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    settings = directory.with_suffix(".json")
    settings.write_text(json.dumps(asdict(replace(config, data=replace(config.data, dir=str(directory))))))
    command = [sys.executable, "-m", "data_gen", "--config", str(settings)]
    return subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def run_and_kill(config: Config, directory: Path, num_more: int, chance: random.Random) -> dict[str, Any]:
    """SIGKILL a run a random moment after it has written `num_more` files (0: while it starts); returns what it left on disk."""
    began, before = time.monotonic(), num_sidecars(directory)
    process = start(config, directory)
    wait_s = chance.uniform(0, 0.3 if num_more else 5)
    while process.poll() is None and num_sidecars(directory) < before + num_more:
        time.sleep(0.005)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return {
        "after_s": round(time.monotonic() - began, 2),
        "was_killed": process.returncode == -signal.SIGKILL,
        "sidecars": num_sidecars(directory),
        "files_without_sidecar": num_files(directory) - num_sidecars(directory),
        "partial_files": len(list(directory.rglob(".*.partial"))),
    }


def num_sidecars(directory: Path) -> int:
    """Shards that have their sidecar."""
    return len([path for path in directory.rglob("*-0*.json") if not path.name.startswith(".")])


def num_files(directory: Path) -> int:
    """Files of rows and features."""
    return len([path for path in directory.rglob("*-0*") if path.suffix in (".parquet", ".safetensors")])


def finish(config: Config, directory: Path) -> None:
    """Run to the end."""
    end(start(config, directory))


def kill_actors(config: Config, directory: Path, count: int, chance: random.Random) -> int:
    """Run to the end and SIGKILL up to `count` actors, each a random moment after a new shard; returns how many were killed."""
    process, num_killed, num_shards = start(config, directory), 0, 0
    while process.poll() is None:
        time.sleep(0.05)
        now = len(list((directory / "rows").glob("*.parquet")))
        if num_killed < count and now > num_shards:
            time.sleep(chance.uniform(0, 0.5))
            for pid in ray_actors(process.pid)[:1]:
                os.kill(pid, signal.SIGKILL)
                num_killed, num_shards = num_killed + 1, now
    end(process)
    return num_killed


def end(process: subprocess.Popen) -> None:
    """Wait for the end of a run; ValueError if it failed."""
    _, errors = process.communicate()
    if process.returncode:
        raise ValueError(f"python -m data_gen ended with {process.returncode}: {errors.decode()[-500:]}")


def digests(directory: Path) -> dict[str, str]:
    """sha256 of every file but the manifest, which names its own command."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Files that are in one only, or not the same in both."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


if __name__ == "__main__":
    run({"kill_resume": kill_resume}, default="kill_resume")
