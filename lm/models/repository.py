"""From which revision a model is read, and whether its repository's code may run."""

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from configs.schema import ModelSource


def repository_of(source: ModelSource) -> dict[str, Any]:
    """Arguments of every `from_pretrained`: the revision, and whether the repository's code may run."""
    is_pinned = Path(source.path).is_dir() or re.fullmatch("[0-9a-f]{40}", source.revision or "")
    if source.trust_remote_code and not is_pinned:
        _warn_of_moving_code(source.path, source.revision or "main")
    return {"revision": source.revision or "main", "trust_remote_code": source.trust_remote_code}


@cache
def _warn_of_moving_code(path: str, revision: str) -> None:
    print(
        f"warning: {path}: trust_remote_code runs whatever code revision {revision} holds today; set this model's "
        "revision to the commit (40 hexadecimal digits) whose code you have read",
        file=sys.stderr,
    )
