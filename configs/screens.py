"""Commands, one-screen help and shell completion from the source files: importing what a command needs takes seconds.

A help screen shows the summary of the command's docstring, its keyword-only parameters with their texts under `Args:`,
and its main settings with the docstrings of `configs.schema`. `--help.all` prints every option, by jsonargparse.
Completion is a static script, made by shtab, so that pressing Tab runs no Python.
"""

import ast
import gc
import json
import re
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[1]
SECTIONS = {"pair": "PairConfig", "data": "DataConfig", "heads": "HeadsConfig", "decode": "DecodeConfig"}
_WIDTH, _INDENT = 100, 28
_OF_TRAINER = "an argument of pytorch_lightning.Trainer"
SHELLS = ("bash", "zsh")
TRAINING = ("train", "all")
"""Commands whose `trainer` section is checked against pytorch_lightning.Trainer."""


class Option(NamedTuple):
    """A flag as a help screen shows it."""

    flag: str
    default: str
    text: str
    kind: str = ""
    """Its type, as the schema has it."""


def screen_of(name: str, target: str, settings: Iterable[str]) -> str:
    """The help of one command: its function as module:function, and dotted names of the settings to show."""
    flags, main = options_of(target), [_setting(setting) for setting in settings]
    lines = [f"usage: {usage_of(name, target)}", "", textwrap.fill(summary_of(target), _WIDTH), ""]
    lines += ["options:", *map(_line, flags), ""] if flags else []
    lines += ["main settings of the YAML, each also a flag:", *map(_line, main), ""] if main else []
    if _takes_config(function_of(target)):
        lines += [_line(Option("--config FILE", "", "the experiment: a YAML file, or the name of a shipped one"))]
        lines += [_line(Option("--print_config", "", "print the experiment with every setting, and exit"))]
    return "\n".join([*lines, _line(Option("--help.all", "", "every option, with its type and default"))])


def usage_of(name: str, target: str) -> str:
    """The usage line of a command."""
    return f"acceptance-heads {name} {'--config FILE ' if _takes_config(function_of(target)) else ''}[options]"


def summary_of(target: str) -> str:
    """The first paragraph of a command's docstring, in one line."""
    text = ast.get_docstring(function_of(target)) or ""
    return " ".join(text.split("\n\n")[0].split())


def options_of(target: str) -> list[Option]:
    """The flags of a command that are not settings of the YAML."""
    function = function_of(target)
    texts = _described(ast.get_docstring(function) or "")
    positional, defaults = function.args.args, function.args.defaults
    pairs = [*zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)]
    pairs += zip(positional, [*[None] * (len(positional) - len(defaults)), *defaults], strict=True)
    return [
        Option(f"--{written_as(argument.arg)}", _shown(default), texts.get(argument.arg, ""), _kind(argument))
        for argument, default in pairs
        if argument.arg != "config"
    ]


def settings_of(section: str) -> list[Option]:
    """Every setting of a section of the YAML, as flags."""
    return list(_leaves(section, SECTIONS[section]))


def command_of(target: str) -> Callable[..., Any]:
    """A command, given as module:function, with its signature and docstring, which is imported when it is called.

    Wrong flags are then refused at once. Only the modules that define the types of its flags are imported.
    """
    module, name = target.split(":")
    function = function_of(target)
    used = {node.id for node in ast.walk(function.args) if isinstance(node, ast.Name)}
    imports = [
        ast.ImportFrom(module=node.module, names=aliases, level=0)
        for node in _tree_of(module).body
        if isinstance(node, ast.ImportFrom)
        and (aliases := [alias for alias in node.names if (alias.asname or alias.name) in used])
    ]
    function.body, function.returns, function.decorator_list = function.body[:1], None, []
    names: dict[str, Any] = {"__name__": __name__}  # the parser imports the module that a function names
    # the project's source, as an import would run it
    exec(compile(ast.fix_missing_locations(ast.Module([*imports, function], [])), module, "exec"), names)

    @wraps(names[name])
    def command(*args: Any, **flags: Any) -> Any:
        with announced_imports():
            function = getattr(import_module(module), name)
        return function(*args, **flags)

    return command


@contextmanager
def announced_imports() -> Iterator[None]:
    """Run slow imports with a note on the terminal, and without garbage collection, a seventh of their time."""
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


def completion_of(commands: Mapping[str, str], shell: str) -> str:
    """A script that completes commands, options, and the values of options with a fixed choice.

    Args:
        commands: name -> its function, as module:function.
        shell: one of `SHELLS`.
    """
    import shtab  # only completion needs it

    parser = ArgumentParser(prog="acceptance-heads")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--completion", choices=SHELLS, help="print a completion script")
    shared = ArgumentParser(add_help=False)
    experiment = shared.add_argument("--config", help="the experiment", metavar="FILE")
    experiment.complete = shtab.FILE  # type: ignore[attr-defined]
    shared.add_argument("--print_config", action="store_true", help="print the experiment with every setting")
    _complete(shared, [option for section in SECTIONS for option in settings_of(section)])
    subparsers = parser.add_subparsers()
    for name, target in commands.items():
        parents = [shared] if _takes_config(function_of(target)) else []
        command = subparsers.add_parser(name, help=_escaped(summary_of(target)), parents=parents)
        command.add_argument("--help.all", action="store_true", help="every option")
        _complete(command, [*options_of(target), *(_trainer_options() if name in TRAINING else [])])
    return shtab.complete(parser, shell)


def _trainer_options() -> list[Option]:
    """Arguments of pytorch_lightning.Trainer, from its source file: importing it takes seconds."""
    spec = find_spec("pytorch_lightning")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("trainer").joinpath("trainer.py").read_text(encoding="utf-8"))
    init = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    names = [argument.arg for argument in (*init.args.args, *init.args.kwonlyargs) if argument.arg != "self"]
    return [Option(f"--trainer.{name}", "", _OF_TRAINER) for name in names]


def _complete(parser: ArgumentParser, options: Iterable[Option]) -> None:
    """Add flags with their choices: those of a Literal (in brackets for a list of them), true and false for a bool."""
    for option in options:
        literals = re.findall(r"Literal\[(.*?)\]", option.kind)
        choices = [value for part in literals for value in ast.literal_eval(f"({part},)")]
        choices = [f"[{value}]" for value in choices] if option.kind.startswith("tuple[") else choices
        choices += ["true", "false"] if re.search(r"(?<!\[)\bbool\b", option.kind) else []
        parser.add_argument(option.flag, choices=choices or None, help=_escaped(option.text))


def _leaves(prefix: str, owner: str) -> Iterator[Option]:
    """Every setting below a section; --data.prompts, which may be a name, comes before --data.prompts.path."""
    classes = schema()
    for name, (node, text) in classes[owner].items():
        kind = ast.unparse(node.annotation)
        inner = next((word for word in re.findall(r"\w+", kind) if word in classes), None)
        if inner is None or kind.removesuffix(" | None") != inner:
            yield Option(f"--{prefix}.{name}", _shown(node.value), text, kind)
        if inner is not None:
            yield from _leaves(f"{prefix}.{name}", inner)


def _setting(dotted: str) -> Option:
    """A setting by its dotted name, such as data.num_train or trainer.max_epochs."""
    section = dotted.partition(".")[0]
    if section == "trainer":
        return Option(f"--{dotted}", "", _OF_TRAINER)
    return next(option for option in settings_of(section) if option.flag == f"--{dotted}")


@cache
def schema() -> dict[str, dict[str, tuple[ast.AnnAssign, str]]]:
    """Class of `configs.schema` -> field -> its node and docstring."""
    classes: dict[str, dict[str, tuple[ast.AnnAssign, str]]] = {}
    for node in _tree_of("configs.schema").body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = {
                item.target.id: (item, _docstring(after))
                for item, after in zip(node.body, [*node.body[1:], None], strict=True)
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    return classes


def _docstring(node: ast.stmt | None) -> str:
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return " ".join(value.split()) if isinstance(value, str) else ""


def _kind(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation) if argument.annotation else ""


def _escaped(text: str) -> str:
    """Text for argparse's help, where a percent sign is written twice."""
    return text.replace("%", "%%")


def _takes_config(function: ast.FunctionDef) -> bool:
    return any(argument.arg == "config" for argument in function.args.args)


def _tree_of(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split("."))
    return ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))


def function_of(target: str) -> ast.FunctionDef:
    """The syntax of a function, given as module:function."""
    module, name = target.split(":")
    return next(node for node in _tree_of(module).body if isinstance(node, ast.FunctionDef) and node.name == name)


def written_as(parameter: str) -> str:
    """A parameter's name as a flag: without the trailing underscore of a Python keyword, such as for_."""
    return parameter.rstrip("_")


def _described(docstring: str) -> dict[str, str]:
    """Parameter -> its text under `Args:`."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", section.group(1), re.MULTILINE) if section else []
    return {name: " ".join(text.split()) for name, text in entries}


def _shown(default: ast.expr | None) -> str:
    """A default in YAML; "" for null, an empty list and a section."""
    if default is None or isinstance(default, ast.Call):
        return ""
    value = ast.literal_eval(default)
    return "" if value is None or value == () else value if isinstance(value, str) else json.dumps(value)


def _line(option: Option) -> str:
    text = option.text + (f" [{option.default}]" if option.default else "")
    head = f"  {option.flag}"
    wrapped = textwrap.wrap(text, _WIDTH - _INDENT) or [""]
    first = f"{head:<{_INDENT}}{wrapped[0]}" if len(head) < _INDENT else f"{head}\n{'':<{_INDENT}}{wrapped[0]}"
    return "\n".join([first, *(f"{'':<{_INDENT}}{rest}" for rest in wrapped[1:])])
