"""A command's signature without importing the command, so that wrong flags are refused at once.

The signature and docstring are read from the source file. Only the modules that define the types of its flags are
imported, and these are light. The command itself is imported when it is called.
"""

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from configs.screens import function_of, tree_of


def command_of(target: str) -> Callable[..., Any]:
    """A command that has its signature and docstring now and is imported when it is called.

    Args:
        target: its function, as module:function.
    """
    module, name = target.split(":")
    function = function_of(target)
    used = {node.id for node in ast.walk(function.args) if isinstance(node, ast.Name)}
    imports = list(_imports_of(tree_of(module), used))
    function.body, function.returns, function.decorator_list = function.body[:1], None, []
    names: dict[str, Any] = {"__name__": __name__}  # the parser imports the module that a function names
    # the project's own source, as an import would run it
    exec(compile(ast.fix_missing_locations(ast.Module([*imports, function], [])), module, "exec"), names)

    @wraps(names[name])
    def command(*args: Any, **flags: Any) -> Any:
        with announced_imports():
            function = getattr(import_module(module), name)
        return function(*args, **flags)

    return command


def _imports_of(tree: ast.Module, names: set[str]) -> Iterator[ast.ImportFrom]:
    """The imports of a file that bind these names."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (
            wanted := [alias for alias in node.names if (alias.asname or alias.name) in names]
        ):
            yield ast.ImportFrom(module=node.module, names=wanted, level=0)


@contextmanager
def announced_imports() -> Iterator[None]:
    """Run slow imports with a note on the terminal, and without garbage collection, which takes a seventh of their
    time.
    """
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        print("loading torch …", end="\r", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if is_terminal:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)
