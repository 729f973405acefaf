"""docs/large-models.md says of the shipped experiments what `plan` says today."""

import os
import subprocess
import sys

import pytest

from tests.data_gen.pipeline import plan_table

ROOT = plan_table.PAGE.parents[1]


@pytest.mark.slow
def test_the_table_of_the_page_is_what_plan_says():
    """In a process of its own, since the hub's library reads once whether it is offline."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data_gen.pipeline.plan_table", "--check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"write it anew: python -m tests.data_gen.pipeline.plan_table {done.stderr[-1000:]}"
