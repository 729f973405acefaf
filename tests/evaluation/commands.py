"""Commands run in this process: what they print, how they refuse, and the config that their flags make."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from configs import front
from configs.command import config_of, parser_for, run
from configs.schema import Config

COMMANDS = {name: command for name, (command, _) in front.COMMANDS.items()}
ROOT = Path(__file__).parents[2]


def spelt(settings: dict[str, object]) -> list[str]:
    """{"decode.seed": 1} as flags."""
    return [f"--{name}={value}" for name, value in settings.items()]


def config_with(flags: Iterable[str], name: str = "trace") -> Config:
    parser = parser_for(COMMANDS[name])
    return config_of(parser, parser.parse_args(list(flags)))


def called(*argv: str) -> None:
    run(COMMANDS, argv=list(argv))


def printed(capsys, *argv: str) -> tuple[list[str], Any]:
    """The lines for people, and the JSON, which stdout has alone."""
    capsys.readouterr()
    called(*argv, "--json=true")
    shown = capsys.readouterr()
    return shown.err.splitlines(), json.loads(shown.out)


def refusal(capsys, *argv: str) -> str:
    """The line in which a command refuses."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        called(*argv)
    error = capsys.readouterr().err
    problem = error.splitlines()[-1]
    assert (stopped.value.code, problem[:7], "Traceback" in error) == (2, "error: ", False)
    return problem
