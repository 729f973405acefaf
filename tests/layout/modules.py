"""Every module of the project: its text, its summary, and which modules it imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__, "../../..").resolve()
FLOORS = ("configs", "store", "lm", "data_gen", "heads", "decode", "evaluation", "serve", "papers")
"""The packages, lowest first: each may import those before it."""


@dataclass(frozen=True)
class Module:
    """One file."""

    name: str
    path: Path

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def summary(self) -> str:
        """The first line or sentence of its docstring."""
        first = (ast.get_docstring(self.tree) or "").split("\n\n")[0].replace("\n", " ")
        return first.split(". ")[0].rstrip(".")

    def imports(self) -> Iterator[str]:
        """Full names that it imports, anywhere in the file: modules, and names out of modules."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> dict[str, Module]:
    """Module name -> module, of every package."""
    found = {}
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(name, path)
    return found


def imported(module: Module, known: dict[str, Module]) -> set[str]:
    """Names of the project's modules that a module imports; a package's `__init__` counts only where a name is taken
    from it directly.
    """
    names = set()
    for full in module.imports():
        owner = full if full in known else full.rpartition(".")[0]
        if owner in known and owner != module.name:
            names.add(owner)
    return names
