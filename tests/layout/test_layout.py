"""The rules of the layout: imports run one way without a circle, and folders, files and functions stay small."""

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter

import pytest

from tests.layout.modules import FLOORS, ROOT, Module, imported, modules

MODULES = modules()
FILES = {name: module for name, module in MODULES.items() if not module.is_package}
MAX_FILES, MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 15, 400, 48, 7
MORE_PARAMETERS = {
    # what transformers' generate hands on, each by its name
    "decode.generate.in_transformers.speculative_generate": 12,
    "decode.generate.command.generate": 8,
    "configs.making.init": 10,  # a command's flags, here and below
    "configs.making.generate": 8,
    "configs.measuring.bench": 11,
    "configs.measuring.evaluate": 8,
    "configs.measuring.flags": 10,
    "evaluation.costs.init.init": 10,
    "evaluation.bench.command.bench": 11,  # the same
    "evaluation.bench.race.__init__": 8,  # flags of `bench`, each by its name
    "evaluation.report.evaluate.evaluate": 8,
    "evaluation.flags.command.flags": 10,  # the same
    "heads.model.head.__init__": 8,  # entries of config.json, each by its name
}

WORDS = {
    **dict.fromkeys(
        ("told", "asked", "anew", "dear", "stands", "seat", "abroad", "yardstick", "champion", "finalist"), 0
    ),
    "place": 7,
    "chance": 4,
    "behind": 1,
    "of its own": 3,
}
"""How often the packages may use words with plainer substitutes, in names too; "in place" is idiomatic."""


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_packages_import_only_those_below_them():
    for module in MODULES.values():
        floor = FLOORS.index(module.name.split(".")[0])
        upward = {name for name in imported(module, MODULES) if FLOORS.index(name.split(".")[0]) > floor}
        assert not upward, f"{module.name} imports {upward}"


def room(name: str) -> str:
    """The folder of a module; a file at the top of its package is a room of its own."""
    folder = name.rpartition(".")[0]
    return folder if "." in folder else name


def test_no_module_and_no_room_reaches_itself_by_imports():
    modules = {name: imported(module, FILES) for name, module in FILES.items()}
    rooms: dict[str, set[str]] = {}
    for name, others in modules.items():
        rooms.setdefault(room(name), set()).update({room(other) for other in others} - {room(name)})
    for edges in (modules, rooms):
        TopologicalSorter(edges).prepare()  # raises CycleError


def test_folders_hold_few_files_and_files_of_tests_are_small_too():
    tests = list((ROOT / "tests").rglob("*.py"))
    paths = [*tests, *(module.path for module in FILES.values())]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}
    assert [str(path) for path in tests if path.read_text(encoding="utf-8").count("\n") > MAX_LINES] == []


def test_no_line_is_longer_than_a_page_is_wide():
    """The linter lets a line go on for ever behind `type: ignore`."""
    tests = list((ROOT / "tests").rglob("*.py"))
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*(module.path for module in FILES.values()), *tests]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []


def test_no_two_files_of_a_folder_differ_by_an_ending():
    for folder in {module.path.parent for module in FILES.values()}:
        names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))
        near = [
            (a, b)
            for a in names
            for b in names
            if a != b and b in {a + ending for ending in ("s", "es", "er", "ing", "ed", "_files")}
        ]
        assert not near, f"{folder.relative_to(ROOT)}: {near}"


def test_functions_take_few_parameters():
    for module in FILES.values():
        for node in functions(module):
            given = [
                a.arg
                for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if a.arg not in ("self", "cls")
            ]
            name = f"{module.name}.{node.name}"
            assert len(given) <= MORE_PARAMETERS.get(name, MAX_PARAMETERS), (
                f"{name}:{node.lineno} takes {', '.join(given)}"
            )


def test_files_and_functions_are_short():
    for module in FILES.values():
        assert module.text.count("\n") <= MAX_LINES, module.name
        for node in functions(module):
            where = f"{module.name}:{node.lineno} {node.name}"
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, where


def test_every_module_says_what_it_is_for():
    for module in MODULES.values():
        assert module.summary, module.name


def test_no_figure_touches_the_global_state_of_matplotlib():
    """pyplot, and a backend set at import, would switch off the plots of the notebook that imports the package."""
    assert [name for name, module in MODULES.items() if re.search(r"pyplot|matplotlib\.use\(", module.text)] == []


@pytest.mark.parametrize("word", WORDS)
def test_words_with_plainer_substitutes_do_not_return(word: str):
    text = " ".join(module.text for module in MODULES.values()).replace("_", " ")
    assert len(re.findall(rf"(?<![A-Za-z]){word}s?(?![A-Za-z])", text)) <= WORDS[word]


def depends_on_the_locale(call: ast.Call) -> bool:
    """Whether a call opens a text file, or a program's output, without naming the encoding."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in keywords or None in keywords:
        return False
    if name in ("read_text", "write_text"):
        return not call.args or name == "write_text"
    if "text" in keywords and ast.unparse(keywords["text"]) == "True":
        return True
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    is_module = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in (
        "os",
        "gzip",
        "archive",
        "Image",
    )
    return name == "open" and not is_module and not any("b" in str(mode) for mode in modes)


def test_no_file_is_read_or_written_in_the_encoding_of_the_locale():
    folders = [*(ROOT / floor for floor in FLOORS), ROOT / "checkpoints/recipes", ROOT / "benchmarks", ROOT / "docs"]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and depends_on_the_locale(node)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["open(p)", "p.open('w')", "p.read_text()", "p.write_text(t)", "run(c, text=True)"])
def test_the_check_sees_each_call_that_depends_on_the_locale(text):
    assert depends_on_the_locale(ast.parse(text).body[0].value)
