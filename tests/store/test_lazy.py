"""The lazy names of a package are those that a type checker sees, and each can be imported."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = ("lm", "data_gen", "heads", "decode", "evaluation")


@pytest.mark.parametrize("name", PACKAGES)
def test_lazy_names_are_those_under_type_checking(name: str):
    package = import_module(name)
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    checked = {alias.name: node.module for node in imports for alias in node.names}
    assert ast.literal_eval(block.orelse[0].value.args[1]) == checked
    for exported, module in checked.items():
        assert getattr(package, exported) is getattr(import_module(module), exported)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing
