"""`acceptance-heads`: help at once and from the code, a hint for a typo, no module of the user's in place of ours."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from configs.command import parser_for
from configs.front import COMMANDS, main, overview, run_room
from configs.screens import screen_of

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
    asked = [SCRIPT, "plan", "--config", "tiny"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "disk" in done.stdout


def test_screens_follow_the_code():
    screen = screen_of("tune", "evaluation.tuning.command:tune", ("decode.num_dev", "pair.sampling.temperature"))
    assert "Prompts on which each policy's setting is chosen. [50]" in screen
    assert "0 is greedy. [1.0]" in screen


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--data.num_trian", "5"], "did you mean --data.num_train?"),
        (["--heads.depths", "2"], "a list is wanted: --heads.depths '[2]'"),
        (["--heads.timings", "drawn"], "a list is wanted: --heads.timings '[drawn]'"),
        (["--data.nothing_like_it", "5"], "--help lists every key"),
    ],
)
def test_a_mistyped_setting_gets_a_hint(flags, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--config", "tiny", *flags])
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"({hint})")


def test_a_mistyped_setting_of_a_yaml_gets_a_hint(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {num_trian: 5}\n")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--config", "tiny", "--config", str(path)])
    assert capsys.readouterr().err.endswith("(did you mean data.num_train?)\n")


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
