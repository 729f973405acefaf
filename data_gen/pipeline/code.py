"""Which code runs: a worker on another machine must run what the driver runs, or shards of one run would come from two
programs.
"""

import hashlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("store", "configs", "data_gen", "lm")
"""Packages of the project that a worker imports."""
_DEPENDENCIES = ("torch", "transformers", "tokenizers")
"""Packages of others that decide the rows."""


def folders() -> list[Path]:
    """The folders of the project's packages on this machine."""
    specs = [find_spec(name) for name in PACKAGES]
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]


def running() -> dict[str, str]:
    """What decides the rows -> which version of it this process imports; the project's own by the sha256 of its
    source.
    """
    digest = hashlib.sha256()
    for folder in folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return {"acceptance-heads": f"sha256 {digest.hexdigest()[:12]}"} | {name: version(name) for name in _DEPENDENCIES}


def refuse_other_code(driver: dict[str, str], *, machine: str) -> None:
    """Raise ValueError unless this process, a worker's, runs what the driver runs.

    Args:
        driver: the versions that the driver's `running` returned.
        machine: the name of this machine, for the message.
    """
    for name, version_here in running().items():
        if driver.get(name) != version_here:
            raise ValueError(
                f"the worker on {machine} imports {name} {version_here} (acceptance-heads from {folders()[0].parent}), "
                f"and the driver runs {name} {driver.get(name)}; install on every machine what the driver runs"
            )
