"""Cases of which `make test` runs a few: where many prove one statement of the same code; and commands' functions."""

import inspect
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import pytest

from configs.front import COMMANDS


def first_fast(cases: Iterable[Any], num: int = 2) -> list[Any]:
    """The cases, all but the first `num` of them slow."""
    rest = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (index >= num)) for index, case in enumerate(rest)]


def implementation_of(name: str) -> Callable[..., Any]:
    """The function that a command imports and calls; of `all`, which does not, itself."""
    command, _ = COMMANDS[name]
    source = re.match(r'@runs\("([\w.]+):(\w+)"\)', inspect.getsource(command))
    return getattr(import_module(source[1]), source[2]) if source else command
