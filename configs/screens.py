"""One-screen help from the parser of a command: the summary of its docstring, its flags and its main settings.
`--help.all` prints every option, by jsonargparse.
"""

import json
import re
import textwrap
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from inspect import formatannotation
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from configs.command import SECTIONS, class_parser, parser_for, takes_config

_WIDTH = 100
_INDENT = 28
_OF_TRAINER = "an argument of pytorch_lightning.Trainer"


class Option(NamedTuple):
    """A flag as a help screen shows it."""

    flag: str
    default: str
    text: str
    kind: str = ""
    """Its type, as the schema has it."""


def screen_of(name: str, command: Callable[..., Any], settings: Iterable[str]) -> str:
    """The help of a command; `settings` are dotted names of the settings to show."""
    known = {option.flag: option for option in _options(parser_for(command))}
    main = [known.get(f"--{setting}", Option(f"--{setting}", "", _OF_TRAINER)) for setting in settings]
    flags = options_of(command)
    lines = [f"usage: {usage_of(name, command)}", "", textwrap.fill(summary_of(command), _WIDTH), ""]
    lines += ["options:", *map(_line, flags), ""] if flags else []
    lines += ["main settings of the YAML, each also a flag:", *map(_line, main), ""] if main else []
    if takes_config(command):
        lines += [_line(Option("--config FILE", "", "the experiment: a YAML file, or the name of a shipped one"))]
        lines += [_line(Option("--print_config", "", "print the experiment with every setting, and exit"))]
    return "\n".join([*lines, _line(Option("--help.all", "", "every option, with its type and default"))])


def usage_of(name: str, command: Callable[..., Any]) -> str:
    """The usage line of a command."""
    return f"acceptance-heads {name} {'--config FILE ' if takes_config(command) else ''}[options]"


def summary_of(command: Callable[..., Any]) -> str:
    """The first paragraph of a command's docstring, in one line."""
    return " ".join((command.__doc__ or "").split("\n\n")[0].split())


def options_of(command: Callable[..., Any]) -> list[Option]:
    """The flags of a command that are not settings of the YAML."""
    settings = (*SECTIONS, "trainer") if takes_config(command) else ()
    return [option for option in _options(parser_for(command)) if option.flag[2:].split(".")[0] not in settings]


def section_options(section: str) -> list[Option]:
    """Every setting of a section of the YAML, as flags."""
    return list(_options(class_parser(SECTIONS[section], section)))


def _options(parser: ArgumentParser) -> Iterator[Option]:
    """Every flag that takes a value; --data.prompts, which may be a name, comes before --data.prompts.path."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint and not action.dest.endswith(".help"):
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            text = " ".join((action.help or "").split())
            names = ("None" if kind is NoneType else formatannotation(kind) for kind in kinds)
            kind = re.sub(r"\b(typing|configs\.schema)\.", "", " | ".join(names))
            yield Option(action.option_strings[0], _shown(action.default), text, kind)
            for inner in filter(is_dataclass, kinds):
                yield from _options(class_parser(inner, action.dest))  # type: ignore[arg-type]


def _shown(default: Any) -> str:
    """A default in YAML; "" for null and what is empty."""
    if default is None or default in ((), {}, SUPPRESS):
        return ""
    return default if isinstance(default, str) else json.dumps(default)


def _line(option: Option) -> str:
    head = f"  {option.flag}"
    text = f"{option.text} [{option.default}]" if option.default else option.text
    about = textwrap.indent(textwrap.fill(text, _WIDTH - _INDENT), "".ljust(_INDENT))
    return f"{head:<{_INDENT}}{about[_INDENT:]}" if len(head) < _INDENT else f"{head}\n{about}"
