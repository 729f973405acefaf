"""What docs/extending.md adds, for tests that hold the project to that page."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAGE = Path(__file__, "../../../docs/extending.md").resolve()


@contextmanager
def added_to(table: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Run the page's code that adds to `table`, called `name`: its names; what it added is taken out again."""
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if f"\n{name}[" in block
    ]
    before, names = dict(table), {"__name__": "extending"}
    try:
        exec(code, names)  # the project's own page
        yield names
    finally:
        table.clear()
        table.update(before)
