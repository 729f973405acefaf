"""Every test starts from the same random numbers, whatever ran before it; in CI none is skipped."""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a hub, and without a network each request is tried for a minute
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of commands: threads that spin are half the time of two at once
torch.set_num_threads(1)  # models here are toys: a second thread only costs them
gc.disable()  # until everything is imported: all of that stays


def pytest_collection_finish() -> None:
    """What is there now stays; collections of garbage, which looked at it anew, were half of a run of data_gen."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _unsynced():
    """Files of tests need not outlive a loss of power: no waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PNG files stay empty, except in tests marked `draws` and in session fixtures, which are set up before this one:
    drawing takes three quarters of a small training run.
    """
    draw = Figure.savefig

    def save(self: Figure, path: object, **settings: Any) -> None:
        path.write_bytes(b"") if isinstance(path, Path) else draw(self, path, **settings)

    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr(Figure, "savefig", save)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI is `true`, a skip fails, since what is skipped there is tested nowhere; only the presence of a GPU may
    decide on a test.
    """
    report = yield
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and os.environ.get("CI") == "true" and "GPU" not in str(report.longrepr):
        report.outcome, report.longrepr = "failed", f"in CI nothing may be skipped: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is printed at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-2000:]}", flush=True)
