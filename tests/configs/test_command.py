"""The command line: what a YAML and its overrides parse to, where a name is found, and how a user's mistake ends."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from lightning_utilities.core.imports import RequirementCache
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import CSVLogger

from configs import Config
from configs.command import config_of, parser_for, run
from configs.shipped import NAMES
from evaluation.flag_types import RaceRules

ROOT = Path(__file__, "../../..").resolve()


def show(config: Config, *, flag: int = 1) -> tuple[Config, int]:
    """Return what was parsed."""
    return config, flag


def refuse(config: Config) -> None:
    """Fail as a user's mistake does."""
    raise ValueError("temperature is -1; it must be at least 0")


def read(config: Config) -> None:
    """Read a directory."""
    Path(config.data.dir).read_text()


def switch(*, n: int = 0, json: bool = False) -> bool:
    """Return the switch."""
    return json


def engine(*, for_: Literal["vllm", "llama.cpp"]) -> str:
    """Return the engine."""
    return for_


def publish(*, heads: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the heads; a flag may have a section's name where there is no config."""
    return heads


def raced(config: Config, *, race: RaceRules = RaceRules()) -> RaceRules:  # noqa: B008  # frozen
    """Return a record among the flags."""
    return race


class Refusing(CSVLogger):
    """A logger that cannot be made."""

    def __init__(self, port: int = 1) -> None:
        raise ValueError(f"nobody answers at port {port}")


COMMANDS = {command.__name__: command for command in (show, refuse, read, switch, engine, publish, raced)}


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    path = tmp_path / "experiment.yaml"
    models = "pair:\n  target: {path: big}\n  draft: {path: small}\n  sampling: {temperature: 0.5}\n"
    path.write_text(f"{models}data: {{dir: '{tmp_path}'}}\ntrainer: {{max_epochs: 2}}\n")
    return str(path)


def shown(*argv: str) -> Config:
    return run(COMMANDS, argv=["show", *argv])[0]


def test_dotted_overrides_and_flags_win_over_the_file_and_the_default_command_runs_without_a_name(yaml: str):
    argv = ["--config", yaml, "--pair.sampling.temperature", "0.7", "--trainer.max_epochs", "5", "--flag", "3"]
    for config, flag in (run(COMMANDS, argv=["show", *argv]), run(COMMANDS, default="show", argv=argv)):
        assert (config.pair.sampling.temperature, config.trainer["max_epochs"], flag) == (0.7, 5, 3)


def test_every_yaml_of_the_checkout_has_a_name_that_parses_from_any_directory(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert set(NAMES) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    parser = parser_for(show, trainer=Trainer)
    for name in NAMES:
        assert shown("--config", name).data.dir == f"data/{name}"
        assert config_of(parser, parser.parse_args(["--config", name])).pair.target.path
    for given in ("tiny.yaml", "configs/tiny.yaml"):
        assert shown("--config", given).data.dir == "data/tiny"


def test_a_local_file_or_directory_of_a_shipped_name_wins(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("tiny", "configs/tiny.yaml"):
        Path(given).parent.mkdir(exist_ok=True)
        Path(given).write_text("pair:\n  target: {path: mine}\n  draft: {path: my-draft}\n")
        assert shown("--config", given).pair.target.path == "mine"
    trio = ["--pair.target.path", "checkpoints/tiny/target", "--pair.draft.path", "hub/draft"]
    parsed = shown(*trio).pair
    assert (parsed.target.path, parsed.draft.path) == (str(ROOT / "checkpoints/tiny/target"), "hub/draft")
    shutil.copytree(ROOT / "checkpoints/tiny/micro", tmp_path / "checkpoints/tiny/target")
    assert shown(*trio).pair.target.path == "checkpoints/tiny/target"


@pytest.mark.parametrize(
    ("argv", "result"),
    [
        (["switch"], False),
        (["switch", "--json"], True),
        (["switch", "--json", "--n=1"], True),
        (["switch", "--json", "false"], False),
        (["engine", "--for", "vllm"], "vllm"),
        (["publish", "--heads", "[a,b]"], ("a", "b")),
        (
            ["raced", "--config", "tiny", "--race.datasets", "[alpaca, gsm8k]", "--race.run", "2"],
            RaceRules(datasets=("alpaca", "gsm8k"), run=2),
        ),
    ],
)
def test_flags_arrive_as_the_values_that_the_command_takes(argv: list[str], result: Any):
    assert run(COMMANDS, argv=argv) == result


SHOW = ["show", "--config", "{yaml}"]
LOGGER = [*SHOW, "--trainer.logger"]
MISTAKES = {
    "an unknown key": ([*SHOW, "--pair.tarqet.path", "x"], "tarqet"),
    "no list": ([*SHOW, "--heads.depths", "deep"], "depths"),
    "no number": ([*SHOW, "--pair.sampling.temperature", "warm"], "temperature"),
    "a ValueError": (["refuse", "--config", "{yaml}"], "error: temperature is -1; it must be at least 0"),
    "a folder as a file": (["read", "--config", "{yaml}"], "Is a directory; check the path"),
    "an unknown command": (["shw"], "show"),
    "an unknown engine": (["engine", "--for", "lama"], "--for"),
    "no engine": (["engine"], "--for"),
    "no config": (["show"], "`acceptance-heads init` writes one"),
    "a missing package": ([*LOGGER, "WandbLogger"], "WandbLogger needs wandb, which is not installed"),
    "an error of a class": ([*LOGGER, "tests.configs.test_command.Refusing"], "nobody answers at port 1"),
    "no value of a union": ([*SHOW, "--decode.stop_share", "much"], "no possible value is much"),
    "a name that is not shipped": (["show", "--config", "tinny"], "tinny", "tiny"),
    "a path that is not shipped": (["show", "--config", "other/tiny.yaml"], "other/tiny.yaml", "tiny"),
    "no name": (["show", "--config", "elsewhere"], "elsewhere", *NAMES),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_exits_with_2_and_names_what_is_wrong(what, yaml: str, capsys: pytest.CaptureFixture, monkeypatch):
    # as on a machine without wandb, whatever is installed
    monkeypatch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=99"))
    argv, *messages = MISTAKES[what]
    with pytest.raises(SystemExit, match="2"):
        run(COMMANDS, argv=[argument.format(yaml=yaml) for argument in argv], trainer=Trainer)
    error = capsys.readouterr().err
    assert all(message in error for message in messages)
    assert "for_" not in error
    assert what == "an unknown command" or error.count("\n") == 1


def test_print_config_round_trips(yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="0"):
        shown("--config", yaml, "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert shown("--config", yaml) == shown("--config", str(printed))


@pytest.mark.slow
def test_a_reader_that_stops_early_leaves_no_traceback():
    """As in `python -m data_gen stats … | head -1`."""
    talk = "from configs.command import run; run({'talk': lambda: print('x' * 1000000)}, argv=['talk'])"
    process = subprocess.Popen([sys.executable, "-c", talk], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
