"""Every figure that a page quotes is on the results page, or in its tables, that it links; pages have their parts."""

import re
from collections.abc import Iterator
from pathlib import Path

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
PARTS = ("**Question.**", "**Answer.**", "\n|---", "\n## Make it again\n", "\n## Limits\n")
Figure = tuple[str, ...]
"""A number as it is printed, followed by the bounds of its confidence interval if it has one."""


def is_rounded(printed: Figure, measured: Figure) -> bool:
    """Whether "+25 % (21, 30)" is "+25.2 (+20.7, +29.7)" at the decimals that are printed."""
    return len(printed) == len(measured) and all(
        abs(float(short) - float(long)) <= 0.5 * 10 ** -len(short.partition(".")[2]) + 1e-9
        and len(short.partition(".")[2]) <= len(long.partition(".")[2])
        for short, long in zip(printed, measured, strict=True)
    )


def figures_in(text: str) -> Iterator[Figure]:
    """Figures with their intervals, then percentages and multiples without one."""
    yield from (found.groups() for found in INTERVAL.finditer(text))
    for found in PLAIN.finditer(INTERVAL.sub("", text)):
        yield from ((number,) for number in re.findall(NUMBER, found[1]))


def measured_on(page: Path) -> set[Figure]:
    """Numbers of a results page and of the CSV files that it links, without a section headed "Retired"."""
    text = RETIRED.sub("", page.read_text(encoding="utf-8"))
    for table in re.findall(r"\]\((tables/[\w-]+\.csv)\)", text):
        text += (page.parent / table).read_text(encoding="utf-8")
    alone = {(number,) for number in re.findall(rf"(?<![\w.]){NUMBER}", text)}
    return alone | {found.groups() for found in INTERVAL.finditer(text)}


def unsupported(page: Path, text: str) -> list[str]:
    """Figures that no results page linked in the same table row, or else in the same section, has."""
    units = []
    for section in re.split(r"^(?=## )", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE):
        rows = [line for line in section.splitlines() if line.startswith("|") and LINK.search(line)]
        units += [*rows, "\n".join(line for line in section.splitlines() if line not in rows)]
    missing = []
    for unit in units:
        linked = {(page.parent / link).resolve() for link in LINK.findall(unit)}
        sources = [source for source in linked if source.parent == RESULTS and source.name != "index.md"]
        known = set().union(*map(measured_on, sources))
        quoted = figures_in(LINK.sub("]", unit))
        missing += [" ".join(figure) for figure in quoted if not any(is_rounded(figure, other) for other in known)]
    return missing


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_quoted_figure_is_on_the_page_that_measured_it(page: Path):
    assert unsupported(page, page.read_text(encoding="utf-8")) == []


PAGES = [path for path in RESULTS.glob("*.md") if path.stem != "index"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_results_page_asks_answers_and_says_how_to_make_it_again(page: Path):
    text = page.read_text(encoding="utf-8")
    assert text.split("\n")[0].endswith("?"), "the title is the question"
    found = [text.find(part) for part in PARTS]
    assert [part for part, at in zip(PARTS, found, strict=True) if at < 0] == []
    assert found == sorted(found)
    answer = text.split("**Answer.**")[1].split("\n\n")[0]
    assert len(re.findall(r"[.?](?:\s|$)", answer)) <= 2, "two sentences"


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.stem)
def test_a_page_that_is_not_a_reference_stays_short(page: Path):
    most = 120 if page.stem == "README" else 150
    text = re.sub(r"^<!-- \w+ -->\n", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert page.stem in ("families", "laws", "log") or text.count("\n") <= most


def test_every_table_beside_the_pages_is_linked():
    linked = {link for page in RESULTS.glob("*.md") for link in re.findall(r"\]\((tables/[^)]+)\)", page.read_text())}
    assert linked == {str(path.relative_to(RESULTS)) for path in (RESULTS / "tables").iterdir()}


@pytest.mark.parametrize(
    ("quote", "complaint"),
    [
        ("+25 % (21, 30), 19 and 20 %", []),
        ("+25 % (21, 31)", ["+25 21 31"]),
        ("+25.23 % (20.7, 29.7)", ["+25.23 20.7 29.7"]),
        ("+61 % or 77.7 times", ["+61", "77.7"]),
    ],
)
def test_a_figure_that_was_not_measured_or_was_retired_fails_this_test(quote, complaint, tmp_path, monkeypatch):
    assert unsupported(ROOT / "README.md", f"A head gains {quote} ([the demo](docs/results/demo.md)).") == complaint
    assert unsupported(ROOT / "README.md", "It gains +25 % (21, 30), from nowhere.") == ["+25 21 30"]
    monkeypatch.setitem(globals(), "RESULTS", tmp_path)
    (tmp_path / "old.md").write_text("# Old?\n\n## Retired\n\n+25.2 (+20.7, +29.7)\n")
    assert unsupported(tmp_path / "README.md", "It gained +25 % (21, 30) ([page](old.md)).") == ["+25 21 30"]
