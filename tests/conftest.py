"""Every test starts from the same random numbers, whatever ran before it; in CI none is skipped."""

import os
from collections.abc import Generator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


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
