"""A tiny experiment whose stages run in forked children, and faults at random moments of data, training, export and
trace: nothing that was reported as written is lost, and the resumed result is the undisturbed one byte for byte.
"""

import fcntl
import hashlib
import io
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig
from data_gen.pipeline.command import make
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength
from evaluation.traces.recording import trace
from heads.batches.module import FeatureData
from heads.command import export
from heads.model.head import AcceptanceHead
from heads.training.command import train
from lm import Sampling, load_pair
from store.shards import verify_shard
from tests.data_gen.on_disk import with_data
from tests.toys.saved_pair import save_toy

_END_S = 180  # a stage of the tiny experiment takes seconds on a quiet machine: one that runs this long hangs
_PIPE_BYTES = 2**20  # what a child may print before it is read
Digests = dict[str, str]


class Stage(NamedTuple):
    """One command; it takes the config, and the folder of the undisturbed run with the results of earlier stages."""

    name: str
    work: Callable[[Config, Path], object]
    folder: str
    results: tuple[str, ...]
    """Patterns of files in the folder that depend on the config alone."""


def _train(config: Config, whole: Path) -> None:
    train(replace(config, data=replace(config.data, dir=str(whole / "data"))))


def _export(config: Config, whole: Path) -> None:
    export(at(config, whole), out=str(Path(config.heads.dir) / "exported"), force=True)


def _sequential(config: Config, whole: Path) -> None:
    make(replace(config, data=replace(config.data, mode="sequential")))


def _states(config: Config, whole: Path) -> None:
    """Fill the cache of hidden states beside the rows and labels of the undisturbed run."""
    for path in sorted(whole.glob("data/[!s.]*"), key=lambda path: path.name == "manifest.json"):
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            link = Path(config.data.dir, file.relative_to(whole / "data"))
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.link(file, link)
    FeatureData(config.data, config.heads, pair=config.pair).setup()


_SHARDS = ("rows/*", "labels/*", "errors.jsonl")
_TRACES = ("trace/*/rows/*", "trace/*/signals/*", "trace/errors.jsonl")
STAGES = {
    "data": Stage("data", lambda config, whole: make(config), "data", _SHARDS),
    "sequential": Stage("sequential", _sequential, "data", _SHARDS),
    "states": Stage("states", _states, "data", ("rows/*", "labels/*", "states/**/*")),
    "training": Stage("training", _train, "heads", ("val_metrics.json", "tables.md")),
    "export": Stage("export", _export, "heads", ("exported/**/*",)),
    "trace": Stage("trace", lambda config, whole: trace(config), "decode", _TRACES),
}


def experiment(folder: Path) -> Config:
    """The tiny experiment: its models are in `folder`, its results in `folder`/whole."""
    for name, size in (("target", 16), ("draft", 8)):
        save_toy(folder / name, hidden_size=size, seed=size)
    target, draft = (ModelSource(path=str(folder / name)) for name in ("target", "draft"))
    data = {"num_train": 12, "num_dev": 4, "num_test": 4, "max_prompt_tokens": 200, "max_new_tokens": 12}
    heads = {"depths": (0, 1), "reject_weights": (1.0, 6.0), "timings": ("fed", "drawn"), "batch_size": 4}
    config = Config(
        pair=PairConfig(target=target, draft=draft, num_threads=1),
        data=DataConfig(**data, rows_per_shard=2, batch_size=8),
        heads=HeadsConfig(**heads, checkpoint_every_n_steps=2),
        trainer={"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
        decode=DecodeConfig(num_dev=4, num_test=4, prompts_per_shard=1, max_new_tokens=12, max_draft_length=6),
    )
    return at(config, folder / "whole")


def at(config: Config, folder: Path) -> Config:
    """The experiment with all its results in another folder."""
    dirs = {name: replace(getattr(config, name), dir=str(folder / name)) for name in ("data", "heads", "decode")}
    return replace(config, **dirs)


class Child:
    """Work in a forked child, which ends as a command does: 0, or 2 and one line, or 1 and a traceback."""

    def __init__(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
        self.began, self.said = time.monotonic(), ""
        self._output, end = os.pipe()  # no file, whose size `limit_files` would limit
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._process = get_context("fork").Process(target=self._run, args=(end, before, work))
        self._process.start()
        os.close(end)

    def _run(self, end: int, *works: Callable[[], object]) -> None:
        for descriptor in (1, 2):
            os.dup2(end, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))  # not pytest's
        torch.set_num_threads(1)  # makes its pool anew after the fork, before two threads could do so at once
        try:
            for work in works:
                work()
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    def end_by(self, seconds: float, number: signal.Signals) -> None:
        """Send a signal after so many seconds, if the child still runs, and wait for its end."""
        self._process.join(max(0.0, self.began + seconds - time.monotonic()))
        if self._process.is_alive():
            os.kill(self._process.pid, number)
        self.wait()

    def wait(self) -> int:
        """The child's exit status, negative for a signal."""
        self._process.join(_END_S)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"the stage hangs: it has not ended after {_END_S} s")
        with os.fdopen(self._output, errors="replace") as output:
            self.said = output.read()
        return self._process.exitcode

    def has_one_clear_line(self) -> bool:
        """Whether it ended as a user's error does, with one line."""
        lines = [line for line in self.said.splitlines() if line.startswith("error: ")]
        return len(lines) == 1 and "Traceback" not in self.said


class _SlowFile(io.BufferedWriter):
    """A file that is half written for a while."""

    def write(self, content: Any) -> int:
        half = len(content) // 2
        super().write(content[:half])
        self.flush()
        time.sleep(0.004)
        return half + super().write(content[half:])


def write_slowly() -> None:
    """Files of this process are half written for most of its time, so that a signal meets them so."""
    opened = Path.open
    Path.open = lambda path, mode="r", *how, **more: (  # type: ignore[method-assign]
        _SlowFile(io.FileIO(path, "w")) if mode == "wb" else opened(path, mode, *how, **more)
    )


def limit_files(num_bytes: int) -> None:
    """No file of this process can become larger: each write beyond it fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


@dataclass(frozen=True)
class Bench:
    """The undisturbed run, and a folder for disturbed ones."""

    config: Config
    whole: Path
    folder: Path
    durations_s: dict[str, float]
    reference: dict[str, Digests]

    def start(self, stage: Stage, *, before: Callable[[], object] = lambda: None) -> Child:
        """Start the stage in a child process."""
        return Child(lambda: stage.work(at(self.config, self.folder), self.whole), before)

    def must_lose_nothing(self, stage: Stage) -> None:
        """Every file that a disturbed stage has reported as written is whole, and is the undisturbed run's."""
        folder = self.folder / stage.folder
        if stage.name == "training" and (folder / "last.ckpt").is_file():
            torch.load(folder / "last.ckpt", weights_only=True, map_location="cpu")
        for path in (folder / "exported").glob("[!.]*/config.json"):
            AcceptanceHead.from_pretrained(path.parent)
        for sidecar in () if stage.folder == "heads" else folder.rglob("[!.]*-*.json"):
            path = sidecar.with_suffix("")
            name = str(path.relative_to(folder))
            if name.startswith("stages") and not path.exists():
                continue  # an earlier stage's result that was being removed, its shard being whole
            verify_shard(path)
            assert name.startswith("stages") or digest(path) == self.reference[stage.name][name]

    def must_finish(self, stage: Stage) -> None:
        """The stage runs to its end, and its results are those of the undisturbed run."""
        child = self.start(stage)
        assert child.wait() == 0, child.said[-1000:]
        assert results(self.folder, stage) == self.reference[stage.name]


def results(folder: Path, stage: Stage) -> Digests:
    """sha256 of every file of a stage that depends on its config alone."""
    folder /= stage.folder
    paths = [path for pattern in stage.results for path in folder.glob(pattern) if path.is_file()]
    found = {str(path.relative_to(folder)): digest(path) for path in paths if path.name[0] != "."}
    return found | ({"weights": _digest_of_weights(folder / "last.ckpt")} if stage.name == "training" else {})


def digest(path: Path) -> str:
    """sha256 of a file; of metrics and of the list of heads without the name of their run, which is random."""
    content = path.read_bytes()
    if path.name in ("val_metrics.json", "heads.json"):
        content = json.dumps(json.loads(content) | {"run": None}).encode()
    return hashlib.sha256(content).hexdigest()


def _digest_of_weights(path: Path) -> str:
    state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    contents = [name.encode() + tensor.contiguous().numpy().tobytes() for name, tensor in sorted(state.items())]
    return hashlib.sha256(b"".join(contents)).hexdigest()


pytestmark = pytest.mark.slow
_GROWTH_KB = 2048
"""Memory that the allocator may keep; 1.5 kB for each of 1,500 rounds, or 10 kB for each of 200 rows, would be more."""
_GREW = re.compile(r"grew by (-?\d+) kB")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Every stage without a fault."""
    folder = tmp_path_factory.mktemp("faults")
    bench = Bench(experiment(folder), folder / "whole", folder / "disturbed", {}, {})
    for stage in STAGES.values():
        place = folder / "apart" if stage.name == "sequential" else bench.whole
        child = Child(lambda stage=stage, place=place: stage.work(at(bench.config, place), bench.whole))
        assert child.wait() == 0, child.said[-2000:]
        bench.durations_s[stage.name] = time.monotonic() - child.began
        bench.reference[stage.name] = results(place, stage)
        assert bench.reference[stage.name]
    assert bench.reference["sequential"].keys() == bench.reference["data"].keys()
    return bench


@pytest.fixture
def bench(undisturbed: Bench, tmp_path: Path) -> Bench:
    """The undisturbed run, and an empty folder for a disturbed one."""
    return replace(undisturbed, folder=tmp_path / "disturbed")


def kill(bench: Bench, stage: Stage, chance: random.Random, number: signal.Signals) -> None:
    for _ in range(3):
        bench.start(stage, before=write_slowly).end_by(chance.uniform(0, bench.durations_s[stage.name]), number)
        bench.must_lose_nothing(stage)


def must_be_done_or_say_why(bench: Bench, stage: Stage, child: Child, why: str = "") -> None:
    if child.wait():
        assert child.has_one_clear_line(), child.said[-1000:]
        assert re.search(why, child.said)
    else:
        assert results(bench.folder, stage) == bench.reference[stage.name], "it says that it is done"


def full_disk(bench: Bench, stage: Stage, chance: random.Random) -> None:
    sizes = [path.stat().st_size for path in (bench.whole / stage.folder).rglob("*") if path.is_file()]
    child = bench.start(stage, before=partial(limit_files, chance.randrange(16, max(sizes))))
    must_be_done_or_say_why(bench, stage, child, r"no space|File too large")
    bench.must_lose_nothing(stage)


def two_at_once(bench: Bench, stage: Stage, chance: random.Random) -> None:
    first = bench.start(stage, before=write_slowly)
    time.sleep(chance.uniform(0, bench.durations_s[stage.name] / 2))
    for child in (first, bench.start(stage, before=write_slowly)):
        assert child.wait() == 0 or child.has_one_clear_line(), child.said[-1000:]


FAULTS: dict[str, Callable[[Bench, object, random.Random], None]] = {
    "SIGKILL": partial(kill, number=signal.SIGKILL),
    "SIGTERM": partial(kill, number=signal.SIGTERM),
    "full disk": full_disk,
    "two at once": two_at_once,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disturbed_stage_loses_nothing_and_resumes_to_the_undisturbed_bytes(bench: Bench, fault: str, stage: str):
    FAULTS[fault](bench, STAGES[stage], random.Random(f"{fault} {stage}"))
    bench.must_finish(STAGES[stage])


def _resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def decode_rounds(config: Config) -> Iterator[None]:
    pair = load_pair(config.pair)
    of = {"vocab_size": pair.vocab_size}
    drafter = ModelDrafter(pair.draft, FixedLength(4), **of)
    decoder = SpeculativeDecoder(pair.target, drafter, sampling=Sampling(), max_draft_length=4, **of)
    num_rounds = 0
    for limit in (300, 1_800):
        while num_rounds < limit:
            num_rounds += len(decoder.generate([5, 6, 7], 200).rounds)
        yield


def make_shards(config: Config) -> Iterator[None]:
    for num in (40, 240):
        make(with_data(config, num_train=num, num_dev=0, num_test=0, dir=f"{config.data.dir}-{num}"))
        yield


@pytest.mark.parametrize("work", [decode_rounds, make_shards])
def test_memory_does_not_grow_with_the_work(bench: Bench, work: Callable[[Config], Iterator[None]]):
    def grow() -> None:
        steps = work(at(bench.config, bench.folder))
        next(steps)
        early_kb = _resident_kb()
        next(steps)
        print(f"grew by {_resident_kb() - early_kb} kB")

    child = Child(grow)
    assert child.wait() == 0, child.said[-1000:]
    assert int(_GREW.search(child.said)[1]) < _GROWTH_KB, child.said[-200:]
