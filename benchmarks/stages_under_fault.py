"""The stages that `benchmarks.faults` disturbs: a tiny experiment, each stage in a forked child, and what is compared
afterwards.
"""

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig
from data_gen.pipeline.command import make
from evaluation.traces.command import trace
from heads.command import export
from heads.model.head import AcceptanceHead
from heads.training.command import train
from store.shards import verify_shard
from tests.toys.saved_pair import save_toy

_END_S = 300
"""No stage of the tiny experiment takes a tenth of it: a longer one hangs."""
Digests = dict[str, str]


class Stage(NamedTuple):
    """One command, and what of its folder must not depend on how often it was disturbed."""

    name: str
    work: Callable[[Config, Path], object]
    """Takes the config, and the folder of the undisturbed run, in which it finds what the stages before it made."""
    folder: str
    """Folder of the experiment that it writes: data, heads or decode."""
    results: tuple[str, ...]
    """Patterns of files in it that only the config decides."""


def _make(config: Config, whole: Path, **changes: object) -> None:
    make(replace(config, data=replace(config.data, **changes)))


def _train(config: Config, whole: Path) -> None:
    train(replace(config, data=replace(config.data, dir=str(whole / "data"))))


def _export(config: Config, whole: Path) -> None:
    export(at(config, whole), out=str(Path(config.heads.dir) / "exported"))


_SHARDS = ("rows/*", "features/**/*", "errors.jsonl")
STAGES = {
    stage.name: stage
    for stage in (
        Stage("data", _make, "data", _SHARDS),
        Stage("data in three stages", partial(_make, mode="sequential"), "data", _SHARDS),
        Stage("training", _train, "heads", ("val_metrics.json", "tables.md")),
        Stage("export", _export, "heads", ("exported/**/*",)),
        Stage(
            "trace",
            lambda config, whole: trace(config),
            "decode",
            ("trace/*/rows/*", "trace/*/signals/*", "trace/errors.jsonl"),
        ),
    )
}


def experiment(folder: Path) -> Config:
    """The tiny experiment, its models in `folder`, its results in `folder`/whole."""
    for name, size in (("target", 16), ("draft", 8)):
        if not (folder / name / "config.json").is_file():
            save_toy(folder / name, hidden_size=size, seed=size)
    config = Config(
        pair=PairConfig(
            target=ModelSource(path=str(folder / "target")),
            draft=ModelSource(path=str(folder / "draft")),
            num_threads=1,
        ),
        data=DataConfig(
            num_train=12,
            num_dev=4,
            num_test=4,
            max_prompt_tokens=200,
            max_new_tokens=12,
            rows_per_shard=2,
            batch_size=8,
        ),
        heads=HeadsConfig(
            depths=(0, 1), reject_weights=(1.0, 6.0), timings=("fed", "drawn"), batch_size=4, checkpoint_every_n_steps=2
        ),
        trainer={"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
        decode=DecodeConfig(num_dev=4, num_test=4, prompts_per_shard=1, max_new_tokens=12, max_draft_length=6),
    )
    return at(config, folder / "whole")


def at(config: Config, place: Path) -> Config:
    """The experiment with all its results in another folder."""
    dirs = {name: replace(getattr(config, name), dir=str(place / name)) for name in ("data", "heads", "decode")}
    return replace(config, **dirs)


class Child:
    """A stage in a forked child, as the command line ends it: 0, or 2 and one line, or 1 and a traceback."""

    def __init__(self, work: Callable[[], object], log: Path) -> None:
        self.log, self.began = log, time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(work)

    def _be(self, work: Callable[[], object]) -> None:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = 1
        try:
            work()
            status = 0
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def signal_after(self, seconds: float, number: signal.Signals) -> bool:
        """Send a signal after so many seconds; whether the child was still there."""
        end = self.began + seconds
        while time.monotonic() < end:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
            time.sleep(0.002)
        os.kill(self.pid, number)
        return True

    def wait(self) -> int:
        """The child's exit status, negative for a signal; ValueError if it hangs."""
        end = time.monotonic() + _END_S
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise ValueError(f"hangs: {_END_S} s and no end")

    @property
    def said(self) -> str:
        """The text that the stage printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def refusal(self) -> str | None:
        """The child's one line, if it ended as a user's error does."""
        lines = [line for line in self.said.splitlines() if line.startswith("error: ")]
        return lines[0] if len(lines) == 1 and "Traceback" not in self.said else None


def results(place: Path, stage: Stage) -> Digests:
    """sha256 of all that a stage wrote and that only its config decides."""
    folder = place / stage.folder
    paths = sorted(
        path for pattern in stage.results for path in folder.glob(pattern) if path.is_file() and path.name[0] != "."
    )
    found = {str(path.relative_to(folder)): hashlib.sha256(_without_run(path)).hexdigest() for path in paths}
    return found | ({"weights": _digest_of_weights(folder / "last.ckpt")} if stage.name == "training" else {})


def lost(place: Path, stage: Stage, reference: Digests) -> str | None:
    """A file that a killed stage had reported as written and that is not there as it ought to be; None: there is no
    such file.
    """
    folder = place / stage.folder
    if stage.name == "training":
        if (folder / "last.ckpt").is_file():
            torch.load(folder / "last.ckpt", weights_only=True, map_location="cpu")
        return None
    if stage.name == "export":
        for path in sorted((folder / "exported").glob("[!.]*")):
            AcceptanceHead.from_pretrained(path)
        return None
    for sidecar in folder.rglob("[!.]*-*.json"):
        path = sidecar.with_suffix("")
        name = str(path.relative_to(folder))
        if name.startswith("stages") and not path.exists():
            continue  # an earlier stage's result that was being cleared away, its shard being whole
        verify_shard(path)
        if not name.startswith("stages") and reference[name] != hashlib.sha256(path.read_bytes()).hexdigest():
            return f"{name} is whole and not what the undisturbed run wrote"
    return None


def differing(one: Digests, other: Digests) -> list[str]:
    """Files that are in one only, or not the same in both."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _without_run(path: Path) -> bytes:
    """A file's content; metrics without the name of their run, which is drawn anew for every run."""
    content = path.read_bytes()
    return json.dumps(json.loads(content) | {"run": None}).encode() if path.name == "val_metrics.json" else content


def _digest_of_weights(path: Path) -> str:
    state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
