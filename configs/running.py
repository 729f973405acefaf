"""Run a function of another package as a command, imported when the command runs."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import PurePath
from typing import ParamSpec

from configs.schema import Config

Experiment = Config | str | PurePath
"""An experiment, or the path of its YAML, or the name of a shipped one."""
Flags = ParamSpec("Flags")


def runs(name: str) -> Callable[[Callable[Flags, object]], Callable[Flags, object]]:
    """Make a command of a declaration, which has flags and help but no body: it imports the function `name`, written
    module:function, and calls it. So help and errors in flags appear before anything heavy is imported.
    """
    module, function = name.split(":")

    def decorate(declaration: Callable[Flags, object]) -> Callable[Flags, object]:
        @wraps(declaration)
        def command(*args: Flags.args, **flags: Flags.kwargs) -> object:
            with announced_imports():
                implementation = getattr(import_module(module), function)
            return implementation(*args, **flags)

        return command

    return decorate


@contextmanager
def announced_imports(*, in_logs: bool = False) -> Iterator[None]:
    """Run slow imports with a note on a terminal, and perhaps in logs, and without garbage collection, a seventh of
    their time.
    """
    is_terminal = sys.stderr.isatty()
    if is_terminal or in_logs:
        print("loading torch", end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if is_terminal:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)
