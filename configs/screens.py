"""One-screen help and shell completion, read from the source files without importing what a command needs.

A help screen shows the summary of the command's docstring, its keyword-only parameters with their texts under `Args:`,
and its main settings with the docstrings of `configs.schema`. `--help.all` prints every option, by jsonargparse.
Completion is a static script, made by shtab, so that pressing Tab runs no Python.
"""

import ast
import json
import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
SECTIONS = {"pair": "PairConfig", "data": "DataConfig", "heads": "HeadsConfig", "decode": "DecodeConfig"}
_SCHEMA = ("schema.py", "remote.py")
_WIDTH, _INDENT = 100, 28


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
    function = function_of(target)
    takes_config = _takes_config(function)
    flags = _flags(function)
    lines = [f"usage: {usage_of(name, target)}", ""]
    lines += [textwrap.fill(summary_of(target), _WIDTH), ""]
    lines += ["options:", *map(_line, flags), ""] if flags else []
    main = [_setting(setting) for setting in settings]
    lines += ["main settings of the YAML, each also a flag:", *map(_line, main), ""] if main else []
    config = [
        Option("--config FILE", "", "the experiment: a YAML file, or the name of a shipped one"),
        Option("--print_config", "", "print the experiment with every setting, and exit"),
    ]
    all_options = Option("--help.all", "", "every option, with its type and default")
    return "\n".join([*lines, *map(_line, [*(config if takes_config else []), all_options])])


def usage_of(name: str, target: str) -> str:
    """The usage line of a command."""
    return f"acceptance-heads {name} {'--config FILE ' if _takes_config(function_of(target)) else ''}[options]"


def summary_of(target: str) -> str:
    """The first paragraph of a command's docstring, in one line."""
    text = ast.get_docstring(function_of(target)) or ""
    return " ".join(text.split("\n\n")[0].split())


def options_of(target: str) -> list[Option]:
    """The flags of a command that are not settings of the YAML."""
    return _flags(function_of(target))


def settings_of(section: str) -> list[Option]:
    """Every setting of a section of the YAML, as flags."""
    return [
        Option(flag, _shown(node.value), text, ast.unparse(node.annotation))
        for flag, node, text in _leaves(section, SECTIONS[section], _schema())
    ]


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
    classes = _schema()
    for section, owner in SECTIONS.items():
        for flag, node, text in _leaves(section, owner, classes):
            _complete(shared, flag, node.annotation, text)
    subparsers = parser.add_subparsers()
    for name, target in commands.items():
        function = function_of(target)
        summary = summary_of(target)
        parents = [shared] if _takes_config(function) else []
        command = subparsers.add_parser(name, help=_escaped(summary), parents=parents)
        command.add_argument("--help.all", action="store_true", help="every option")
        arguments = {
            written_as(argument.arg): argument for argument in (*function.args.args, *function.args.kwonlyargs)
        }
        for option in _flags(function):
            _complete(command, option.flag, arguments[option.flag.removeprefix("--")].annotation, option.text)
        for option in _trainer_flags() if name in TRAINING else []:
            command.add_argument(option.flag, help=_escaped(option.text))
    return shtab.complete(parser, shell)


def _trainer_flags() -> list[Option]:
    """Arguments of pytorch_lightning.Trainer as flags, from its source file: importing it takes seconds."""
    spec = find_spec("pytorch_lightning")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("trainer").joinpath("trainer.py").read_text(encoding="utf-8"))
    init = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    names = [argument.arg for argument in (*init.args.args, *init.args.kwonlyargs) if argument.arg != "self"]
    return [Option(f"--trainer.{name}", "", "an argument of pytorch_lightning.Trainer") for name in names]


def _leaves(
    prefix: str, owner: str, classes: Mapping[str, Mapping[str, tuple[ast.AnnAssign, str]]]
) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """(flag, node, text) of every setting below a section; --data.prompts, which may be a name, comes before
    --data.prompts.path.
    """
    for name, (node, text) in classes[owner].items():
        annotation = ast.unparse(node.annotation)
        inner = next((word for word in re.findall(r"\w+", annotation) if word in classes), None)
        if inner is None or annotation.removesuffix(" | None") != inner:
            yield f"--{prefix}.{name}", node, text
        if inner is not None:
            yield from _leaves(f"{prefix}.{name}", inner, classes)


def _complete(parser: ArgumentParser, flag: str, annotation: ast.expr | None, text: str) -> None:
    """Add a flag with its choices: those of a Literal (in brackets for a list of them), true and false for a bool."""
    written = ast.unparse(annotation) if annotation else ""
    choices = [value for part in re.findall(r"Literal\[(.*?)\]", written) for value in ast.literal_eval(f"({part},)")]
    choices = [f"[{value}]" for value in choices] if written.startswith("tuple[") else choices
    choices += ["true", "false"] if re.search(r"(?<!\[)\bbool\b", written) else []
    parser.add_argument(flag, choices=choices or None, help=_escaped(text))


def _escaped(text: str) -> str:
    """Text for argparse's help, where a percent sign is written twice."""
    return text.replace("%", "%%")


def _takes_config(function: ast.FunctionDef) -> bool:
    return any(argument.arg == "config" for argument in function.args.args)


def tree_of(module: str) -> ast.Module:
    """The syntax of a module of the project."""
    path = _ROOT.joinpath(*module.split("."))
    return ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))


def function_of(target: str) -> ast.FunctionDef:
    """The syntax of a function, given as module:function."""
    module, name = target.split(":")
    return next(node for node in tree_of(module).body if isinstance(node, ast.FunctionDef) and node.name == name)


def _flags(function: ast.FunctionDef) -> list[Option]:
    texts = _described(ast.get_docstring(function) or "")
    pairs = list(zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True))
    positional = [argument for argument in function.args.args if argument.arg != "config"]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(function.args.defaults))
    pairs += list(zip(positional, [*defaults, *function.args.defaults], strict=True))
    return [
        Option(f"--{written_as(argument.arg)}", _shown(default), texts.get(argument.arg, ""))
        for argument, default in pairs
    ]


def written_as(parameter: str) -> str:
    """A parameter's name as a flag: without the trailing underscore of a Python keyword, such as for_."""
    return parameter.rstrip("_")


def _described(docstring: str) -> dict[str, str]:
    """Parameter -> its text under `Args:`."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", section.group(1), re.MULTILINE) if section else []
    return {name: " ".join(text.split()) for name, text in entries}


def _setting(dotted: str) -> Option:
    """A setting by its dotted name, such as data.num_train or pair.sampling.temperature."""
    if dotted.startswith("trainer."):
        return Option(f"--{dotted}", "", "an argument of pytorch_lightning.Trainer")
    section, *names = dotted.split(".")
    classes = _schema()
    owner, node, text = SECTIONS[section], None, ""
    for name in names:
        node, text = classes[owner][name]
        owner = next((word for word in re.findall(r"\w+", ast.unparse(node.annotation)) if word in classes), "")
    assert node is not None
    return Option(f"--{dotted}", _shown(node.value), text)


def _schema() -> dict[str, dict[str, tuple[ast.AnnAssign, str]]]:
    """Class -> field -> its node and docstring."""
    trees = [ast.parse(Path(__file__).with_name(name).read_text(encoding="utf-8")) for name in _SCHEMA]
    classes: dict[str, dict[str, tuple[ast.AnnAssign, str]]] = {}
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.ClassDef):
            fields = classes.setdefault(node.name, {})
            for item, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    fields[item.target.id] = item, _docstring(after)
    return classes


def _docstring(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return " ".join(node.value.value.split()) if is_text else ""  # type: ignore[union-attr]


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
