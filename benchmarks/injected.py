"""The faults of `benchmarks.faults`: each disturbs a stage once or a few times and says what came of it."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

from benchmarks.stages_under_fault import STAGES, Child, Digests, Stage, at, differing, lost, results
from configs.remote import ServerConfig
from configs.schema import Config
from data_gen.pipeline.command import make
from tests.toys.answering import Answering, close_half_way, completion

SAME = "same bytes"
_MIN_KILLS, _MAX_KILLS = 2, 6


@dataclass(frozen=True)
class Bench:
    """The undisturbed run, and a place for disturbed ones."""

    config: Config
    whole: Path
    durations_s: dict[str, float]
    reference: dict[str, Digests]

    @property
    def place(self) -> Path:
        """The folder that a disturbed run writes to."""
        return self.whole.parent / "disturbed"

    def start(self, stage: Stage, config: Config | None = None) -> Child:
        """Start the stage in a child process."""
        settled = config or at(self.config, self.place)
        return Child(lambda: stage.work(settled, self.whole), self.whole.parent / "log")

    def finish(self, stage: Stage) -> str:
        """Run the stage to its end; returns whether its result is that of the undisturbed run."""
        child = self.start(stage)
        status = child.wait()
        if status:
            return f"FAILED: the run after the fault ended with {status}: {child.said[-400:]}"
        wrong = differing(self.reference[stage.name], results(self.place, stage))
        return SAME if not wrong else f"FAILED: {len(wrong)} files differ, first {wrong[0]}"


def kill(bench: Bench, stage: Stage, chance: random.Random, *, number: signal.Signals) -> tuple[str, int]:
    """Two to six signals at random moments, one after the other; then the run to its end. The outcome, and how many
    struck.
    """
    struck = 0
    for _ in range(chance.randint(_MIN_KILLS, _MAX_KILLS)):
        child = bench.start(stage)
        struck += child.signal_after(chance.uniform(0, bench.durations_s[stage.name]), number)
        child.wait()
        if problem := lost(bench.place, stage, bench.reference[stage.name]):
            return f"FAILED: {problem}", struck
    return bench.finish(stage), struck


@contextmanager
def small_disk(place: Path, size_kb: int) -> Iterator[Callable[[str], None]]:
    """A file system of its own in `place`, and how to mount it anew with other options; ValueError where this is not
    permitted.
    """
    place.mkdir(parents=True, exist_ok=True)

    def mount(*options: str) -> None:
        try:
            subprocess.run(["mount", *options, str(place)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError("mounting a small disk is not permitted here") from error

    mount("-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs")
    try:
        yield lambda options: mount("-o", f"remount,{options}")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def full_disk(bench: Bench, stage: Stage, chance: random.Random) -> tuple[str, int]:
    """A disk of a random size that the stage does not fit on; then a larger one."""
    written = sum(path.stat().st_size for path in (bench.whole / stage.folder).rglob("*") if path.is_file())
    with small_disk(bench.place, chance.randint(8, max(16, written // 1024))) as remount:
        child = bench.start(stage)
        if child.wait() and (child.refusal is None or not _names_disk(child.refusal)):
            return f"FAILED: no clear line: {child.said[-300:]}", 1
        if problem := lost(bench.place, stage, bench.reference[stage.name]):
            return f"FAILED: {problem}", 1
        remount("size=256m")
        return bench.finish(stage), 1


def read_only(bench: Bench, stage: Stage, chance: random.Random) -> tuple[str, int]:
    """A run that was killed goes on in a folder that cannot be written to; then in one that can."""
    with small_disk(bench.place, 256 * 1024) as remount:
        child = bench.start(stage)
        child.signal_after(chance.uniform(0, bench.durations_s[stage.name]), signal.SIGKILL)
        child.wait()
        remount("ro")
        child = bench.start(stage)
        if child.wait() and child.refusal is None:
            return f"FAILED: no clear line: {child.said[-300:]}", 1
        remount("rw")
        return bench.finish(stage), 1


def _names_disk(line: str) -> bool:
    return any(word in line for word in ("no space", "No space", "disk", "room"))


def two_at_once(bench: Bench, stage: Stage, chance: random.Random) -> tuple[str, int]:
    """Two runs into one folder: one of them may be refused in a line, nothing else may happen."""
    first = bench.start(stage)
    time.sleep(chance.uniform(0, bench.durations_s[stage.name] / 2))
    second = Child(lambda: stage.work(at(bench.config, bench.place), bench.whole), bench.whole.parent / "log2")
    for child in (first, second):
        if child.wait() and child.refusal is None:
            return f"FAILED: no clear line: {child.said[-300:]}", 1
    return bench.finish(stage), 1


DAMAGE: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "truncated": lambda path, other, chance: os.truncate(path, chance.randrange(path.stat().st_size)),
    "bit-flipped": lambda path, other, chance: _flip(path, chance),
    "swapped": lambda path, other, chance: _swap(path, other),
    "swapped with sidecars": lambda path, other, chance: (_swap(path, other), _swap(_sidecar(path), _sidecar(other))),
    "sidecar truncated": lambda path, other, chance: os.truncate(
        _sidecar(path), chance.randrange(_sidecar(path).stat().st_size)
    ),
    "sidecar null": lambda path, other, chance: _sidecar(path).write_text(
        chance.choice(["null", "{}", '{"bytes": "x", "sha256": 1}'])
    ),
}


def damage(bench: Bench, kind: str, chance: random.Random) -> tuple[str, int]:
    """A shard of finished data is damaged: it is made anew, or refused by name before it is used, and made anew once it
    is deleted.
    """
    stage = STAGES["data"]
    shutil.copytree(bench.whole / "data", bench.place / "data")
    folder = chance.choice(["rows", "features/fed", "features/drawn"])
    path, other = chance.sample(sorted((bench.place / "data" / folder).glob("train-*[!n]")), 2)
    DAMAGE[kind](path, other, chance)
    config = at(bench.config, bench.place)
    again, use = bench.start(stage), None
    if again.wait() and again.refusal is None:
        return f"FAILED: no clear line: {again.said[-300:]}", 1
    if not differing(bench.reference["data"], results(bench.place, stage)):
        return "made anew, same bytes", 1
    use = Child(lambda: STAGES["training"].work(config, bench.place), bench.whole.parent / "log")
    use.wait()
    refusals = [child.refusal for child in (again, use) if child.refusal]
    if folder != "rows" and not refusals:
        return f"FAILED: {kind} {path.name} in {folder} was used without a word: {use.said[-200:]}", 1
    for damaged in (path, other):
        damaged.unlink(missing_ok=True)
        _sidecar(damaged).unlink(missing_ok=True)
    outcome = bench.finish(stage)
    return (f"refused by name; deleted, {SAME}" if outcome == SAME else outcome), 1


def bad_server(bench: Bench, kind: str, chance: random.Random) -> tuple[str, int]:
    """A server that does wrong to a third of the prompts the first time, until a run (with --retry_errors) ends
    well.
    """
    stage, wrong = STAGES["data"], _WRONGS[kind]
    is_wrong = {}

    def answer(body: dict, attempt: int) -> tuple[int, object]:
        prompt = str(body["prompt"])
        if wrong is not None and attempt == 1 and is_wrong.setdefault(prompt, chance.random() < 1 / 3):
            return wrong
        return completion(prompt[-20:-12].replace("\n", " ").strip("<>") or "ok")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.bodies, server.answer = [], answer  # type: ignore[attr-defined]
    serving = os.fork()
    if serving == 0:
        server.serve_forever()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    server.server_close()
    try:
        settings = ServerConfig(url=url, max_retries=0, timeout_s=1, concurrency=4)
        config = at(bench.config, bench.place)
        config = replace(config, data=replace(config.data, source="server", server=settings))
        for num_runs in range(1, 60):
            child = Child(partial(make, config, retry_errors=num_runs > 1), bench.whole.parent / "log")
            status = child.wait()
            if status == 0 and '"outcome": "error"' not in (bench.place / "data" / "errors.jsonl").read_text():
                break
            if status and child.refusal is None:
                return f"FAILED: no clear line: {child.said[-300:]}", 1
        else:
            return "FAILED: no end after 60 runs", 1
    finally:
        os.kill(serving, signal.SIGKILL)
        os.waitpid(serving, 0)
    wrongs = differing(bench.reference["served"], results(bench.place, stage)) if "served" in bench.reference else []
    return (SAME if not wrongs else f"FAILED: {len(wrongs)} files differ, first {wrongs[0]}"), 1


def _hang(handler: Answering) -> None:
    time.sleep(5)


_REPLY = completion("hi")[1]
_WRONGS: dict[str, tuple[int, object] | None] = {
    "well": None,
    "hangs": (200, _hang),
    "closes half-way": (200, close_half_way),
    "answers HTML": (200, "<html>sign in</html>"),
    "is overloaded": (503, {"error": {"message": "busy"}}),
    "lies in its ids": completion("hi", token_ids=[5, 10**6]),
    "lies in its text": completion("hi", token_ids=[70, 71]),
    "gives two choices": (200, _REPLY | {"choices": 2 * _REPLY["choices"]}),
}
SERVERS = tuple(name for name, wrong in _WRONGS.items() if wrong is not None)


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _swap(path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)
