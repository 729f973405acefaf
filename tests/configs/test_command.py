"""The command line: what a YAML and its overrides parse to, help at once and from the code, and how a mistake ends."""

import importlib
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from inspect import signature
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.imports import RequirementCache
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import CSVLogger

from configs import Config
from configs.command import SECTIONS, config_of, parser_for, run, takes_config
from configs.flag_types import RaceRules
from configs.front import COMMANDS as FRONT_COMMANDS
from configs.front import main
from configs.screens import options_of, screen_of, section_options
from configs.shipped import NAMES
from tests.cases import implementation_of

ROOT = Path(__file__, "../../..").resolve()


def show(config: Config, *, flag: int = 1) -> tuple[Config, int]:
    return config, flag


def refuse(config: Config) -> None:
    raise ValueError("temperature is -1; it must be at least 0")


def read(config: Config) -> None:
    Path(config.data.dir).read_text()


def switch(*, n: int = 0, json: bool = False) -> bool:
    return json


def engine(*, for_: str) -> str:
    return for_


def publish(*, heads: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the heads; a flag may have a section's name where there is no config."""
    return heads


def raced(config: Config, *, race: RaceRules = RaceRules()) -> RaceRules:  # noqa: B008  # frozen
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["refuse", "--config", "tiny"], "error: temperature is -1; it must be at least 0\n"),
        (["read", "--config", "tiny", "--data.dir", "/"], "error: /: Is a directory; check the path"),
        (["shw"], "error: 'shw' is not a command; did you mean show?"),
    ],
)
def test_an_error_of_a_command_exits_with_2_and_one_line(argv, message, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        run(COMMANDS, argv=argv)
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("data: {num_dev: 5}\ndata: {num_test: 5}\n", "data occurs twice, the second time in line 2"),
        (
            "data:\n  num_dev: 5\n  server: {url: a}\n  num_dev: 6\n",
            "data.num_dev occurs twice, the second time in line 4",
        ),
    ],
)
def test_a_section_or_setting_that_occurs_twice_is_refused(tmp_path, capsys, text, complaint):
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["stats", "--config", str(tmp_path / "e.yaml")])
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text", "complaint"),
    [
        ([], "pear: {target: {}}\n", "pear in line 1 is no setting; did you mean pair?"),
        ([], "data:\n  server: {urls: {}}\n", "data.server.urls in line 2 is no setting; did you mean url?"),
        ([], "data: {'': 1}\n", "data has an empty key in line 1"),
        ([], 'pair: "a\\0b"\n', "pair is 'a\\x00b' in line 1; remove the null character"),
        ([], "a: &x [*x]\n", "e.yaml: it is nested too deeply, or has an alias of itself"),
        (["--data.prompts", "[2024, b]"], "{}", "--data.prompts is [2024, b], of which an entry is no text"),
    ],
)
def test_what_the_parser_would_lose_is_refused_by_name(tmp_path, capsys, argv, text, complaint):
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["stats", "--config", "tiny", "--config", str(tmp_path / "e.yaml"), *argv])
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_output_in_an_encoding_that_lacks_a_character_is_no_error(monkeypatch):
    output = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    run({"say": lambda: print("next: … done")}, argv=["say"])
    output.flush()
    assert output.buffer.getvalue() == b"next: ? done\n"


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


SCRIPT = Path(sys.executable).with_name("acceptance-heads")
FRONT = "from configs.front import main, COMMANDS\n"
HEAVY = {"torch", "transformers", "pytorch_lightning", "datasets", "numpy", "scipy", "sympy", "pandas", "pyarrow"}
HEAVY |= {"matplotlib", "accelerate", "huggingface_hub", "tokenizers", "safetensors", "rich", "jinja2", "openai", "ray"}


def answer(*argv: str, capsys: pytest.CaptureFixture) -> str:
    """What stdout has of a command."""
    with suppress(SystemExit):
        main(list(argv))
    return capsys.readouterr().out


def lines_and_heavy(script: str, *modules: str) -> tuple[list[str], list[str]]:
    """Lines that a Python script prints, and which of `modules` it imports."""
    script = f"import sys\n{script}\nprint()\nprint(*{set(modules)} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, heavy = done.stdout.splitlines()
    return lines[:-1] + done.stderr.splitlines(), heavy.split()


def test_the_overview_names_every_command_and_what_it_does_in_the_order_of_use(capsys):
    lines = answer("--help", capsys=capsys).splitlines()
    names = [match[1] for line in lines if (match := re.match(r"  (\S+) {2,}(\S+ ){2}", line))]
    assert [name for name in names if name in FRONT_COMMANDS] == list(FRONT_COMMANDS)
    assert max(map(len, lines)) <= 110
    order = ["init", "plan", "data", "train", "export", "generate", "evaluate", "tune", "flags", "bench", "trace"]
    assert [name for name in FRONT_COMMANDS if name in order] == order


@pytest.mark.parametrize("name", FRONT_COMMANDS)
def test_help_is_one_screen_of_what_the_command_takes(name, capsys):
    lines = answer(name, "--help", capsys=capsys).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    known = parser_for(FRONT_COMMANDS[name][0])._option_string_actions
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert flags[-1] == "--help.all"
    assert [flag for flag in flags[:-1] if flag not in known and not flag.startswith("--trainer.")] == []


@pytest.mark.parametrize("name", FRONT_COMMANDS)
def test_a_command_has_the_flags_of_the_function_that_it_runs_and_passes_them_on(name, monkeypatch):
    command, _ = FRONT_COMMANDS[name]
    function = implementation_of(name)
    flags = {flag: parameter for flag, parameter in signature(command).parameters.items() if flag != "config"}
    given = {"config", "evaluation"}  # by the front end, with no flag
    assert flags == {flag: parameter for flag, parameter in signature(function).parameters.items() if flag not in given}
    assert takes_config(command) == takes_config(function)
    if name != "all":
        called = []
        module = importlib.import_module(function.__module__)
        monkeypatch.setattr(module, function.__name__, lambda *config, **given: called.append((config, given)))
        given = {flag: object() for flag in flags}
        config = ["config"] if takes_config(command) else []
        command(*config, **given)
        assert called == [(tuple(config), given)]


def test_help_imports_nothing_heavy_and_settings_are_checked_before_anything_heavy_is_imported():
    shown = [["--help"], ["evaluate", "--help"], ["--version"]]
    wrong = [[name, "--nosuch", "1"] for name in FRONT_COMMANDS] + [
        ["data", "--config", "tiny", "--data.num_dev", "-5"]
    ]
    wrong += [["train", "--config", "tiny", "--trainer.max_epochs", "2", "--heads.dropout", "[0.0, 7]"]]
    tried = "    try: main(argv)\n    except SystemExit as stop: assert stop.code == 2"
    by_room = {"data": "run_module('data_gen'", "export": "run_module('heads'", "train": "run_path('train.py'"}
    rooms = "".join(
        f"sys.argv = ['x', {'' if name == 'train' else repr(name) + ', '}'--help']\nrunpy.{run}, run_name='__main__')\n"
        for name, run in by_room.items()
    )
    script = f"{FRONT}import runpy\nfor argv in {shown}: main(argv)\n{rooms}for argv in {wrong}:\n{tried}"
    lines, heavy = lines_and_heavy(script, *HEAVY)
    assert heavy == []
    for start in ("acceptance-heads 0.", *(f"usage: acceptance-heads {name} " for name in by_room)):
        assert any(line.startswith(start) for line in lines), start
    *unknown, data, train = (line for line in lines if line.startswith("error: "))
    assert len(unknown) == len(FRONT_COMMANDS)
    assert data.startswith("error: data.num_dev is -5; it must be a number")
    assert train.startswith("error: heads.dropout is 7")


def test_help_all_has_every_option_and_every_setting_and_every_flag_has_a_text(capsys):
    text = answer("tune", "--help.all", capsys=capsys)
    assert "--pair.target.path" in text
    assert "--decode.draws_per_prompt" in text
    screen = screen_of("tune", FRONT_COMMANDS["tune"][0], ("decode.num_dev", "pair.sampling.temperature"))
    assert "Number of prompts for choosing each policy's setting. [50]" in screen
    assert "0 is greedy. [1.0]" in screen
    options = [option for command, _ in FRONT_COMMANDS.values() for option in options_of(command)]
    options += [option for section in SECTIONS for option in section_options(section)]
    assert [option.flag for option in options if len(option.text.split()) < 2] == []


def test_it_runs_beside_a_users_own_modules_of_our_names(tmp_path):
    for name in ("train.py", "heads/__init__.py", "configs/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the user has this')\n")
    argv = [SCRIPT, "plan", "--config", "tiny", "--sample", "0"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "disk" in done.stdout


PLAN = ["plan", "--config", "tiny"]
TRAIN = ["train", "--config", "tiny", "--trainer.logger"]
INIT = ["init", "--target", "{tmp}", "--draft", "{tmp}", "--prompts", "{tmp}/prompts.txt"]
OF_MODELS = "did you mean --pair.target.{0} or --pair.draft.{0}?)"
MISTAKES = [
    (["evalute", "--config", "tiny"], "error: 'evalute' is not a command; did you mean evaluate?"),
    ([*PLAN, "--data.num_trian", "5"], "(did you mean --data.num_train?)"),
    ([*PLAN, "--pair.dtype", "float32"], OF_MODELS.format("dtype")),
    ([*PLAN, "--pair.trust_remote_code", "true"], OF_MODELS.format("trust_remote_code")),
    ([*PLAN, "--num_train", "5"], "(did you mean --data.num_train or --heads.num_train?)"),
    ([*PLAN, "--sampel", "5"], "(did you mean --sample?)"),
    ([*PLAN, "--data.nothing_like_it", "5"], "(run with --help.all to list every option)"),
    ([*PLAN, "--heads.depths", "deep"], "heads.depths is deep"),
    ([*PLAN, "--pair.sampling.temperature", "warm"], "temperature is warm, but it must be a number"),
    ([*PLAN, "--decode.stop_share", "much"], "no possible value is much"),
    (["replay", "--config", "tiny", "--policy", "entrpy"], "no policy 'entrpy'; did you mean entropy?"),
    (["flags", "--config", "tiny", "--for", "lama"], "--for is lama, but it must be one of llama.cpp, "),
    (["flags", "--config", "tiny"], "required: --for"),
    (["plan"], "`acceptance-heads init` writes one"),
    (["plan", "--config", "configs/tny.yaml"], "nor a shipped experiment; did you mean tiny?"),
    (["plan", "--config", "mine.yaml"], "a shipped experiment; it must be one of llama2-68m-7b-70b, "),
    (["plan", "--config", "{tmp}/broken.yaml"], "error: {tmp}/broken.yaml: while parsing a flow sequence"),
    ([*PLAN, "--config", "{tmp}/mistyped.yaml"], "(did you mean data.num_train?)"),
    (INIT, "error: {tmp} is a directory without config.json: no model is there; check the path"),
    ([*TRAIN, "WandbLogger"], "WandbLogger needs wandb, which is not installed"),
    ([*TRAIN, "tests.configs.test_command.Refusing"], "nobody answers at port 1"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_what_is_wrong_or_was_meant(argv, message, tmp_path, capsys, monkeypatch):
    # as on a machine without wandb, whatever is installed
    monkeypatch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=99"))
    monkeypatch.chdir(ROOT)
    (tmp_path / "broken.yaml").write_text("pair: [1, 2\n")
    (tmp_path / "mistyped.yaml").write_text("data: {num_trian: 5}\n")
    (tmp_path / "prompts.txt").write_text("a prompt\n" * 20)
    with pytest.raises(SystemExit, match="2"):
        main([argument.format(tmp=tmp_path) for argument in argv])
    *_, line = capsys.readouterr().err.splitlines()
    assert message.format(tmp=tmp_path) in line


def test_a_stop_while_modules_are_imported_is_a_line(monkeypatch, capsys):
    def stopped(config: Config) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(FRONT_COMMANDS, "plan", (stopped, ()))
    with pytest.raises(SystemExit, match="130"):
        main(PLAN)
    assert capsys.readouterr().err.startswith("interrupted; ")
