"""Lazy imports of a package's names (PEP 562). A package lists them once, under `if TYPE_CHECKING`, where a type
checker reads them; its `else` branch is `__getattr__ = lazy_exports(__name__, __file__)`.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> Callable[[str], Any]:
    """A package's `__getattr__` for the names that its first `if` statement imports; `file` is its `__file__`."""
    block = next(node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in imports for alias in node.names}

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return attribute
