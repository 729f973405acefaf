"""The rules of the layout: imports run one way without a circle, and folders, files and functions stay small."""

import ast
from collections import Counter

import pytest
from modules import FLOORS, ROOT, Module, imported, modules

MODULES = modules()
FILES = {name: module for name, module in MODULES.items() if not module.is_package}
MAX_FILES, MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 12, 400, 40, 6


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_packages_import_only_those_below_them():
    for module in MODULES.values():
        floor = FLOORS.index(module.name.split(".")[0])
        upward = {name for name in imported(module, MODULES) if FLOORS.index(name.split(".")[0]) > floor}
        assert not upward, f"{module.name} imports {upward}"


def test_no_module_reaches_itself_by_imports():
    edges = {name: imported(module, FILES) for name, module in FILES.items()}
    for start in edges:
        seen, waiting = set(), list(edges[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += edges[name]
        assert start not in seen, f"{start} is in a circle of imports"


def room(name: str) -> str:
    """The folder of a module; a file at the top of its package is a room of its own."""
    folder = name.rpartition(".")[0]
    return folder if "." in folder else name


def test_no_two_rooms_import_each_other():
    between = {(room(name), room(other)) for name, module in FILES.items() for other in imported(module, FILES)}
    assert {pair for pair in between if pair[0] != pair[1] and pair[::-1] in between} == set()


@pytest.mark.parametrize("floor", FLOORS)
def test_a_folder_holds_at_most_a_dozen_files(floor):
    counts = Counter(str(module.path.parent.relative_to(ROOT)) for module in FILES.values() if module.name.split(".")[0] == floor)
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_no_two_files_of_a_folder_differ_by_an_ending():
    for folder in {module.path.parent for module in FILES.values()}:
        names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))
        near = [(a, b) for a in names for b in names if a != b and b in {a + ending for ending in ("s", "es", "er", "ing", "ed", "_files")}]
        assert not near, f"{folder.relative_to(ROOT)}: {near}"


def test_files_and_functions_are_short_and_take_few_parameters():
    for module in FILES.values():
        assert module.text.count("\n") <= MAX_LINES, module.name
        for node in functions(module):
            where = f"{module.name}:{node.lineno} {node.name}"
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, where


def test_every_module_says_what_it_is_for():
    for module in MODULES.values():
        assert module.summary, module.name
