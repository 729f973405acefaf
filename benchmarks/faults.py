"""Faults at random moments of data, training, export and trace: nothing that was reported as written is lost, and the
resumed result is the undisturbed one byte for byte.

    python -m benchmarks.faults --out DIR [--trials 10] [--only TEXT,TEXT] [--seed 0] [--ray_kills 0]

Every stage runs in a child that is forked from this warm process, on a pair of toy models. Trials are seeded by fault
and number; those in DIR/trials.jsonl are not repeated, so the command goes on where it was stopped. A full and a
read-only disk are tmpfs mounts. Prints fault | times tried | outcome; the last line is one JSON document.
"""

import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import injected
from benchmarks.injected import SAME, Bench
from benchmarks.stages_under_fault import STAGES, Child, at, differing, experiment, results
from configs.command import run
from configs.remote import RayConfig
from data_gen.pipeline.command import make
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength
from heads.training.trainer import quiet
from lm import Sampling, load_pair
from tests.data_gen.processes import ray_actors

Fault = Callable[[Bench, random.Random], tuple[str, int]]
_ROUNDS = 10_000
_APART = "data in three stages"
"""The stage that makes the data once more."""
_ROOT = Path(__file__).resolve().parents[1]


def faults(*, out: str, trials: int = 10, only: str = "", seed: int = 0, ray_kills: int = 0) -> dict[str, Any]:
    """Disturb, resume, compare.

    Args:
        out: a folder for the experiment and for trials.jsonl.
        trials: of every fault.
        only: faults whose name has this text in it, or one of several with commas between them.
        seed: of the moments.
        ray_kills: SIGKILLs of Ray actors in one run with `engine: ray` (needs the extra `ray`).
    """
    quiet()
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is shared with forked children, and a killed one never gives it back
    folder = Path(out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bench = undisturbed(folder)
    log = folder / "trials.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    known = {(trial["fault"], trial["number"]) for trial in done}
    once = ("memory", "lost")
    todo = [(number, name, fault) for number in range(trials) for name, fault in faults_of(only, ray_kills).items()]
    for number, name, fault in todo:
        if (name, number) in known or (number and name.startswith(once)):
            continue
        trial = tried(bench, fault, random.Random(f"{seed}/{name}/{number}")) | {"fault": name, "number": number}
        done.append(trial)
        with log.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        print(f"{name} {number}: {trial['outcome']}", flush=True)
    result = fault_summary([trial for trial in done if _is_among(trial["fault"], only)])
    print(json.dumps(result))
    return result


def faults_of(only: str, ray_kills: int) -> dict[str, Fault]:
    """Every fault by name."""
    every: dict[str, Fault] = {}
    for stage in STAGES.values():
        for number in (signal.SIGKILL, signal.SIGTERM):
            every[f"{number.name}: {stage.name}"] = partial(
                _on_stage, partial(injected.kill, number=number), stage.name
            )
    for stage in STAGES.values():
        for name, fault in (
            ("full disk", injected.full_disk),
            ("read-only folder", injected.read_only),
            ("two at once", injected.two_at_once),
        ):
            every[f"{name}: {stage.name}"] = partial(_on_stage, fault, stage.name)
    every |= {f"shard {kind}": partial(_with_kind, injected.damage, kind) for kind in injected.DAMAGE}
    every |= {f"server {kind}": partial(_with_kind, injected.bad_server, kind) for kind in injected.SERVERS}
    every |= {"memory: ten thousand rounds": memory_of_rounds, "memory: 600 shards": memory_of_data}
    if ray_kills:
        every["lost Ray workers"] = partial(kill_actors, count=ray_kills)
    return {name: fault for name, fault in every.items() if _is_among(name, only)}


def _is_among(name: str, only: str) -> bool:
    return any(text in name for text in only.split(","))


def _on_stage(
    fault: Callable[..., tuple[str, int]], stage: str, bench: Bench, chance: random.Random
) -> tuple[str, int]:
    return fault(bench, STAGES[stage], chance)


def _with_kind(
    fault: Callable[..., tuple[str, int]], kind: str, bench: Bench, chance: random.Random
) -> tuple[str, int]:
    return fault(bench, kind, chance)


def tried(bench: Bench, fault: Fault, chance: random.Random) -> dict[str, Any]:
    """One trial in an empty folder."""
    shutil.rmtree(bench.place, ignore_errors=True)
    began = time.monotonic()
    try:
        outcome, struck = fault(bench, chance)
    except Exception as error:  # a benchmark that ends with its first finding finds little
        outcome, struck = f"FAILED: {type(error).__name__}: {str(error)[:400]}", 1
    return {"outcome": outcome, "struck": struck, "seconds": round(time.monotonic() - began, 2)}


def undisturbed(folder: Path) -> Bench:
    """Run every stage once without a fault, and once with a server that does nothing wrong; kept for the next time."""
    config, whole, facts = experiment(folder), folder / "whole", folder / "whole.json"
    if facts.is_file():
        return Bench(config, whole, **json.loads(facts.read_text()))
    shutil.rmtree(whole, ignore_errors=True)
    bench = Bench(config, whole, {}, {})
    for stage in sorted(STAGES.values(), key=lambda stage: stage.name == _APART):  # last, in a place of its own
        place = bench.place if stage.name == _APART else whole
        shutil.rmtree(bench.place, ignore_errors=True)
        child = bench.start(stage, at(config, place))
        if child.wait():
            raise ValueError(f"{stage.name} fails without a fault: {child.said[-2000:]}")
        bench.durations_s[stage.name] = time.monotonic() - child.began
        bench.reference[stage.name] = results(place, stage)
    shutil.rmtree(bench.place)
    outcome, _ = injected.bad_server(bench, "well", random.Random(0))
    if outcome != injected.SAME:
        raise ValueError(f"a good server fails: {outcome}")
    bench.reference["served"] = results(bench.place, STAGES["data"])
    facts.write_text(json.dumps({"durations_s": bench.durations_s, "reference": bench.reference}))
    return bench


def memory_of_rounds(bench: Bench, chance: random.Random) -> tuple[str, int]:
    """Growth of resident memory from the first fifth of ten thousand rounds to their end."""

    def decode() -> None:
        pair = load_pair(bench.config.pair)
        decoder = SpeculativeDecoder(
            pair.target,
            ModelDrafter(pair.draft, FixedLength(4), vocab_size=pair.vocab_size),
            sampling=Sampling(),
            max_draft_length=4,
            vocab_size=pair.vocab_size,
        )
        rounds, early_kb = 0, 0
        while rounds < _ROUNDS:
            rounds += len(decoder.generate([5, 6, 7], 200).rounds)
            early_kb = early_kb or (resident_kb() if rounds > _ROUNDS / 5 else 0)
        print(f"grew by {resident_kb() - early_kb} kB of {resident_kb()} from round {_ROUNDS // 5} to {_ROUNDS}")

    return _said(Child(decode, bench.whole.parent / "log"))


def memory_of_data(bench: Bench, chance: random.Random) -> tuple[str, int]:
    """Growth of resident memory from the first fifth of 600 shards to their end."""
    config = at(
        replace(bench.config, data=replace(bench.config.data, num_train=1200, num_dev=0, num_test=0)), bench.place
    )

    def work() -> None:
        make(replace(config, data=replace(config.data, num_train=240, dir=config.data.dir + "-warm")))
        early_kb = resident_kb()
        make(config)
        print(f"grew by {resident_kb() - early_kb} kB of {resident_kb()} from 120 to 720 shards")

    return _said(Child(work, bench.whole.parent / "log"))


def _said(child: Child) -> tuple[str, int]:
    status = child.wait()
    return (child.said.splitlines()[-1] if status == 0 else f"FAILED: {child.said[-300:]}"), 1


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


def resident_kb() -> int:
    """The resident memory of this process, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def fault_summary(done: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Print the table and return it as JSON values."""
    table = Table("fault", "times tried", "struck", "outcome")
    rows: dict[str, dict[str, Any]] = {}
    for trial in done:
        row = rows.setdefault(trial["fault"], {"tried": 0, "struck": 0, "outcomes": Counter()})
        row["tried"] += 1
        row["struck"] += trial["struck"]
        row["outcomes"][trial["outcome"]] += 1
    for name, row in rows.items():
        outcomes = "; ".join(f"{count}: {outcome}" for outcome, count in row["outcomes"].most_common())
        table.add_row(name, str(row["tried"]), str(row["struck"]), outcomes)
    Console(width=140).print(table)
    kills = sum(row["struck"] for name, row in rows.items() if name.startswith("SIG"))
    failed = sum(
        count for row in rows.values() for outcome, count in row["outcomes"].items() if outcome.startswith("FAILED")
    )
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "command": sys.argv[1:],
    }
    return {"random_kills": kills, "failed": failed, "faults": rows, **about}


if __name__ == "__main__":
    run({"faults": faults}, default="faults")
