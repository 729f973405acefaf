"""How large the project may be, in statements, and how often it may use constructions that compress several things into
one statement.

A statement is a node of `ast.stmt`; lines are free up to `MAX_LINES`. A count that falls lowers its ceiling in the same
commit, and a ceiling that rises needs its reason there.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layout.modules import FLOORS, ROOT

STATEMENTS = {
    # folder: (statements today, statements to reach)
    "configs": (961, 700),
    "store": (443, 350),
    "lm": (2980, 2650),
    "data_gen": (4425, 3000),
    "heads": (3524, 2450),
    "decode": (2778, 2350),
    "evaluation": (6671, 4100),
    "serve": (493, 480),
    "papers": (1096, 850),
    "checkpoints/recipes": (1005, 930),
    "benchmarks": (588, 340),
}
CONSTRUCTIONS = {
    # construction: (occurrences today, to reach)
    "a, b = x, y": (36, 60),
    "text or list times a condition": (0, 0),
    "three comprehensions in one statement": (0, 0),
    "Any": (288, 300),
    "record type": (132, 120),
    "public name with two meanings": (4, 5),
}
MAX_LINES = 39_657  # 35,000 to reach
MAX_TEST_LINES = 29_022  # 22,000 to reach
WIDE, MAX_SHARE_WIDE = 115, 0.0435  # 0.03 to reach
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def sources(folder: str) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py"))}


PACKAGES = {path: text for folder in STATEMENTS for path, text in sources(folder).items()}
TREES = {path: ast.parse(text) for path, text in PACKAGES.items()}


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_condition(node: ast.expr) -> bool:
    """Whether an expression is visibly a bool: a comparison, `not`, `and`, `or`, bool(…), or a name is_… or has_…."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "bool"
    if isinstance(node, ast.Name | ast.Attribute):
        return ast.unparse(node).rpartition(".")[2].lstrip("_").startswith(("is_", "has_"))
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_negation or isinstance(node, ast.Compare | ast.BoolOp)


def multiplies_by_a_condition(node: ast.AST) -> bool:
    """Whether a node repeats a text by anything but a literal number, or a list or tuple by a condition."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    for repeated, count in ((node.left, node.right), (node.right, node.left)):
        if is_text(repeated) and not isinstance(count, ast.Constant):
            return True
        if isinstance(repeated, ast.List | ast.Tuple) and is_condition(count):
            return True
    return False


def assigns_a_tuple_to_a_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_record_type(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    is_named_tuple = any(ast.unparse(base) == "NamedTuple" for base in node.bases)
    return is_named_tuple or any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def num_comprehensions(statement: ast.stmt) -> int:
    """Comprehensions of a statement itself, without those of the statements in its body."""
    count = 0
    pending = list(ast.iter_child_nodes(statement))
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.stmt):
            count += isinstance(node, _COMPREHENSIONS)
            pending += ast.iter_child_nodes(node)
    return count


def repeated_public_names() -> dict[str, list[str]]:
    """Functions and classes of several modules that share a name, each with its modules; entry points and commands,
    which are named as the function that they run, apart.
    """
    owners = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                if any(ast.unparse(decorator).startswith("runs(") for decorator in node.decorator_list):
                    continue
                owners[node.name].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in owners.items() if len(paths) > 1 and name != "main"}


def constructions(path: Path, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(construction, position) of everything in a file that `CONSTRUCTIONS` counts, repeated names apart."""
    for node in ast.walk(tree):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if assigns_a_tuple_to_a_tuple(node):
            yield "a, b = x, y", where
        if multiplies_by_a_condition(node):
            yield "text or list times a condition", where
        if isinstance(node, ast.stmt) and num_comprehensions(node) >= 3:
            yield "three comprehensions in one statement", where
        if isinstance(node, ast.Name) and node.id == "Any":
            yield "Any", where
        if is_record_type(node) and path.relative_to(ROOT).parts[0] in FLOORS:
            yield "record type", where


@pytest.mark.parametrize("folder", STATEMENTS)
def test_a_folder_stays_below_its_ceiling(folder):
    trees = [tree for path, tree in TREES.items() if path.is_relative_to(ROOT / folder)]
    count = sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))
    assert count <= STATEMENTS[folder][0], f"{folder} has {count} statements: shorten the same folder"


def test_compressed_constructions_do_not_spread():
    every = [pair for path, tree in TREES.items() for pair in constructions(path, tree)]
    counts = Counter(kind for kind, _ in every)
    counts["public name with two meanings"] = len(repeated_public_names())
    excess = {kind: counts[kind] for kind, (limit, _) in CONSTRUCTIONS.items() if counts[kind] > limit}
    assert not excess, [(kind, where) for kind, where in every if kind in excess]


def test_lines_stay_few_and_mostly_short():
    lines = [line for text in PACKAGES.values() for line in text.splitlines()]
    assert len(lines) <= MAX_LINES
    assert sum(len(line) >= WIDE for line in lines) / len(lines) <= MAX_SHARE_WIDE
    assert sum(text.count("\n") for text in sources("tests").values()) <= MAX_TEST_LINES


def test_every_package_has_a_ceiling():
    assert set(FLOORS) <= set(STATEMENTS)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("a, b = x, y", ["a, b = x, y"]),
        ("a, b = record", []),
        ("s = 's' * (n > 1)", ["text or list times a condition"]),
        ("rows = [row] * is_long", ["text or list times a condition"]),
        ("zeros = [0] * width", []),
        ("line = '-' * 8", []),
        ("x = f([a for a in b], [c for c in d], {e for e in g})", ["three comprehensions in one statement"]),
        ("def f() -> Any: ...", ["Any"]),
        ("class A(NamedTuple): ...", ["record type"]),
    ],
)
def test_the_counts_see_each_construction(text: str, kinds: list[str]):
    assert [kind for kind, _ in constructions(ROOT / "lm/example.py", ast.parse(text))] == kinds
