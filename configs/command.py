"""Command lines: one parser for every command, from the dataclasses of `configs.schema`.

A command is a function whose first parameter is the whole `config: Config` (or that has none); its other, keyword-only
parameters become flags of that command alone. What a user can cause is a `ValueError` or an `OSError` anywhere below:
it ends here as one line on stderr and exit code 2.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, NoReturn, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from configs.limits import check_limits, refuse_null
from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, PairConfig
from configs.screens import written_as
from configs.shipped import NAMES, experiment_file, with_shipped_models

Command = Callable[..., Any]
_LONGEST_LINE = 1000
_SECTIONS = {"pair": PairConfig, "data": DataConfig, "heads": HeadsConfig, "decode": DecodeConfig}


def parser_for(command: Command, *, trainer: type | None = None) -> ArgumentParser:
    """The parser of one command: `--config FILE`, dotted overrides of every section, `--print_config`, and the
    command's own flags.

    Args:
        command: its docstring becomes the help, its keyword-only parameters become flags.
        trainer: the class whose arguments the `trainer` section must fit; None takes the section unchecked (commands
            that train nothing).
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        description=(command.__doc__ or "").strip().split("\n")[0],
        usage="%(prog)s [--config FILE] [--section.key VALUE ...] [--print_config] [options]"
        if takes_config(command)
        else None,
        exit_on_error=False,
    )
    parser.add_function_arguments(command, skip={"config"})
    _let_flags_stand_alone(parser, command)
    if not takes_config(command):
        return parser
    parser.add_argument(
        "--config", action=_Experiment, help=f"YAML of the experiment, or the name of a shipped one: {', '.join(NAMES)}"
    )
    for name, section in _SECTIONS.items():
        parser.add_class_arguments(section, name)
    if trainer is None:
        parser.add_argument(
            "--trainer", type=dict[str, Any], default={}, help="pytorch_lightning.Trainer's own arguments"
        )
    else:
        parser.add_class_arguments(trainer, "trainer", instantiate=False)
        parser.set_defaults({"trainer.devices": 1})  # Lightning's own default, auto, takes every GPU of the machine
    return parser


def _let_flags_stand_alone(parser: ArgumentParser, command: Command) -> None:
    """Take `--json` for `--json true`, as everybody writes it; and `--for` for the parameter `for_`, whose own name is
    Python's.
    """
    kinds = get_type_hints(command)
    for action in parser._actions:
        if action.dest in kinds and action.dest.endswith("_"):
            written = f"--{written_as(action.dest)}"
            action.option_strings = [written]
            parser._option_string_actions[written] = parser._option_string_actions.pop(f"--{action.dest}")
        if kinds.get(action.dest) is bool:
            action.nargs, action.const = "?", True


def takes_config(command: Command) -> bool:
    """False for a command that needs no experiment (closed forms, the recipe of the embedded trio): it has no `config`
    parameter.
    """
    return "config" in signature(command).parameters


def config_of(parser: ArgumentParser, parsed: Namespace) -> Config:
    """The experiment that `parser` read into `parsed`; ValueError for a setting beyond its limit."""
    for name, section in (*_SECTIONS.items(), ("trainer", None)):
        refuse_null(section, parsed[name], name)
    built = parser.instantiate(parsed)
    trainer = built.trainer.as_dict() if isinstance(built.trainer, Namespace) else dict(built.trainer)
    sections = {name: built[name] for name in _SECTIONS}
    config = Config(trainer=trainer, **sections | {"pair": with_shipped_models(sections["pair"])})
    check_limits(config)
    return config


class _Experiment(ActionConfigFile):
    """`--config`: a path, or the name of a shipped experiment."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        try:
            super().__call__(parser, cfg, experiment_file(values), option_string)
        except ValueError as error:
            raise ArgumentError(self, str(error)) from error
        except ArgumentError as error:  # no YAML, or none of our settings
            raise ArgumentError(None, f"{values}: {error}") from error


def run(
    commands: Mapping[str, Command],
    *,
    default: str | None = None,
    argv: list[str] | None = None,
    trainer: type | None = None,
) -> Any:
    """Call the command that `argv` names, or `default` when it names none; exits with 2 and one line on a user's
    error.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in commands:
        name, argv = argv[0], argv[1:]
    elif default is None or (argv and not argv[0].startswith("-")):
        _list_commands(commands, argv)
    else:
        name = default
    parser = parser_for(commands[name], trainer=trainer)
    parsed = _parsed(parser, argv, commands[name])
    kinds = get_type_hints(commands[name])
    sections = {"config", *(f.name for f in fields(Config))} if takes_config(commands[name]) else set()
    flags = {
        key: kinds[key](**vars(value)) if isinstance(value, Namespace) else value  # a record among the flags
        for key, value in vars(parsed).items()
        if key.split(".")[0] not in sections
    }
    try:
        configs = [config_of(parser, parsed)] if takes_config(commands[name]) else []
        return commands[name](*configs, **flags)
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (ValueError, OSError) as error:
        _fail(_in_one_line(error))
    except KeyboardInterrupt:
        print("stopped; what was written is whole, the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None


def refuse_wrong(command: Command, argv: list[str]) -> None:
    """End the process if a setting is wrong; those of `trainer` are let pass, as their class takes seconds to import.

    Args:
        command: a function with a `config`.
        argv: flags of the command.
    """
    if {"--print_config", "--help.all"} & set(argv):
        return
    parser = parser_for(command)
    parsed = _parsed(parser, list(_without_trainer(argv)), command)
    try:
        config_of(parser, parsed)
    except (ValueError, OSError) as error:
        _fail(_in_one_line(error))


def _without_trainer(argv: Iterable[str]) -> Iterator[str]:
    """Flags but those of `trainer`, written --trainer.x=VALUE or --trainer.x VALUE."""
    is_left_out = False
    for argument in argv:
        if argument.startswith("--"):
            is_left_out = argument.startswith("--trainer")
        if not is_left_out:
            yield argument


def _parsed(parser: ArgumentParser, argv: Iterable[str], command: Command) -> Namespace:
    """What `parser` reads; ends the process, with a hint, where it cannot."""
    argv = ["--help" if argument == "--help.all" else argument for argument in argv]
    try:
        return parser.parse_args(argv)
    except ArgumentError as error:
        hint = (
            "--help.all lists every option"
            if "--config" in argv or not takes_config(command)
            else "pass --config FILE: `acceptance-heads init` writes one, and tiny is one of the embedded models"
        )
        problem = _as_written(one_line(error), command)
        _fail(f"{problem} ({_meant(' '.join(str(error).split()), parser) or hint})")
    except ValueError as error:  # of a null character where the parser looks for a file
        _fail(f"the settings cannot be read: {error}; look for a null character in them")


def _as_written(problem: str, command: Command) -> str:
    """A complaint of the parser that names a command's own parameters as they are written: --for, not for_."""
    for name in signature(command).parameters:
        problem = re.sub(rf'Parser key "{name}"|(?<=required: ){name}\b', f"--{written_as(name)}", problem)
    return problem


_UNKNOWN = r"nrecognized arguments: --([\w.]+)|Group '(?P<group>[\w.]+)' does not accept option '(?P<key>\w+)'"


def _meant(problem: str, parser: ArgumentParser) -> str | None:
    """What the user probably meant, where the parser does not know an option: those of similar names."""
    if found := re.search(_UNKNOWN, problem):
        is_flag = found["group"] is None
        near = similar(found[1] if is_flag else f"{found['group']}.{found['key']}", parser._option_string_actions)
        dashes = "--" if is_flag else ""
        return f"did you mean {' or '.join(dashes + name for name in near)}?" if near else None
    return None


def _plain(problem: str) -> str:
    """A complaint of the parser about a value of several possible types in a few words: the package that its class
    lacks, what the class itself said, or the value and the types.
    """
    if lacking := re.search(r"class_path '(?:[\w.]*\.)?(\w+)': Requirement '([\w-]+)", problem):
        return f"{lacking[1]} needs {lacking[2]}, which is not installed: pip install {lacking[2]}"
    union = re.search(r"Does not validate against any of the Union subtypes Subtypes: (.*?) Errors: ", problem)
    if union is None:
        return problem
    if said := re.search(
        r"Errors: - (?!Expected )(.*?) - Expected .*Namespace\(class_path='(?:[\w.]*\.)?(\w+)'", problem
    ):
        return f"{problem[: union.start()]}{said[2]} says: {said[1]}"
    types = re.sub(r"<class '([^']*)'>", r"\1", union[1][1:-1]).replace("NoneType", "null")
    types = re.sub(r"[a-z_]+\.(?:\w+\.)*", "", types)
    return f"{problem[: union.start()]}{problem.rpartition('Given value: ')[2]} is none of {types}"


def similar(name: str, options: Iterable[str]) -> list[str]:
    """Names of the options that a mistyped one may stand for: those of its last word deeper in its section, else the
    one most alike, else all whose last word is alike.

    `pair.dtype` gives pair.target.dtype and pair.draft.dtype; `data.num_trian` gives data.num_train; `num_train`,
    without its section, data.num_train and heads.num_train.

    Args:
        name: the option that was typed, without dashes.
        options: all options of a parser, with dashes.
    """
    known = [option.removeprefix("--") for option in options if option.startswith("--")]
    section, _, word = name.rpartition(".")
    if deeper := [option for option in known if option.startswith(f"{section}.") and option.endswith(f".{word}")]:
        return deeper
    if near := get_close_matches(name, known, n=1, cutoff=0.8):
        return near
    words = {option.rpartition(".")[2] for option in known}
    last = get_close_matches(name.rpartition(".")[2], words, n=1, cutoff=0.8)
    return [option for option in known if option.rpartition(".")[2] in last]


def one_line(error: ArgumentError) -> str:
    """What the parser says, in one line, its middle left out where it repeats a long value."""
    text = _plain(" ".join(str(error).split()))
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"


def _in_one_line(error: ValueError | OSError) -> str:
    """The problem in one line; of an error that the system raised, also the file and the remedy."""
    text = _plain(" ".join(str(error).split()))
    if not isinstance(error, OSError) or error.strerror is None:
        return text
    return (
        f"{error.filename or 'a file'}: {error.strerror}; check the path, its permissions and the disk, then run the "
        "same command again"
    )


def _fail(problem: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def _list_commands(commands: Mapping[str, Command], argv: list[str]) -> NoReturn:
    """Print the commands; exit 0 after --help, else 2."""
    is_help = bool(argv) and argv[0] in {"-h", "--help"}
    lines = [f"  {name:<10} {(command.__doc__ or '').strip().splitlines()[0]}" for name, command in commands.items()]
    problem = (
        [] if is_help else [f"error: {'no command' if not argv else repr(argv[0]) + ' is not a command'}; one of:"]
    )
    print(
        "\n".join([*problem, *lines, "  --help after a command lists its options"]),
        file=sys.stdout if is_help else sys.stderr,
    )
    raise SystemExit(0 if is_help else 2)
