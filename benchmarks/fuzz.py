"""Bad input in the thousands: every boundary reads it, or refuses it in one clear line that names the file or the
setting.

    python -m benchmarks.fuzz [--cases 12000] [--commands 300] [--only TEXT] [--seed 0]

hypothesis breaks valid files (a value of another type, a key removed, bytes cut, flipped or inserted) and valid configs
(one setting of any kind), and each boundary reads the result in this process. `commands` are whole commands in forked
children with one bad setting each. A case fails that ends in another exception than the command line tells in one line,
in a message that does not name its file, or not at all. The last line is one JSON document.
"""

import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer

from benchmarks.boundaries import boundaries
from benchmarks.breakage import fuzz_boundary
from benchmarks.stages_under_fault import Child, at, experiment
from configs.command import run
from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from evaluation.__main__ import COMMANDS as EVALUATION
from heads.command import export
from heads.training.command import train
from heads.training.trainer import quiet

_SETTINGS = {
    "data.batch_size": (0, -1, 1, 10**12),
    "data.rows_per_shard": (0, 10**9),
    "data.max_new_tokens": (0, 10**8, 10**18),
    "data.max_prompt_tokens": (0, 1, 10**9),
    "data.num_train": (0, -1, 10**18),
    "data.mixes": (0, 3),
    "data.chunk_mb": (0, 10**9),
    "data.template": ("none", "llama2", ""),
    "data.prompts": ("", "/", "/dev/null", "nothing.jsonl"),
    "data.source": ("file", "server", "x"),
    "data.features": ("[]", "[fed, fed]", "[x]"),
    "data.split_weights": ("[0, 0, 0]", "[1]", "[-1, 1, 1]"),
    "data.dir": ("/dev/null/x", "/proc/x", "", "a" * 300),
    "data.engine": ("slurm",),
    "pair.num_threads": (-1, 0, 10**6),
    "pair.target.path": ("/", "", "no/such", "/dev/null"),
    "pair.draft.device_map": ("cuda:7", "gpu", "{x: 1}"),
    "pair.draft.extra_layers": (-1, 10**9),
    "pair.sampling.top_k": (0, -5, 10**12),
    "pair.sampling.top_p": (0, 2, ".nan"),
    "pair.sampling.temperature": (-1, ".inf", 1e-300, 1e300),
    "heads.batch_size": (0, 10**9),
    "heads.depths": ("[]", "[-1]", "[0, 0]", "[10000]"),
    "heads.reject_weights": ("[]", "[0]", "[.nan]", "[1e300]"),
    "heads.learning_rate": (0, -1, ".nan", 1e30),
    "heads.num_train": (0, 10**6),
    "heads.dir": ("/dev/null", "/proc/x"),
    "heads.scalars": ("[[x]]", "[]", "[[entropy, entropy]]"),
    "trainer.devices": (0, 99, -5, "x"),
    "trainer.accelerator": ("cuda", "x"),
    "trainer.accumulate_grad_batches": (0, -1, 10**9),
    "trainer.limit_test_batches": (0, -1, 2.5),
    "trainer.limit_train_batches": (0, 0.0001, 10**9),
    "trainer.limit_val_batches": (0, 0.0001),
    "trainer.precision": ("x", "16-true", "64-true"),
    "trainer.max_epochs": (0, -1, -7),
    "trainer.max_steps": (0, -7),
    "trainer.val_check_interval": (0, 10**9, 0.5),
    "trainer.check_val_every_n_epoch": (0, 100),
    "trainer.max_time": ("x", "00:00:00:00"),
    "trainer.strategy": ("x", "ddp"),
    "trainer.gradient_clip_val": (-1, ".nan"),
    "decode.max_draft_length": (-1, 0, 10**9),
    "decode.max_new_tokens": (0, 10**9),
    "decode.num_dev": (0, -1, 10**7),
    "decode.prompts_per_shard": (0,),
    "decode.heads": ("[/]", "[no/such]"),
    "decode.dir": ("/dev/null", "/proc/x"),
}
DATA: dict[str, Any] = {"make": make, "plan": plan}
_COMMANDS: dict[str, tuple[dict[str, Any], str]] = {
    "data": (DATA, "make"),
    "plan": (DATA, "plan"),
    "pair": (DATA, "make"),
    "heads": ({"train": train}, "train"),
    "trainer": ({"train": train}, "train"),
    "export": ({"export": export}, "export"),
    "decode": (EVALUATION, "trace"),
}


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


def refuse_or_run(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Run so many commands; each setting is in at least one of them where there are enough."""
    quiet()
    folder.mkdir()
    config = experiment(folder)
    prepared = Child(lambda: _prepare(config), folder / "log")
    if prepared.wait():
        raise ValueError(f"the commands fail without a bad setting: {prepared.said[-1000:]}")
    cases = [(name, value) for name, values in _SETTINGS.items() for value in values]
    random.Random(seed).shuffle(cases)
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for number in range(count):
        name, value = cases[number % len(cases)]
        section = name.split(".")[0]
        commands, command = _COMMANDS["plan" if section == "data" and number % 3 == 0 else section]
        outcome = _outcome(folder, commands, command, [f"--{name}={value}"])
        outcomes[outcome if outcome in ("read", "refused") else "failed"] += 1
        if outcome not in ("read", "refused"):
            failures[f"{command} --{name}={value}: {outcome}"] += 1
    found = {key: outcomes[key] for key in ("read", "refused", "failed")}
    return {"cases": count, **found, "failures": dict(failures)}


def _prepare(config: Any) -> None:
    make(config)
    train(config)


def _outcome(folder: Path, commands: dict[str, Any], command: str, arguments: list[str]) -> str:
    """Run one command and say how it ended; data that it makes go to a new folder, so that nothing is there yet."""
    config = experiment(folder)
    fresh = at(config, folder / "fresh")
    settings = folder / "settings.json"
    made = fresh.data if command in ("make", "plan") else config.data
    sections = {**asdict(config), "data": asdict(made), "heads": asdict(fresh.heads), "decode": asdict(fresh.decode)}
    settings.write_text(json.dumps({**sections, "trainer": {**config.trainer, "max_epochs": 1}}))
    argv = [command, "--config", str(settings), *arguments]
    child = Child(lambda: run(commands, argv=argv, trainer=Trainer if command == "train" else None), folder / "log")
    try:
        status = child.wait()
    except ValueError as error:
        return str(error)
    if status == 0:
        return "read"
    lines = child.said.strip().splitlines()
    if status == 2 and child.refusal is not None and lines[-1] == child.refusal:
        return "refused"
    return f"exit {status}: {lines[-1][:160] if lines else 'nothing said'}"


if __name__ == "__main__":
    run({"fuzz": fuzz}, default="fuzz")
