"""README and docs do not go stale: commands parse, links and targets exist, the script calls what there is."""

import ast
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from configs import front
from configs.command import appending, parser_for, takes_config
from tests.cases import implementation_of

ROOT = Path(__file__, "../../..").resolve()
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
README = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")  # a command may go on in the next line
CODE = re.compile(
    r"^```(?P<language>\w*)\n(?P<block>.*?)^```|^ {4}(?P<indented>acceptance-heads .*)$|(?<!`)`(?P<span>[^`\n]+)`(?!`)",
    re.MULTILINE | re.DOTALL,
)
FRONT_COMMAND = re.compile(r"(?:^|&& |; |\$ |<\(|bin/)acceptance-heads (.+)$", re.MULTILINE)
LINK = re.compile(r"""(?:\]\(|(?:src|href)=")(?!\w+:)([^)"#\s]*)#?([^)"\s]*)[)"]""")


def arguments(text: str) -> list[str]:
    """The arguments in the rest of a command's line; the experiment of a reader (`…`, x.yaml) is a shipped one."""
    words = shlex.shlex(text, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    argv: list[str] = []
    for word in words:
        if set(word) <= set("|&;<>()"):
            break
        if argv[-1:] == ["--config"] and (word == "…" or re.fullmatch(r"[\w-]+\.yaml", word)):
            argv.append("configs/tiny.yaml")
        elif word != "…":
            argv.append(word)
    return argv


def front_commands(text: str) -> list[tuple[list[str], bool]]:
    """What follows `acceptance-heads` in a page's code, and whether it is in a sentence, which may leave things out."""
    found = []
    for code in CODE.finditer(text):
        if code["language"] in {None, "", "bash", "sh", "console"}:
            lines = FRONT_COMMAND.findall(code["block"] or code["indented"] or code["span"])
            found += [(argv, code["span"] is not None) for argv in map(arguments, lines) if argv[0] != "COMMAND"]
    return found


def dead_links(page: Path, text: str) -> list[str]:
    """Links of a page to files, headings or pages of docs that are not in the repository."""

    def is_there(path: Path, anchor: str) -> bool:
        if not anchor or not path.exists() or path.suffix != ".md":  # a picture's anchor chooses the scheme
            return path.exists()
        headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
        return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    links = [(page.parent / path if path else page, anchor) for path, anchor in LINK.findall(CODE.sub("", text))]
    links += [(ROOT / path, "") for path in re.findall(r"`(docs/[\w./-]+)`", text)]
    return [f"{path}#{anchor}" for path, anchor in links if not is_there(path, anchor)]


_NAMES = "data_gen feature_drafts deepspec flags server_labels serve.lengths"
REMOVED = {f"benchmarks.{name}" for name in _NAMES.split()}
"""Measurements that pages cite, at the last commit that has them."""
LAST_COMMIT = "d77169a"
FRONT_COMMANDS = front_commands(README)
COMMANDS = [
    (module or script, arguments(rest), False)
    for module, script, rest in re.findall(r"python (?:-m ([\w.]+)|(train\.py))([^`\n]*)", README)
    if module not in REMOVED
]
PROGRAMS = {"data_gen", "heads", "decode", "evaluation", "checkpoints.recipes", "train.py"}
BENCHMARKS = {f"benchmarks.{name}" for name in ("lengths", "pace", "serve.clock", "signals", "thresholds")}
SCRIPTS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
parser_of = cache(parser_for)
[SCRIPT] = [script for script in SCRIPTS if "target.generate" in script]
[FROM_PROMPTS] = [script for script in SCRIPTS if "make_data" in script]


def parse(commands: Mapping[str, Any], *, argv: list[str], in_a_sentence: bool = False, **given: Any) -> str:
    """`configs.command.run` that parses and then stops; the name of the command."""
    default, trainer = given.get("default"), given.get("trainer")
    name, argv = (argv[0], argv[1:]) if argv and argv[0] in commands else (default, argv)
    assert name in commands, f"{argv[:1]} is none of {sorted(commands)}"
    parser = parser_of(commands[name], trainer=trainer)
    if in_a_sentence and argv and "--config" not in argv and takes_config(commands[name]):
        argv = ["--config", "configs/tiny.yaml", *argv]
    if (argv or not in_a_sentence) and "--help" not in argv:
        parser.parse_args(appending(argv, commands[name]))
    return name


def test_a_page_that_cites_a_removed_measurement_names_the_commit_that_has_it():
    there = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    for page in PAGES:
        gone = set(re.findall(r"\bbenchmarks[./](\w+)", page.read_text())) - there
        assert not gone or LAST_COMMIT in page.read_text(), (page, gone)


@pytest.mark.parametrize(
    ("program", "argv", "in_a_sentence"),
    COMMANDS + [("acceptance-heads", *found) for found in FRONT_COMMANDS],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_command_of_the_pages_parses(program: str, argv: list[str], in_a_sentence: bool, monkeypatch):
    own = PROGRAMS | BENCHMARKS | {"acceptance-heads"}
    assert program in own, f"{program} has a command line of its own, which would run here"
    parsed = []

    def run(commands, *, argv=None, **given) -> None:
        argv = sys.argv[1:] if argv is None else argv
        parsed.append(parse(commands, argv=argv, in_a_sentence=in_a_sentence, **given))

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program, *argv])
    for name in ("command", "front"):
        monkeypatch.setattr(f"configs.{name}.run", run)
    monkeypatch.setattr("configs.front.refuse_wrong", lambda command, argv: None)
    monkeypatch.setattr("jsonargparse.auto_cli", lambda command, **_: run({"": command}, default=""))
    if program == "acceptance-heads":
        front.main()
    elif program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=False)
    assert len(parsed) == 1 or {"--help", "--version"} & set(argv)


def test_every_room_has_a_command_in_the_readme_and_every_target_of_make_exists():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z0-9-]+)", README, re.MULTILINE)) <= targets
    names = {argv[0] for argv, _ in FRONT_COMMANDS} & front.COMMANDS.keys()
    rooms = {"train.py" if name == "train" else implementation_of(name).__module__.partition(".")[0] for name in names}
    assert rooms | {program for program, *_ in COMMANDS} >= PROGRAMS


def test_links_of_the_pages_lead_somewhere():
    assert [link for page in PAGES for link in dead_links(page, page.read_text())] == []


@pytest.mark.slow
def test_the_readmes_lines_from_prompts_to_a_text_run_beside_a_users_train_py(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("raise SystemExit('the user has this')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert len([line for line in FROM_PROMPTS.splitlines() if line]) <= 11
    names: dict[str, Any] = {}
    exec(compile(FROM_PROMPTS, "README.md", "exec"), names)
    assert list((tmp_path / "runs/mine/heads/exported").glob("*/config.json"))
    printed = capsys.readouterr().out
    assert names["result"].verdict["sentence"] in printed
    assert "max_rejection_prob" in printed
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
    expected = {"draft_model", "policy"}
    assert expected <= {keyword.arg for keyword in calls["target.generate"].keywords}
    assert expected <= inspect.signature(import_module("decode").speculative_generate).parameters.keys()
