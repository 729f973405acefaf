"""A command's signature without the command: flags are parsed and checked before what a command needs is imported.

A command's parser is made from its name, its parameters with their types and defaults, and its docstring. All of them
stand in its source file, which is read, not run; only the modules that define the types of its flags are imported, and
these are light. The command itself is imported when it is called.
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
    """The command at a place: its signature and docstring now, itself when it is called.

    Args:
        target: the place of its function, as module:function.
    """
    module, name = target.split(":")
    function = function_of(target)
    used = {node.id for node in ast.walk(function.args) if isinstance(node, ast.Name)}
    imports = list(_imports_of(tree_of(module), used))
    function.body, function.returns, function.decorator_list = function.body[:1], None, []
    names: dict[str, Any] = {"__name__": __name__}  # the parser imports the module that a function says it is of
    # the project's own text, as an import would run it
    exec(compile(ast.fix_missing_locations(ast.Module([*imports, function], [])), module, "exec"), names)

    @wraps(names[name])
    def command(*args: Any, **flags: Any) -> Any:
        with announced_imports():
            function = getattr(import_module(module), name)
        return function(*args, **flags)

    return command


def _imports_of(tree: ast.Module, names: set[str]) -> Iterator[ast.ImportFrom]:
    """The imports of a file that bind these names, and nothing else of it."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (
            wanted := [alias for alias in node.names if (alias.asname or alias.name) in names]
        ):
            yield ast.ImportFrom(module=node.module, names=wanted, level=0)


@contextmanager
def announced_imports() -> Iterator[None]:
    """Imports of seconds: without a look for garbage among what was just imported and all stays, a seventh of the time,
    and with a word on a terminal, which goes as they end.
    """
    has_word = sys.stderr.isatty()
    if has_word:
        print("loading torch and its like …", end="\r", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if has_word:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)
