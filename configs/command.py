"""Command lines: one parser for every command, from the dataclasses of `configs.schema`.

A command is a function whose first parameter is the whole `config: Config` (or that has none). Its keyword-only
parameters become flags of that command. A `ValueError` or `OSError` is a user's mistake: it ends here as one line on
stderr and exit code 2.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from inspect import signature
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from configs.hints import meant
from configs.limits import check_limits, refuse_null
from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, PairConfig
from configs.shipped import NAMES, experiment_file, with_shipped_models

set_parsing_settings(docstring_parse_attribute_docstrings=True)
Command = Callable[..., Any]
_LONGEST_LINE = 1000
SECTIONS = {"pair": PairConfig, "data": DataConfig, "heads": HeadsConfig, "decode": DecodeConfig}
"""Sections of the YAML besides `trainer`."""


def parser_for(command: Command, *, trainer: type | None = None) -> ArgumentParser:
    """The parser of a command: its flags, and for an experiment `--config FILE`, `--print_config` and every setting.
    The section `trainer` must fit the arguments of the class `trainer`; None, for commands that train nothing: any.
    """
    parser = ArgumentParser(description=(command.__doc__ or "").strip().split("\n")[0], exit_on_error=False)
    parser.add_function_arguments(command, skip={"config"})
    _let_flags_stand_alone(parser, command)
    if not takes_config(command):
        return parser
    parser.usage = "%(prog)s [--config FILE] [--section.key VALUE ...] [--print_config] [options]"
    text = f"YAML of the experiment, or the name of a shipped one: {', '.join(NAMES)}"
    parser.add_argument("--config", action=_Experiment, help=text)
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    if trainer is None:
        parser.add_argument("--trainer", type=dict[str, Any], default={}, help="pytorch_lightning.Trainer's arguments")
    else:
        parser.add_class_arguments(trainer, "trainer", instantiate=False)
        parser.set_defaults({"trainer.devices": 1})  # Lightning's own default, auto, takes every GPU of the machine
    return parser


def class_parser(section: type, name: str) -> ArgumentParser:
    """A parser with the fields of a dataclass as flags `--name.field`."""
    parser = ArgumentParser()
    parser.add_class_arguments(section, name)
    return parser


def _let_flags_stand_alone(parser: ArgumentParser, command: Command) -> None:
    """Accept `--json` for `--json true`, and `--for` for the parameter `for_`."""
    kinds = get_type_hints(command)
    options = parser._option_string_actions
    for action in parser._actions:
        if action.dest in kinds and action.dest.endswith("_"):
            action.option_strings = [f"--{action.dest.rstrip('_')}"]
            options[action.option_strings[0]] = options.pop(f"--{action.dest}")
        if kinds.get(action.dest) is bool:
            action.nargs = "?"
            action.const = True


def takes_config(command: Command) -> bool:
    """Whether a command reads an experiment: whether it has a `config` parameter."""
    return "config" in signature(command).parameters


def config_of(parser: ArgumentParser, parsed: Namespace) -> Config:
    """The experiment that `parser` read into `parsed`; ValueError for a setting beyond its limit."""
    for name, section in (*SECTIONS.items(), ("trainer", None)):
        refuse_null(section, parsed[name], name)
    built = parser.instantiate(parsed)
    trainer = built.trainer.as_dict() if isinstance(built.trainer, Namespace) else dict(built.trainer)
    sections = {name: built[name] for name in SECTIONS} | {"pair": with_shipped_models(built["pair"])}
    config = Config(trainer=trainer, **sections)
    check_limits(config)
    return config


class _Experiment(ActionConfigFile):
    """`--config`: a path, or the name of a shipped experiment."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        try:
            file = experiment_file(values)
            if Path(file).is_file():
                _refuse_lost(yaml.compose(Path(file).read_text(encoding="utf-8"), yaml.SafeLoader), Config)
            super().__call__(parser, cfg, file, option_string)
        except RecursionError as error:
            raise ArgumentError(None, f"{values}: it is nested too deeply, or has an alias of itself") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ArgumentError(None, f"{values}: {' '.join(str(error).split())}") from error
        except ValueError as error:
            raise ArgumentError(self, str(error)) from error
        except ArgumentError as error:  # no YAML, or none of our settings
            raise ArgumentError(None, f"{values}: {error}") from error


def _refuse_lost(node: yaml.Node | None, kind: object, name: str = "") -> None:
    """Raise ValueError for what would be lost: a key that a mapping of this type has twice, an empty one, and an
    unknown one without settings; and for a null character.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    kinds = _settings_of(kind)
    seen: set[str] = set()
    for key, value in node.value:
        dotted = f"{name}.{key.value}" if name else str(key.value)
        line = key.start_mark.line + 1
        if key.value == "":
            raise ValueError(f"{name or 'the experiment'} has an empty key in line {line}; remove it")
        if dotted in seen:
            raise ValueError(f"{dotted} occurs twice, the second time in line {line}; join the two")
        if kinds and key.value not in kinds and _is_empty(value):
            raise ValueError(f"{dotted} in line {line} is no setting; {meant(key.value, kinds)}")
        if isinstance(value, yaml.ScalarNode) and "\0" in value.value:
            raise ValueError(f"{dotted} is {value.value[:60]!r} in line {line}; remove the null character")
        seen.add(dotted)
        _refuse_lost(value, kinds.get(key.value), dotted)


def _is_empty(node: yaml.Node) -> bool:
    """Whether a node is a mapping without settings, which the parser ignores under any name."""
    return isinstance(node, yaml.MappingNode) and all(_is_empty(value) for _, value in node.value)


def _settings_of(kind: object) -> Mapping[str, object]:
    """The settings of a section and their types; empty for other types."""
    section = next((one for one in (kind, *get_args(kind)) if is_dataclass(one)), None)
    return {} if section is None else get_type_hints(section)


def _refuse_whole_texts(parsed: Namespace, argv: Sequence[str]) -> None:
    """Raise ValueError for a list or mapping with the whole text as an entry: jsonargparse puts it there instead of
    an entry of the wrong type.
    """
    for index, argument in enumerate(argv):
        name, _, text = argument.removeprefix("--").partition("=")
        text = text or "".join(argv[index + 1 : index + 2])
        value = parsed.get(name) if argument.startswith("--") and text.startswith(("[", "{")) else None
        entries = list(value.values()) if isinstance(value, dict) else value
        if isinstance(entries, list | tuple) and text in entries:
            raise ValueError(f"--{name} is {text}, of which an entry is no text; put it in quotes")


def run(
    commands: Mapping[str, Command],
    *,
    default: str | None = None,
    argv: list[str] | None = None,
    trainer: type | None = None,
) -> Any:
    """Call the command that `argv` names, or `default` when it names none; a user's error exits with code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv.pop(0) if argv and not argv[0].startswith("-") else default
    if name is None:
        fail(f"no command is named; it must be one of {', '.join(commands)}")
    if name not in commands:
        fail(f"{name!r} is not a command; {meant(name, commands)}")
    with ending_in_one_line():
        arguments, flags = arguments_of(commands[name], argv, trainer=trainer)
        return commands[name](*arguments, **flags)


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End the process with a line and an exit code for a user's error, Ctrl-C, or a closed pipe. Characters that the
    terminal's encoding lacks are printed as ?.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        yield
    except BrokenPipeError:  # `| head` closed the pipe; discard what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (ValueError, OSError) as error:
        fail(one_line(error))
    except KeyboardInterrupt:
        print("interrupted; files written so far are complete. Run the same command again to continue", file=sys.stderr)
        raise SystemExit(130) from None


def fail(problem: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def refuse_wrong(command: Command, argv: Iterable[str]) -> None:
    """Refuse a wrong setting before Lightning is imported, which takes seconds, except those of `trainer`."""
    if {"--print_config", "--help.all"} & set(argv):
        return
    arguments_of(command, _flags_in(argv, lambda section: not section.startswith("trainer")))


def experiment_in(file: str, *, trainer: type | None = None) -> Config:
    """The experiment of a YAML file, or of the name of a shipped one; ValueError for one that cannot be read."""

    def command(config: Config) -> None:
        """Any command that takes an experiment."""

    [config], _ = arguments_of(command, ["--config", experiment_file(file)], trainer=trainer)
    return replace(config, arguments=("--config", file))


def arguments_of(
    command: Command, argv: Iterable[str], *, trainer: type | None = None
) -> tuple[list[Config], dict[str, Any]]:
    """What `argv` gives a command: the experiment if it takes one, and its flags; ValueError with a hint if it cannot
    be parsed.
    """
    parser = parser_for(command, trainer=trainer)
    kinds = get_type_hints(command)
    has_config = takes_config(command)
    argv = appending(["--help" if argument == "--help.all" else argument for argument in argv], command)
    try:
        parsed = parser.parse_args(argv)
    except ArgumentError as error:
        hint = "run with --help.all to list every option"
        if has_config and "--config" not in argv:
            hint = "pass --config FILE; `acceptance-heads init` writes one, and --config tiny is a shipped one"
        problem = one_line(error)
        if "Empty nested key" in problem and (found := _EMPTY_KEY.search(" ".join(argv))):
            problem = f"{found[1]} has an empty key; remove it"
        for name in (name for name in signature(command).parameters if name.endswith("_")):  # --for, not for_
            problem = re.sub(rf"\b{name}\b", f"--{name.rstrip('_')}", problem)
        raise ValueError(f"{problem} ({_meant(' '.join(str(error).split()), parser) or hint})") from error
    _refuse_whole_texts(parsed, argv)
    sections = {"config", *(f.name for f in fields(Config))} if has_config else set()
    flags = {
        key: kinds[key](**vars(value)) if isinstance(value, Namespace) else value  # a record among the flags
        for key, value in vars(parsed).items()
        if key.split(".")[0] not in sections
    }
    if not has_config:
        return [], flags
    # without the flags of the command and of training
    settings = _flags_in(argv, lambda section: section == "config" or section in SECTIONS)
    return [replace(config_of(parser, parsed), arguments=settings)], flags


def appending(argv: Sequence[str], command: Command) -> list[str]:
    """`--policy a --policy b` as the parser takes it, for flags that may be repeated; a whole list stays as it is."""
    names = [name for name, kind in get_type_hints(command).items() if kind == Sequence[str]]
    arguments = list(argv)
    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if not equals:
            value = "".join(argv[index + 1 : index + 2])
        if flag.removeprefix("--") in names and not value.startswith("["):
            arguments[index] = argument.replace(flag, f"{flag}+", 1)
    return arguments


def _flags_in(argv: Iterable[str], is_kept: Callable[[str], bool]) -> tuple[str, ...]:
    """The flags of the sections to be kept, with their values: `--section.x=VALUE` and `--section.x VALUE`."""
    flags: list[str] = []
    section = ""
    for argument in argv:
        if argument.startswith("--"):
            section = argument[2:].partition("=")[0].partition(".")[0]
        if is_kept(section):
            flags.append(argument)
    return tuple(flags)


_EMPTY_KEY = re.compile(r"(--[\w.]+)(?:(?! --).)*?[{,] *(?:\? )?(?:\"\"|'') *:")
"""A mapping on the command line with a key that is empty."""
_UNKNOWN = r"nrecognized arguments: --([\w.]+)|Group '([\w.]+)' does not accept option '(\w+)'"


def _meant(problem: str, parser: ArgumentParser) -> str | None:
    """A hint at the options whose last word is similar to that of an unknown one, of its section if there are any:
    num_train gives data.num_train and heads.num_train.
    """
    if (match := re.search(_UNKNOWN, problem)) is None:
        return None
    flag, group, key = match.groups()
    section, _, word = (flag or f"{group}.{key}").rpartition(".")
    known = {option[2:]: option.rpartition(".")[2].lstrip("-") for option in parser._option_string_actions}
    near = get_close_matches(word, dict.fromkeys(known.values()), n=1, cutoff=0.8)
    alike = [option for option, last in known.items() if last in near]
    alike = [option for option in alike if option.startswith(f"{section}.")] or alike
    if flag:
        alike = [f"--{option}" for option in alike]
    return f"did you mean {' or '.join(alike)}?" if alike else None


_WRONG_TYPE = r"(?:Parser key \"([\w.]+)\": )?Expected a (?:typing\.Literal\[(.*?)\]|<class '(\w+)'>)\. Got value: (.*)"
_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}


def one_line(error: Exception) -> str:
    """The message in one line: for an error of the operating system with the file and the remedy; for one of the
    parser without its reasons for a value and, if it is long, without its middle.
    """
    if isinstance(error, OSError) and error.strerror is not None:
        remedy = "check the path, its permissions and the free disk space, then run the same command again"
        return f"{error.filename or 'a file'}: {error.strerror}; {remedy}"
    text = " ".join(str(error).split())
    if missing := re.search(r"class_path '(?:[\w.]*\.)?(\w+)': Requirement '([\w-]+)", text):
        return f"{missing[1]} needs {missing[2]}, which is not installed; run pip install {missing[2]}"
    text = re.sub(r"Does not validate against any of the Union.*value: (?!Namespace)", "no possible value is ", text)
    if match := re.search(_WRONG_TYPE, text):
        name, choices, kind, value = match.groups()
        right = f"one of {choices.replace(chr(39), '')}" if choices else _KINDS.get(kind, f"of type {kind}")
        text = f"{name or 'a value'} is {value}, but it must be {_KINDS.get(name, right)}"
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"
