"""Faults at random moments of data, training, export and trace: nothing that was reported as written is lost, and the
resumed result is the undisturbed one byte for byte.
"""

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from configs.schema import Config
from data_gen.pipeline.command import make
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength
from lm import Sampling, load_pair
from tests.data_gen.faults import stages as faults
from tests.data_gen.faults.stages import STAGES, Bench, Child, Stage, at, experiment, results
from tests.data_gen.on_disk import with_data

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
        bench.start(stage, before=faults.write_slowly).end_by(chance.uniform(0, bench.durations_s[stage.name]), number)
        bench.must_lose_nothing(stage)


def must_be_done_or_say_why(bench: Bench, stage: Stage, child: Child, why: str = "") -> None:
    if child.wait():
        assert child.has_one_clear_line(), child.said[-1000:]
        assert re.search(why, child.said)
    else:
        assert results(bench.folder, stage) == bench.reference[stage.name], "it says that it is done"


def full_disk(bench: Bench, stage: Stage, chance: random.Random) -> None:
    sizes = [path.stat().st_size for path in (bench.whole / stage.folder).rglob("*") if path.is_file()]
    child = bench.start(stage, before=partial(faults.limit_files, chance.randrange(16, max(sizes))))
    must_be_done_or_say_why(bench, stage, child, r"no space|File too large")
    bench.must_lose_nothing(stage)


def read_only(bench: Bench, stage: Stage, chance: random.Random) -> None:
    bench.folder.mkdir()
    bench.start(stage).end_by(chance.uniform(0, bench.durations_s[stage.name]), signal.SIGKILL)
    folders = [bench.folder, *(path for path in bench.folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        must_be_done_or_say_why(bench, stage, bench.start(stage, before=faults.obey_permissions))
    finally:
        for path in folders:
            path.chmod(0o755)


def two_at_once(bench: Bench, stage: Stage, chance: random.Random) -> None:
    first = bench.start(stage, before=faults.write_slowly)
    time.sleep(chance.uniform(0, bench.durations_s[stage.name] / 2))
    for child in (first, bench.start(stage, before=faults.write_slowly)):
        assert child.wait() == 0 or child.has_one_clear_line(), child.said[-1000:]


FAULTS: dict[str, Callable[[Bench, object, random.Random], None]] = {
    "SIGKILL": partial(kill, number=signal.SIGKILL),
    "SIGTERM": partial(kill, number=signal.SIGTERM),
    "full disk": full_disk,
    "read-only folder": read_only,
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
