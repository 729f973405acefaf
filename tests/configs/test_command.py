"""The command line: what a YAML and its overrides parse to, and how a user's mistake ends."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from lightning_utilities.core.imports import RequirementCache
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import CSVLogger

from configs import Config
from configs.command import config_of, parser_for, run
from evaluation.flag_types import RaceRules

ROOT = Path(__file__, "../../..").resolve()
YAMLS = sorted((ROOT / "configs").glob("*.yaml"))


def show(config: Config, *, flag: int = 1) -> tuple[Config, int]:
    """Return what was parsed."""
    return config, flag


def refuse(config: Config) -> None:
    """Fail as a user's mistake does."""
    raise ValueError("temperature is -1; it must be at least 0")


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "pair:\n  target: {path: big}\n  draft: {path: small}\n  sampling: {temperature: 0.5}\ntrainer: {max_epochs: "
        "2}\n"
    )
    return str(path)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_yaml_parses_for_every_command_and_for_the_trainer(path: Path):
    for trainer in (None, Trainer):
        parser = parser_for(show, trainer=trainer)
        assert config_of(parser, parser.parse_args(["--config", str(path)])).pair.target.path


def test_dotted_overrides_and_own_flags_win_over_the_file(yaml: str):
    argv = ["show", "--config", yaml, "--pair.sampling.temperature", "0.7", "--trainer.max_epochs", "5", "--flag", "3"]
    config, flag = run({"show": show}, argv=argv)
    assert (config.pair.sampling.temperature, config.trainer["max_epochs"], flag) == (0.7, 5, 3)


@pytest.mark.parametrize(
    ("given", "is_set"), [([], False), (["--json"], True), (["--json", "--n=1"], True), (["--json", "false"], False)]
)
def test_a_switch_needs_no_value_and_takes_one(given: list[str], is_set: bool):
    def command(*, n: int = 0, json: bool = False) -> bool:
        """Do nothing."""
        return json

    assert run({"command": command}, default="command", argv=given) is is_set


@pytest.mark.parametrize("given", [["--for", "lama"], []])
def test_a_mistake_names_a_flag_as_it_is_written(given: list[str], capsys: pytest.CaptureFixture):
    def command(*, for_: Literal["vllm", "llama.cpp"]) -> None:
        """Do nothing."""

    with pytest.raises(SystemExit, match="2"):
        run({"command": command}, default="command", argv=given)
    said = capsys.readouterr().err
    assert "--for" in said
    assert "for_" not in said


def test_the_default_command_runs_without_a_name(yaml: str):
    config, flag = run({"show": show}, default="show", argv=["--config", yaml])
    assert (config.pair.draft.path, flag) == ("small", 1)


@pytest.mark.parametrize(
    "argument", [["--pair.tarqet.path", "x"], ["--heads.depths", "deep"], ["--pair.sampling.temperature", "warm"]]
)
def test_an_unknown_key_or_a_wrong_type_exits_with_2(yaml: str, argument: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        run({"show": show}, argv=["show", "--config", yaml, *argument])
    assert argument[0].split(".")[-1] in capsys.readouterr().err


def test_a_users_mistake_is_one_line_and_exit_code_2(yaml: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        run({"refuse": refuse}, argv=["refuse", "--config", yaml])
    assert capsys.readouterr().err == "error: temperature is -1; it must be at least 0\n"


class Refusing(CSVLogger):
    """A logger that cannot be made."""

    def __init__(self, port: int = 1) -> None:
        raise ValueError(f"nobody answers at port {port}")


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        (["--trainer.logger", "WandbLogger"], "WandbLogger needs wandb, which is not installed; run pip install wandb"),
        (["--trainer.logger", "tests.configs.test_command.Refusing"], "Refusing: nobody answers at port 1"),
        (["--trainer.logger", "Wandlogger"], "Wandlogger is none of Logger, Iterable[Logger], bool, null"),
        (["--decode.stop_share", "much"], "much is none of float, Literal['size', 'measured']"),
    ],
)
def test_a_value_of_no_possible_type_is_told_in_a_few_words(
    yaml: str, argument: list[str], complaint: str, capsys: pytest.CaptureFixture, monkeypatch
):
    # as on a machine without wandb, whatever is installed here
    monkeypatch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=99"))
    with pytest.raises(SystemExit, match="2"):
        run({"show": show}, argv=["show", "--config", yaml, *argument], trainer=Trainer)
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error) < 140


def test_a_file_that_the_system_refuses_is_one_line_with_its_name(
    yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    with pytest.raises(SystemExit, match="2"):
        run({"read": lambda config: tmp_path.read_text()}, argv=["read", "--config", yaml])
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: Is a directory; check the path")


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        run({"show": show}, argv=["shw"])
    assert "show" in capsys.readouterr().err


def test_print_config_round_trips(yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="0"):
        run({"show": show}, argv=["show", "--config", yaml, "--print_config"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    parser = parser_for(show)
    assert config_of(parser, parser.parse_args(["--config", str(printed)])) == config_of(
        parser, parser.parse_args(["--config", yaml])
    )


def test_a_command_without_a_config_parameter_takes_its_own_flags_only():
    def double(*, number: int = 1) -> int:
        """Double it."""
        return 2 * number

    assert run({"double": double}, argv=["double", "--number", "4"]) == 8


def test_a_flag_may_be_called_as_a_section_where_there_is_no_config():
    def publish(*, heads: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Nothing.

        Args:
            heads: directories.
        """
        return heads

    assert run({"publish": publish}, argv=["publish", "--heads", "[a,b]"]) == ("a", "b")


def test_without_a_config_the_message_says_where_to_start(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        run({"show": show}, argv=["show"])
    assert "`acceptance-heads init` writes one" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_leaves_no_traceback():
    """As in `python -m data_gen stats … | head -1`."""
    talk = (
        "from configs.command import run; run({'talk': lambda: [print('x' * 1000) for _ in range(1000)]}, "
        "argv=['talk'])"
    )
    process = subprocess.Popen([sys.executable, "-c", talk], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_record_among_a_commands_flags_arrives_as_itself(tmp_path):
    def raced(config: Config, *, race: RaceRules = RaceRules()) -> RaceRules:  # noqa: B008  # frozen
        """Race.

        Args:
            config: names the pair.
            race: rules.
        """
        return race

    argv = ["--config", "tiny", "--race.datasets", "[alpaca, gsm8k]", "--race.cycles", "2"]
    assert run({"raced": raced}, default="raced", argv=argv) == RaceRules(datasets=("alpaca", "gsm8k"), cycles=2)
