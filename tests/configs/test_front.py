"""`acceptance-heads`: help at once and from the code, a hint for a typo, no module of the user's in place of ours."""

import importlib
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from configs import Config
from configs.command import parser_for
from configs.front import COMMANDS, all_steps, main, overview, run_room
from configs.schema import ModelSource, PairConfig
from configs.screens import _schema, completion_of, options_of, screen_of
from configs.signatures import command_of

SCRIPT = Path(sys.executable).with_name("acceptance-heads")


def test_the_overview_names_every_command_and_what_it_does(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    assert shown == overview() + "\n"
    for name in COMMANDS:
        [line] = [line for line in shown.splitlines() if line.startswith(f"  {name} ")]
        assert len(line.split()) > 3
        assert len(line) <= 110


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_of_what_the_parser_takes(name, capsys):
    main([name, "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 60
    assert max(map(len, shown.splitlines())) <= 120
    module, function = COMMANDS[name].target.split(":")
    command = getattr(importlib.import_module(module), function)
    known = parser_for(command)._option_string_actions
    flags = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert flags[-1] == "--help.all"
    for flag in flags[:-1]:
        assert flag in known or flag.startswith("--trainer.")


def test_help_and_version_import_nothing_heavy():
    script = (
        "import sys; from configs.front import main; main(['--help']); main(['evaluate', '--help']);"
        "main(['--version']); print(sorted({'torch', 'transformers', 'numpy', 'jsonargparse'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"
    assert shown.splitlines()[-2].startswith("acceptance-heads 0.")


HEAVY = {"torch", "transformers", "pytorch_lightning", "datasets", "numpy", "scipy", "sympy", "pandas", "pyarrow"}
HEAVY |= {"matplotlib", "accelerate", "huggingface_hub", "tokenizers", "safetensors", "rich", "jinja2", "openai", "ray"}


def test_settings_are_checked_before_anything_heavy_is_imported():
    script = (
        "import sys\nfrom configs.front import COMMANDS, main\n"
        "for argv in [[name, '--nosuch', '1'] for name in COMMANDS] + [['data', '--config', 'tiny', '--data.num_dev', "
        "'-5'], ['train', '--config', 'tiny', '--trainer.max_epochs', '2', '--heads.dropout', '7']]:\n"
        "    try: main(argv)\n    except SystemExit as stop: assert stop.code == 2\n"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    *unknown, data, train = done.stderr.splitlines()
    assert len(unknown) == len(COMMANDS)
    assert data.startswith("error: data.num_dev is -5; it must be a number")
    assert train.startswith("error: heads.dropout is 7")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_signature_read_from_the_source_is_that_of_the_command(name):
    module, function = COMMANDS[name].target.split(":")
    command, light = getattr(importlib.import_module(module), function), command_of(COMMANDS[name].target)
    parameters, of_light = (list(signature(each).parameters.values()) for each in (command, light))
    assert (of_light, light.__doc__) == (parameters, command.__doc__)


def test_help_of_train_py_is_that_of_the_command_and_imports_nothing_heavy(capsys):
    main(["train", "--help"])
    script = "import runpy, sys; sys.argv = ['train.py', '--help']; runpy.run_path('train.py', run_name='__main__');"
    script += "print(sorted({'torch', 'pytorch_lightning', 'jsonargparse'} & set(sys.modules)))"
    asked = [sys.executable, "-c", script]
    done = subprocess.run(asked, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert done.stdout == capsys.readouterr().out + "[]\n"


def test_a_typo_gets_the_command_that_was_meant(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["evalute", "--config", "tiny"])
    assert capsys.readouterr().err == "error: 'evalute' is not a command; did you mean evaluate?\n"


def test_help_all_has_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "--help.all"])
    shown = capsys.readouterr().out
    assert "--pair.target.path" in shown
    assert "--decode.draws_per_prompt" in shown


def test_it_runs_beside_a_users_own_modules_of_our_names(tmp_path):
    for name in ("train.py", "heads/__init__.py", "configs/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the user has this')\n")
    asked = [SCRIPT, "plan", "--config", "tiny", "--sample", "0"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "disk" in done.stdout


def test_screens_follow_the_code():
    screen = screen_of("tune", "evaluation.report.tune:tune", ("decode.num_dev", "pair.sampling.temperature"))
    assert "Number of prompts for choosing each policy's setting. [50]" in screen
    assert "0 is greedy. [1.0]" in screen


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--data.num_trian", "5"], "did you mean --data.num_train?"),
        (["--pair.dtype", "float32"], "did you mean --pair.target.dtype or --pair.draft.dtype?"),
        (
            ["--pair.trust_remote_code", "true"],
            "did you mean --pair.target.trust_remote_code or --pair.draft.trust_remote_code?",
        ),
        (["--num_train", "5"], "did you mean --data.num_train or --heads.num_train?"),
        (["--decode.num_devv", "5"], "did you mean --decode.num_dev?"),
        (["--sampel", "5"], "did you mean --sample?"),
        (["--data.nothing_like_it", "5"], "run with --help.all to list every option"),
    ],
)
def test_a_mistyped_setting_gets_a_hint(flags, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--config", "tiny", *flags])
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"({hint})")


def test_a_yaml_that_cannot_be_read_is_named(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("pair: [1, 2\n")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--config", str(path)])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: Problems parsing config")


def test_a_stop_while_modules_are_imported_is_a_line(monkeypatch, capsys):
    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("configs.front._command", stopped)
    with pytest.raises(SystemExit, match="130"):
        main(["plan", "--config", "tiny"])
    assert capsys.readouterr().err == "interrupted before the command started\n"


def test_a_directory_without_a_model_is_called_so(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a prompt\n" * 20)
    with pytest.raises(SystemExit, match="2"):
        main(["init", "--target", str(tmp_path), "--draft", str(tmp_path), "--prompts", str(tmp_path / "prompts.txt")])
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path} is a directory without config.json: no model is there; check the path"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["replay", "--config", "tiny", "--policy", "entrpy"], "there is no policy 'entrpy'; did you mean entropy?"),
        (["plan", "--config", "configs/tny.yaml"], "nor a shipped experiment; did you mean tiny?"),
        (["plan", "--config", "mine.yaml"], "a shipped experiment; it must be one of llama2-68m-7b-70b, "),
    ],
)
def test_a_mistyped_name_gets_the_one_that_was_meant(argv, said, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_mistyped_setting_of_a_yaml_gets_a_hint(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {num_trian: 5}\n")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--config", "tiny", "--config", str(path)])
    assert capsys.readouterr().err.endswith("(did you mean data.num_train?)\n")


def test_all_runs_every_step_in_order_with_one_experiment(monkeypatch, capsys):
    called = []
    monkeypatch.setattr("configs.front._command", lambda name: lambda config: called.append((name, config.data.dir)))
    all_steps(Config(pair=PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small"))))
    assert called == [(name, "data/run") for name in ("data", "train", "export", "evaluate", "tune")]
    assert capsys.readouterr().out.splitlines()[0] == "== 1 of 5: data"


def test_all_stops_at_the_first_step_that_fails_with_its_exit_status(monkeypatch):
    called = []

    def step(name):
        called.append(name)
        return lambda config: sys.exit(7) if name == "train" else None

    monkeypatch.setattr("configs.front._command", step)
    with pytest.raises(SystemExit, match="7"):
        all_steps(Config(pair=PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small"))))
    assert called == ["data", "train"]


def test_commands_stand_in_the_order_in_which_one_needs_them():
    wanted = [
        "init",
        "plan",
        "data",
        "stats",
        "train",
        "export",
        "import",
        "push",
        "inspect",
        "generate",
        "evaluate",
        "tune",
        "flags",
        "replay",
        "costs",
        "bench",
        "hierarchy",
        "tables",
        "theory",
    ]
    assert [name for name in COMMANDS if name in wanted] == [name for name in wanted if name in COMMANDS]
    assert list(COMMANDS).index("theory") < list(COMMANDS).index("trace")


def test_every_setting_and_every_flag_has_a_text():
    settings = [(cls, name) for cls, fields in _schema().items() for name, (_, text) in fields.items() if not text]
    flags = [
        (name, option.flag)
        for name, entry in COMMANDS.items()
        for option in options_of(entry.target)
        if len(option.text.split()) < 2
    ]
    assert settings + flags == []


def completed(*words: str) -> set[str]:
    """What bash offers for the last of these words."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_acceptance_heads; printf "%s\\n" "${COMPREPLY[@]}"'
    script = completion_of({name: entry.target for name, entry in COMMANDS.items()}, "bash")
    asked = ["bash", "--norc", "-s", "acceptance-heads", *words]
    return set(
        subprocess.run(asked, input=f"{script}\n{ask}", capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ev"], {"evaluate"}),
        (["--completion", ""], {"bash", "zsh"}),
        (["plan", "--data.num_t"], {"--data.num_train", "--data.num_test"}),
        (["train", "--heads.timings", ""], {"[fed]", "[drawn]", "[prefix]", "[candidate]"}),
        (["train", "--pair.micro.dtype", "f"], {"float64", "float32", "float16"}),
        (["generate", "--json", ""], {"true", "false"}),
        (["train", "--trainer.max_e"], {"--trainer.max_epochs"}),
        (["all", "--trainer.prec"], {"--trainer.precision"}),
        (["evaluate", "--trainer.max_e"], set()),
        (["inspect", "--data"], set()),  # a command without an experiment
    ],
)
def test_bash_completes_commands_options_and_choices(words, offered):
    assert completed(*words) == offered


def test_completion_is_a_script_of_the_shell_and_imports_nothing_heavy():
    script = (
        "import sys; from configs.front import main; main(['--completion', 'zsh']);"
        "print(sorted({'torch', 'transformers', 'numpy', 'jsonargparse'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("#compdef acceptance-heads\n")
    assert "--decode.num_dev" in shown
    assert shown.splitlines()[-1] == "[]"


def test_a_shell_that_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--completion", "fish"])
    assert capsys.readouterr().err == "error: --completion is 'fish'; it takes bash or zsh\n"


@pytest.mark.parametrize("room", ["data_gen", "heads", "decode", "evaluation"])
def test_a_rooms_commands_have_the_same_screens_and_import_nothing_for_them(room, capsys):
    commands = importlib.import_module(f"{room}.__main__").COMMANDS
    run_room(commands, argv=["--help"])
    listed = capsys.readouterr().out
    for name, front in commands.names.items():
        assert f"  {name} " in listed
        run_room(commands, argv=[name, "--help"])
        assert capsys.readouterr().out == screen_of(front, *COMMANDS[front]) + "\n"
    script = (
        f"import sys; sys.argv = ['x', {next(iter(commands))!r}, '--help']; import runpy;"
        f"runpy.run_module({room!r}, run_name='__main__'); print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"
