"""Names of a package that are imported when they are first asked for (PEP 562), written once, where a type checker
reads them:

    if TYPE_CHECKING:
        from decode.policies.head import HeadPolicy
    else:
        __getattr__ = lazily(__name__, __file__)
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> Callable[[str], Any]:
    """`__getattr__` of a package: every name that its first `if` imports, from the module that defines it.

    Args:
        package: the `__name__` of the package.
        file: its `__file__`, which is read: the names stand there once, for people, type checkers and this.
    """
    block = next(node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(str(homes[name])), name)
        setattr(sys.modules[package], name, value)  # the next time it is found without a call
        return value

    return attribute
