"""Generate the site's pages that are not files in this folder: commands, settings, the Python API, and files of the
repository's root. They are read from the code when the site is built.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from html import escape, unescape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # acceptance-heads may not be installed where the site is built

from configs.command import SECTIONS
from configs.front import COMMANDS, TRAINING
from configs.screens import Option, options_of, section_options, summary_of, usage_of

ROOMS = ("decode", "heads", "data_gen", "evaluation", "configs")
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md")
# nbconvert adds loaders of MathJax and Mermaid from another host to every notebook; ours uses neither.
_LOADERS = re.compile(r'<script (?:src=""|type="(?:module|text/x-mathjax-config)")>.*?</script>', re.DOTALL)
_CELL = re.compile(r"<(t[dh])((?: style=\"[^\"]*\")?)>(.*?)</\1>", re.DOTALL)
_SHORT, _LONG = 24, 90
"""Characters up to which no table breaks a cell, such as an interval or a policy's name, and above which it is wide."""
_TITLES = {"pair": "the models", "data": "prompts and rows", "heads": "the sweep", "decode": "policies and evaluation"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"reference/commands.md": commands(), "reference/settings.md": settings(), "reference/api.md": api()}
    for name in FROM_ROOT:
        text = (ROOT / name).read_text(encoding="utf-8")
        pages[name.lower()] = re.sub(r"\]\(docs/", "](", text)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove those loaders, so that the site works offline, and give cells of tables a width."""
    if page.file.src_uri.endswith(".ipynb"):
        return _LOADERS.sub("", html)
    return _CELL.sub(_with_width, html)


def _with_width(cell: re.Match[str]) -> str:
    """A cell of a table with the class of its length, for which site.css has a width."""
    tag, attributes, content = cell.groups()
    length = len(unescape(re.sub(r"<[^>]+>", "", content)))
    if _SHORT < length <= _LONG:
        return cell[0]
    return f'<{tag}{attributes} class="{"short" if length <= _SHORT else "long"}">{content}</{tag}>'


def commands() -> str:
    """Every command with its flags, in the order of use."""
    about = "Every command has `--help`. A command with `--config` also takes every [setting](settings.md) as a flag."
    lines = ["# Commands", "", about, ""]
    for name, (command, settings) in COMMANDS.items():
        lines += [f"## {name}", "", summary_of(command), ""]
        lines += ["```text", usage_of(name, command), "```", ""]
        if shown := [setting for setting in settings if not setting.startswith("trainer.")]:
            links = ", ".join(f"[`{setting}`](settings.md#{_anchor(setting)})" for setting in shown)
            lines += [f"Most important settings: {links}.", ""]
        if options := options_of(command):
            lines += [*_table(options, has_kind=False), ""]
        if name in TRAINING:
            lines += ["Also `--trainer.NAME`: any argument of pytorch_lightning.Trainer.", ""]
    return "\n".join(lines)


def settings() -> str:
    """Every setting of the YAML, section by section."""
    lines = ["# Settings", "", "Every key of the YAML. Each is also a flag, for example `--data.num_train 4096`.", ""]
    for section in SECTIONS:
        lines += [f"## {section}: {_TITLES[section]}", "", *_table(section_options(section), has_kind=True), ""]
    trainer = "Any argument of pytorch_lightning.Trainer, such as `max_epochs`, `devices`, `precision` and `logger`."
    return "\n".join([*lines, "## trainer: Lightning's", "", trainer, ""])


def api() -> str:
    """The packages and their public names, with their docstrings."""
    text_alone = ["members: false", "show_root_heading: false", "show_root_toc_entry: false"]
    about = "The public names of the packages that users import."
    lines = ["# Python API", "", about, ""]
    for room in ROOMS:
        lines += [f"## {room}", "", f"::: {room}", "    options:", *(f"      {option}" for option in text_alone), ""]
        for name in exported(room):
            lines += [f"::: {room}.{name}", ""]
    return "\n".join(lines)


def exported(room: str) -> list[str]:
    """`__all__` of a package, read without importing it."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return list(ast.literal_eval(assigned["__all__"]))


def _table(options: Iterable[Option], *, has_kind: bool) -> Iterator[str]:
    """Rows of flag, default and text, as HTML, because a type may contain a bar."""
    yield '<div class="options" markdown="0"><table>'
    for option in options:
        name = option.flag.removeprefix("--") if has_kind else option.flag
        default = f" <small>[{escape(option.default)}]</small>" if option.default else ""
        kind = f"<br><small>{escape(option.kind.replace('None', 'null'))}</small>" if has_kind else ""
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(option.text))
        broken = re.sub(r"([._])", r"\1<wbr>", name)  # a narrow screen may break the line here
        yield f'<tr id="{_anchor(name)}"><td><code>{broken}</code>{kind}</td><td>{text}{default}</td></tr>'
    yield "</table></div>"


def _anchor(name: str) -> str:
    return name.strip("-").replace(".", "-")
