"""Lazy imports of a package's names (PEP 562). A package imports them under `if TYPE_CHECKING`, where a type
checker reads them; its `else` branch is `__getattr__ = lazy_exports(__name__, {name: module})`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` for these names, each of which is imported from its module when it is used."""

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return attribute
