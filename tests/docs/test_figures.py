"""Every figure that the README and the index pages quote is on the results page, or in its tables, that they link."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
NAMES = ("README.md", "docs/index.md", "docs/which.md", "docs/when-it-does-not-help.md", "docs/vllm.md")
QUOTING = (*(ROOT / name for name in NAMES), RESULTS / "index.md")
NUMBER = r"[+-]?\d+(?:\.\d+)?"
INTERVAL = re.compile(rf"({NUMBER}) ?%?(?:\*\*)? ?\(({NUMBER}) ?%?(?:,| to) ({NUMBER}) ?%?\)")
PLAIN = re.compile(rf"((?:{NUMBER}(?:, | and | to ))*{NUMBER})(?: ?%(?! (?:confidence )?interval)| times)")
LINK = re.compile(r"\]\(([^)#\s]*\.md)[^)]*\)")
RETIRED = re.compile(r"^## Retired\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class Figure(NamedTuple):
    """A number as it is printed, with its confidence interval if it has one."""

    numbers: tuple[str, ...]

    def is_rounded_from(self, measured: "Figure") -> bool:
        """Whether each number is the measured one at the decimals that are printed here.

        "+25 % (21, 30)" is rounded from "+25.2 (+20.7, +29.7)". A measured number has at least as many decimals.
        """
        if len(self.numbers) != len(measured.numbers):
            return False
        return all(map(_is_rounded, self.numbers, measured.numbers))


def _is_rounded(printed: str, measured: str) -> bool:
    decimals = len(printed.partition(".")[2])
    return abs(float(printed) - float(measured)) <= 0.5 * 10**-decimals + 1e-9 and decimals <= len(
        measured.partition(".")[2]
    )


def figures_in(text: str) -> Iterator[Figure]:
    """Figures with their intervals, then percentages and multiples without one."""
    yield from (Figure(found.groups()) for found in INTERVAL.finditer(text))
    for found in PLAIN.finditer(INTERVAL.sub("", text)):
        yield from (Figure((number,)) for number in re.findall(NUMBER, found[1]))


def measured_on(page: Path) -> set[Figure]:
    """Every number on a results page and in the CSV files that it links, by itself and with its interval.

    A section with the heading "Retired" does not count.
    """
    text = RETIRED.sub("", page.read_text(encoding="utf-8"))
    tables = [page.parent / name for name in re.findall(r"\]\((tables/[\w-]+\.csv)\)", text)]
    text = "\n".join([text, *(table.read_text(encoding="utf-8") for table in tables)])
    alone = {Figure((number,)) for number in re.findall(rf"(?<![\w.]){NUMBER}", text)}
    return alone | {Figure(found.groups()) for found in INTERVAL.finditer(text)}


def units_of(text: str) -> Iterator[str]:
    """Parts of a page with sources of their own: table rows that link a page, and what remains of each section."""
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        lines = section.splitlines()
        rows = [line for line in lines if line.startswith("|") and LINK.search(line)]
        yield from rows
        yield "\n".join(line for line in lines if line not in rows)


def unsupported(page: Path, text: str) -> list[str]:
    """Figures of a page that no results page linked in the same row or section has."""
    missing = []
    for unit in units_of(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        linked = {(page.parent / link).resolve() for link in LINK.findall(unit)}
        sources = [source for source in linked if source.parent == RESULTS and source.name != "index.md"]
        known = set().union(*map(measured_on, sources))
        quoted = figures_in(LINK.sub("]", unit))
        missing += [
            " ".join(figure.numbers) for figure in quoted if not any(figure.is_rounded_from(one) for one in known)
        ]
    return missing


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_quoted_figure_is_on_the_page_that_measured_it(page: Path):
    assert unsupported(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_results_page_has_the_parts_that_readers_look_for(page: Path):
    if page.stem == "index":
        return
    text = page.read_text(encoding="utf-8")
    assert text.split("\n")[0].endswith("?"), "the title is the question"
    parts = ["**Question.**", "**Answer.**", "\n|---", "\n## Make it again\n", "\n## Limits\n"]
    found = [text.find(part) for part in parts]
    assert -1 not in found, dict(zip(parts, found, strict=True))
    assert found == sorted(found)
    answer = text.split("**Answer.**")[1].split("\n\n")[0]
    assert len(re.findall(r"[.?](?:\s|$)", answer)) <= 2, "two sentences"


def test_every_table_beside_the_pages_is_linked():
    linked = {link for page in RESULTS.glob("*.md") for link in re.findall(r"\]\((tables/[^)]+)\)", page.read_text())}
    assert linked == {str(path.relative_to(RESULTS)) for path in (RESULTS / "tables").iterdir()}


@pytest.mark.parametrize(
    ("quote", "complaint"),
    [
        ("+25 % (21, 30)", None),
        ("+25.2 % (20.7, 29.7)", None),
        ("19 and 20 %", None),
        ("+25 % (21, 31)", "25 21 31"),
        ("+26 % (21, 30)", "26 21 30"),
        ("+25.23 % (20.7, 29.7)", "25.23"),
        ("+61 %", "61"),
        ("8.8 times", "8.8"),
    ],
)
def test_a_figure_that_was_not_measured_fails_this_test(quote: str, complaint: str | None):
    missing = unsupported(ROOT / "README.md", f"A head gains {quote} ([the demo](docs/results/demo.md)).")
    assert missing == [] if complaint is None else complaint in missing[0]


def test_a_figure_without_a_source_or_from_a_retired_table_fails_this_test(tmp_path, monkeypatch):
    assert unsupported(ROOT / "README.md", "It gains +25 % (21, 30).\n") == ["+25 21 30"]
    page = tmp_path / "old.md"
    monkeypatch.setitem(globals(), "RESULTS", tmp_path)
    for heading, missing in (("## Table", []), ("## Retired", ["+25 21 30"])):
        page.write_text(f"# Old?\n\n{heading}\n\n+25.2 (+20.7, +29.7)\n")
        assert unsupported(tmp_path / "README.md", "It gained +25 % (21, 30) ([page](old.md)).") == missing
