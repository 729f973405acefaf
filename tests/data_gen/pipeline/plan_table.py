"""Writes the table of docs/large-models.md from `plan --sample 0` of every shipped experiment; a test compares them.

Sizes of hub models come from `test_memory.PUBLISHED`, and prompts are not looked up.
"""

import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

PAGE = Path(__file__, "../../../../docs/large-models.md").resolve()
HEAD = (
    "| experiment | GPUs | rows | response tokens | disk, GB | fullest stage | GB on each GPU |",
    "|---|---|---:|---:|---:|---|---:|",
)
STAGE = re.compile(r"^  (\S.*?) +([\d,.]+) GB of .* = ", re.MULTILINE)


def row(name: str) -> str:
    """The line of one shipped experiment."""
    from data_gen.pipeline.plan import plan  # after the hub is switched off, which its library reads once
    from tests.data_gen.pipeline.test_memory import shipped

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as said:
        config = shipped(name, Path(folder))
        totals = plan(config, sample=0)
    num_gpus = int(config.pair.gpus.partition("x")[0]) if config.pair.gpus else 1
    needs = [
        (float(size.replace(",", "")) / (1 if stage.endswith("on each GPU") else num_gpus), stage.partition(",")[0])
        for stage, size in STAGE.findall(said.getvalue())
    ]
    size_gb, stage = max(needs, default=(None, ""))
    memory = "not estimated" if size_gb is None else f"{size_gb:,.1f}"
    cells = (name, config.pair.gpus or "none", f"{totals['rows']:,}", f"{totals['response_tokens']:,}")
    return "| " + " | ".join((*cells, f"{totals['disk_bytes'] / 1e9:,.1f}", stage, memory)) + " |"


def table() -> str:
    """The whole table as Markdown."""
    from configs.shipped import NAMES

    return "\n".join((*HEAD, *map(row, NAMES))) + "\n"


def page_with(lines: str) -> str:
    """The page with these lines in the place of its table."""
    page = PAGE.read_text()
    start = page.index(HEAD[0])
    end = page.index("\n\n", start) + 1
    return page[:start] + lines + page[end:]


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    content = page_with(table())
    if sys.argv[1:] == ["--check"]:
        sys.exit(content != PAGE.read_text())
    PAGE.write_text(content)
