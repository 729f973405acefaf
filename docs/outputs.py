"""Replace the output that pages quote by that of a fresh run: `make outputs`, some ten minutes.

Two marks in a page are read: a block after `<!-- run -->` is run for its effects, and a block after `<!-- output -->`
quotes what the shell block before it prints in a terminal. A quoted part is found by its form: its words are equal, its
numbers, names of heads and verdict are free, and a line with an ellipsis alone means that lines are left out. If the
output has no such part, its words have changed: write the new ones into the page, and run this again.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COLUMNS = 120
FOLDERS = {
    "tutorial": ("your-own-pair.md", "thresholds.md", "compare.md", "flags.md", "feature-drafts.md"),
    "steps": ("data.md", "training.md", "large-models.md"),
}
"""Folder -> the pages whose commands run in it, in order; `steps` begins with the tutorial's prompts and YAML."""
_STEPS_BEGIN_WITH = ("prompts.jsonl", "experiment.yaml")
_FENCE = re.compile(r"^(?:<!-- (run|output) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FREE = re.compile(
    r"(?P<head>\b(?:drawn|fed|prefix)(?:\+\w+)*-d\d[\w.-]*)|(?P<bar>\|[^|\n]*\|)|(?P<rule>[━─]+)"
    r"|(?P<duration>[\d.]+ (?:s|min|h)\b)|(?P<number>[+-]?\d[\d,.:]*)|(?P<space>\s+)"
)
_FORMS = {
    "head": r"(?:drawn|fed|prefix)(?:\+\w+)*-d\d[\w.-]*",
    "bar": r"\|[^|\n]*\|",
    "rule": "[━─]+",
    "duration": r"[\d.]+ (?:s|min|h)\b",
    "number": r"[+-]?\d[\d,.:]*",
    "space": r"\s+",
}
_VERDICT = re.compile("(?:Use|No verdict)\\b")
_CONTROL = re.compile(r"\x1b\[(\d*)[;\d?]*([A-Za-z])|([\r\n\b])|([^\x1b\r\n\b]+)|\x1b.?", re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    mark: str | None
    language: str
    text: str
    start: int
    """Position of the text in the page."""


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks, in order."""
    return [Block(*match.groups(), match.start(3)) for match in _FENCE.finditer(page)]


def screen(text: str, columns: int) -> list[list[str]]:
    """What a terminal shows after `text`: lines, each with the rows that it takes."""
    rows: list[list[str]] = [[]]
    continues: set[int] = set()
    row = column = 0
    for count, command, control, printed in _CONTROL.findall(text):
        if control == "\n" or command == "B":
            row += int(count or 1)
        elif command == "A":
            row = max(0, row - int(count or 1))
        elif control == "\r":
            column = 0
        elif control == "\b":
            column = max(0, column - 1)
        elif command == "K":
            rows[row] = [] if count == "2" else rows[row][:column]
        rows += [[] for _ in range(row + 1 - len(rows))]
        for character in printed:
            if column == columns:
                row, column = row + 1, 0
                rows += [[] for _ in range(row + 1 - len(rows))]
                continues.add(row)
            rows[row] += " " * (column + 1 - len(rows[row]))
            rows[row][column] = character
            column += 1
    lines: list[list[str]] = []
    for number, cells in enumerate(rows):
        text = "".join(cells)
        if number + 1 not in continues:
            text = text.rstrip()
        if number in continues:
            lines[-1].append(text)
        else:
            lines.append([text])
    while lines and lines[-1] == [""]:
        lines.pop()
    return lines


def in_terminal(command: list[str], folder: Path, columns: int = COLUMNS) -> tuple[int, str]:
    """Exit status of a command in a pseudo-terminal, and everything that it writes there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "TERM": "xterm", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "CI"):
        environment.pop(name, None)
    streams = {"stdin": follower, "stdout": follower, "stderr": follower}
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)
    os.close(follower)
    written = b"".join(_read(leader))
    os.close(leader)
    return process.wait(), written.decode(errors="replace")


def _read(terminal: int) -> Iterator[bytes]:
    """Everything until the last process has closed the terminal, which Linux reports as an error."""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            return
        if not part:
            return
        yield part


def filled(quoted: str, output: str) -> str:
    """The quoted lines as `output` has them; ValueError for a part whose form is not there."""
    result, position = "", 0
    # `init` writes these where the data takes long, and on a CPU without bfloat16 arithmetic
    output = re.sub(r", rows_per_shard: \d+|^#   note: .*\n(?:#     .*\n)*", "", output, flags=re.MULTILINE)
    for part in re.split(r"^(…\n|│.*\n)", quoted, flags=re.MULTILINE):
        if not part.strip() or part == "…\n":
            result += part
            continue
        found = re.compile(_form(part)).search(output, position)
        if found is None:
            raise ValueError(f"nothing has the form of\n\n{part}\nin the rest of the output:\n\n{output[position:]}")
        position = found.end()
        indentation = part[: len(part) - len(part.lstrip(" "))]
        result += f"{indentation}{found[0].rstrip()}\n"
    return result


def _form(part: str) -> str:
    """A regular expression of everything with the form of a quoted part."""
    if _VERDICT.match(part):
        return r"(?:Use|No verdict)\b(?s:.)*\Z"
    pattern, end = "", 0
    text = part.strip()
    for free in _FREE.finditer(text):
        pattern += re.escape(text[end : free.start()]) + _FORMS[str(free.lastgroup)]
        end = free.end()
    return pattern + re.escape(text[end:])


def run_page(page: Path, folder: Path, *, edit: Callable[[str], str] = lambda code: code) -> str:
    """Run the marked blocks of a page in a folder; the page with its quotes filled in.

    Args:
        page: a page of docs.
        folder: where its commands run.
        edit: changes the code of each block before it runs.

    Raises:
        ValueError: a command fails, or an output has another form than the page quotes.
    """
    text = page.read_text(encoding="utf-8")
    result, end = "", 0
    shell: Block | None = None
    output: str | None = None
    for block in blocks_of(text):
        if block.mark == "run":
            output = _run(block, page, folder, edit)
        elif block.mark is None and block.language == "bash":
            shell, output = block, None
        elif block.mark == "output":
            if output is None:
                assert shell is not None, f"{page.name} quotes an output before any command"
                output = _run(shell, page, folder, edit)
            result += text[end : block.start] + filled(block.text, output)
            end = block.start + len(block.text)
    return result + text[end:]


def _run(block: Block, page: Path, folder: Path, edit: Callable[[str], str]) -> str:
    code = edit(block.text)
    command = [sys.executable, "-c", code] if block.language == "python" else ["bash", "-ec", code]
    status, written = in_terminal(command, folder)
    output = "\n".join("".join(rows) for rows in screen(written, COLUMNS))
    if status:
        raise ValueError(f"{page.name}: exit status {status} of\n\n{code}\n{output}")
    return output


def run_all(folder: Path, *, edit: Callable[[str], str] = lambda code: code) -> Iterator[tuple[Path, str]]:
    """Every page with marks, and its text with the quotes filled in; `folder` gets the folders of the commands."""
    for name, pages in FOLDERS.items():
        at = folder / name
        at.mkdir()
        (at / "checkpoints").mkdir()
        for name_of_models in ("tiny", "coder"):
            (at / "checkpoints" / name_of_models).symlink_to(ROOT / "checkpoints" / name_of_models)
        for file in _STEPS_BEGIN_WITH if name == "steps" else ():
            (at / file).write_bytes((folder / "tutorial" / file).read_bytes())
        for page in pages:
            path = ROOT / "docs" / page
            yield path, run_page(path, at, edit=edit)


def main() -> None:
    """Run all pages and write those whose output has changed."""
    with TemporaryDirectory() as folder:
        for path, text in run_all(Path(folder)):
            is_changed = text != path.read_text(encoding="utf-8")
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {'changed' if is_changed else 'as before'}", flush=True)


if __name__ == "__main__":
    main()
