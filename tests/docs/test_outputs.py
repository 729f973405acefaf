"""Pages quote what their commands print: each quoted part has the form of a fresh output on fewer prompts."""

import re
from pathlib import Path

import pytest

from docs.outputs import FOLDERS, ROOT, blocks_of, filled, run_all, screen

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DRAWN = {"README.md": 1, "CONTRIBUTING.md": 1, "how-it-works.md": 2, "transformers.md": 1, "vllm.md": 2}
"""Page -> blocks of text that quote no output: pictures of rounds, a list of folders, code."""
NUM_PROMPTS, NUM_TOKENS = 100, 24


def test_every_quoted_output_is_marked_and_its_page_is_run():
    pages = {page for pages in FOLDERS.values() for page in pages}
    for page in PAGES:
        blocks = blocks_of(page.read_text(encoding="utf-8"))
        unmarked = [block.text for block in blocks if block.language in ("", "text", "console") and block.mark is None]
        assert len(unmarked) == DRAWN.get(page.name, 0), (page.name, unmarked)
        assert any(block.mark for block in blocks) == (page.name in pages), page.name


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\r\nb\r\n", [["a"], ["b"]]),
        ("trace:  50%|#\rtrace: 100%|##\r\nend", [["trace: 100%|##"], ["end"]]),
        ("loading torch\r\x1b[2K\rdone", [["done"]]),
        ("0123456789AB\r\nc", [["0123456789", "AB"], ["c"]]),
        ("012345678 AB", [["012345678 ", "AB"]]),
        ("0123456789\r\nc", [["0123456789"], ["c"]]),
        ("one\r\ntwo\r\n\x1b[A\x1b[2K\rTWO", [["one"], ["TWO"]]),
        ("\x1b[1;31mred\x1b[0m", [["red"]]),
    ],
)
def test_a_screen_shows_what_remains_after_a_program_has_overwritten_it(text: str, lines: list[list[str]]):
    assert screen(text, columns=10 if "0123" in text else 80) == lines


FOUND = "data/x: 96 rows in 2 shards\n│ oracle │ 655 (64, 66) │  +4 % │\n\nUse fixed length 4: no head is\nfaster.\n"


@pytest.mark.parametrize(
    ("quoted", "expected"),
    [
        ("data/x: 1,024 rows in 3 shards\n", "data/x: 96 rows in 2 shards\n"),
        ("│ oracle │ 7 (6, 8) │ -12.5 % │\n", "│ oracle │ 655 (64, 66) │  +4 % │\n"),
        ("data/x: 1 rows\n…\nUse head a.\n", "data/x: 96 rows\n…\nUse fixed length 4: no head is\nfaster.\n"),
        ("  in 9 shards\n", "  in 2 shards\n"),
        ("data/x: 1 rows in 3 files\n", None),
        ("│ oracle │ 7 (6, 8) │\n│ oracle │\n", None),
    ],
)
def test_a_quoted_part_is_found_by_its_words_whatever_its_numbers(quoted: str, expected: str | None):
    if expected is None:
        with pytest.raises(ValueError, match="nothing has the form of"):
            filled(quoted, FOUND)
    else:
        assert filled(quoted, FOUND) == expected


def with_less(code: str) -> str:
    """The code of a page with fewer prompts and shorter responses."""
    code = code.replace("400", str(NUM_PROMPTS))
    if "acceptance-heads init" in code:
        code += f"sed -i 's/max_new_tokens: 128/max_new_tokens: {NUM_TOKENS}/' experiment.yaml\n"
    return code


@pytest.mark.slow
def test_the_commands_of_the_pages_print_what_the_pages_quote(tmp_path: Path):
    for page, text in run_all(tmp_path, edit=with_less):
        fences = [re.sub(r"```.*?```", "", version, flags=re.DOTALL) for version in (page.read_text(), text)]
        assert fences[0] == fences[1], "only quotes change"
