"""The page of the laws and the code that cites them belong together: no citation without a law, no law without its
files and its tests.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.layout.modules import ROOT, modules

PAGE = (ROOT / "docs/laws.md").read_text(encoding="utf-8")
LAWS = dict(re.findall(r"^## Law (4\.\d+[a-c]?): .*\n((?:(?!^## ).*\n?)*)", PAGE, re.MULTILINE))
"""Number of each law -> its text."""
CITATION = re.compile(r"\b[Ll]aws? ((?:4\.\d+[a-c]?(?:, | and | or | to )?)+)")


def cited(text: str) -> set[str]:
    """Numbers of the laws that a text cites: "laws 4.2, 4.4" cites two."""
    return {number for found in CITATION.finditer(text) for number in re.findall(r"4\.\d+[a-c]?", found[0])}


def line_of(text: str, name: str) -> str:
    """What stands behind "* Implemented in:" or "* Proven by:"."""
    return re.search(rf"^\* {name}: (.*(?:\n  .*)*)", text, re.MULTILINE)[1]


def citing_files() -> Iterator[Path]:
    yield from (module.path for module in modules().values())
    for folder in ("tests", "benchmarks", "checkpoints/recipes"):
        yield from (path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))


def test_every_law_that_the_code_cites_stands_on_the_page():
    unknown = {
        str(path.relative_to(ROOT)): cited(path.read_text(encoding="utf-8")) - LAWS.keys() for path in citing_files()
    }
    assert {path: numbers for path, numbers in unknown.items() if numbers} == {}


@pytest.mark.parametrize("number", LAWS)
def test_a_law_names_a_formula_or_a_sentence_an_example_its_files_and_its_tests(number):
    law = LAWS[number]
    assert "*Example.*" in law
    files = re.findall(r"`([\w/]+\.py)`", line_of(law, "Implemented in"))
    assert files
    assert [path for path in files if not (ROOT / path).is_file()] == []
    tests = set(re.findall(r"`(test_\w+)`", line_of(law, "Proven by")))
    assert tests
    assert tests - fast_tests() == set(), "not there, or slow: `make test` would not prove the law"


def test_some_file_that_a_law_names_cites_it():
    for number, law in LAWS.items():
        files = re.findall(r"`([\w/]+\.py)`", line_of(law, "Implemented in"))
        assert any(number in cited((ROOT / path).read_text(encoding="utf-8")) for path in files), number


@cache
def fast_tests() -> frozenset[str]:
    """Names of the test functions of which `make test` runs at least some cases: neither they nor their files are
    marked slow.
    """
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "\npytestmark = pytest.mark.slow\n" not in text:
            functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
            found |= {
                node.name for node in functions if "pytest.mark.slow" not in map(ast.unparse, node.decorator_list)
            }
    return frozenset(found)


def test_a_slow_test_proves_no_law():
    assert "test_one_verification_preserves_target_distribution" in fast_tests()
    assert "test_no_two_streams_of_one_generator_coincide" not in fast_tests()
    assert "test_every_command_answers_help" not in fast_tests(), "its whole file is slow"


def test_a_citation_of_several_laws_is_read_whole():
    assert cited("the loop (laws 4.2, 4.4 and 4.8b) and law 4.12, but not version 4.13") == {
        "4.2",
        "4.4",
        "4.8b",
        "4.12",
    }
