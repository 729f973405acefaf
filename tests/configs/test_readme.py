"""README and the pages of docs do not go stale: their commands parse, targets exist, and the script imports and calls
what there is.
"""

import ast
import inspect
import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentError

from configs.command import parser_for

ROOT = Path(__file__, "../../..").resolve()
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
README = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")  # a command may go on in the next line
COMMANDS = [
    (module or script, shlex.split(rest.replace("…", "configs/tiny.yaml"), comments=True))
    for module, script, rest in re.findall(r"python (?:-m ([\w.]+)|(train\.py))([^`\n]*)", README)
]
PROGRAMS = {"data_gen", "heads", "decode", "evaluation", "checkpoints.recipes", "train.py"}
SCRIPTS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
[SCRIPT] = [script for script in SCRIPTS if "target.generate" in script]
[FROM_PROMPTS] = [script for script in SCRIPTS if "make_data" in script]


def parse(commands: dict[str, Any], *, default: str | None = None, argv: list[str], trainer: type | None = None) -> str:
    """`configs.command.run` that parses and then stops; the name of the command."""
    name, argv = (argv[0], argv[1:]) if argv and argv[0] in commands else (default, argv)
    assert name in commands, f"{argv[:1]} is none of {sorted(commands)}"
    parser_for(commands[name], trainer=trainer).parse_args(argv)
    return name


@pytest.mark.parametrize(
    ("program", "argv"), COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_every_command_of_the_readme_parses(program: str, argv: list[str], monkeypatch: pytest.MonkeyPatch):
    assert program in PROGRAMS, f"{program} has a command line of its own, which would run here"
    parsed = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "configs.command.run", lambda commands, **given: parsed.append(parse(commands, **given | {"argv": argv}))
    )
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=False)
    assert len(parsed) == 1


def test_every_room_has_a_command_in_the_readme():
    assert {program for program, _ in COMMANDS} == PROGRAMS


def test_a_command_that_is_not_there_fails_this_test(monkeypatch: pytest.MonkeyPatch):
    for argv in (
        ["exprot", "--config", "configs/tiny.yaml"],
        ["export", "--config", "configs/tiny.yaml", "--heed", "x"],
    ):
        with pytest.raises((AssertionError, ArgumentError), match=r"exprot|heed"):
            test_every_command_of_the_readme_parses("heads", argv, monkeypatch)


def test_every_target_of_make_in_the_readme_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE)) <= targets


@pytest.mark.slow
def test_the_readmes_lines_from_prompts_to_a_text_run_beside_a_users_train_py(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("raise SystemExit('the user has this')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert len([line for line in FROM_PROMPTS.splitlines() if line]) <= 10
    names: dict[str, Any] = {}
    exec(compile(FROM_PROMPTS, "README.md", "exec"), names)
    exported = list((tmp_path / "runs/mine/heads/exported").iterdir())
    assert [path.name for path in exported] == [exported[0].name]
    assert names["head"].provenance.metrics["auroc"] > 0.5
    assert str(names["head"].provenance.metrics["auroc"]) in capsys.readouterr().out
    assert names["complete"](names["config"], "Tom has 3 apples.", max_new_tokens=8).strip()


def test_the_script_of_the_readme_imports_and_calls_what_there_is():
    """Names are imported, attributes of our modules looked up, keywords of our own callables bound."""
    tree = ast.parse(SCRIPT)
    names: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            assert hasattr(names[node.value.id], node.attr), f"{node.value.id}.{node.attr}"
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    policy = calls["HeadPolicy.from_pretrained"]
    given = {keyword.arg: None for keyword in policy.keywords}
    inspect.signature(names["HeadPolicy"].from_pretrained).bind(*policy.args, **given)
    inspect.signature(names["HeadPolicy"]).bind(None, **given)
    given = {keyword.arg for keyword in calls["target.generate"].keywords} & {"draft_model", "policy"}
    assert (
        given
        == {"draft_model", "policy"}
        <= inspect.signature(import_module("decode").speculative_generate).parameters.keys()
    )
