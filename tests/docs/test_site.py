"""The site has every page, command, setting and public name, and asks no other host for anything."""

import re
from base64 import b64decode
from html import unescape
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import configs
import data_gen
import decode
import evaluation
import heads
from configs.command import SECTIONS, parser_for
from configs.front import COMMANDS
from configs.schema import Config
from configs.screens import options_of, section_options, usage_of

ROOT = Path(__file__).parents[2]
EXTERNAL = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>""")
SCRIPT = re.compile(r"<script\b[^>]*>(.*?)</script>", re.DOTALL)
LOADING = re.compile(r"""(?:\bimport\s*\(|\bfrom\s|\bfetch\(|url\(|@import)\s*["']?(?:https?:)?//[^"')]*""")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="the site is built with the extra `docs`")
    spec = spec_from_file_location("site_hooks", ROOT / "docs/hooks.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_and_every_flag_of_it_is_on_the_page(hooks):
    sections = re.split(r"^## (\S+)$", hooks.commands(), flags=re.MULTILINE)
    assert sections[1::2] == list(COMMANDS)
    for name, section in zip(sections[1::2], sections[2::2], strict=True):
        assert f"\n{usage_of(name, COMMANDS[name][0])}\n" in section
        flags = [option.flag for option in options_of(COMMANDS[name][0])]
        assert re.findall(r"<code>(--.*?)</code>", section.replace("<wbr>", ""))[: len(flags)] == flags


def takes_a_config(config: Config) -> None:
    """A command that does nothing."""


def test_every_setting_that_the_parser_takes_is_on_the_page_with_its_text(hooks):
    page = hooks.settings().replace("<wbr>", "")
    texts = re.findall(r'<tr id="[^"]+"><td><code>([^<]+)</code>.*?<td>(.*?)</td>', page)
    names = [option.flag.removeprefix("--") for section in SECTIONS for option in section_options(section)]
    assert [name for name, _ in texts] == names
    assert len(names) > 100
    assert [name for name, text in texts if len(unescape(text)) < 6] == []
    taken = {action.dest for action in parser_for(takes_a_config)._actions}
    of_unions = ("data.prompts.", "pair.micro.")  # a set, and a model that may be null: the parser takes them whole
    assert {name for name in names if not name.startswith(of_unions)} <= taken
    settings = {name for name in taken if name.partition(".")[0] in SECTIONS and not name.endswith(".help")}
    wholes = {"pair.target", "pair.draft", "pair.micro", "pair.sampling", "data.server", "data.ray"}
    assert settings - {*names, *SECTIONS} <= wholes


def test_every_public_name_is_documented(hooks):
    named = re.findall(r"^::: (\S+)$", hooks.api(), flags=re.MULTILINE)
    public = [
        (room.__name__, ["", *(f".{name}" for name in room.__all__)])
        for room in (decode, heads, data_gen, evaluation, configs)
    ]
    assert named == [room + name for room, names in public for name in names]


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("[b](nowhere.md)", "'nowhere.md'"),
        ("[b](b.md#nowhere)", "'#nowhere'"),
        ("[b](/b.md)", "absolute"),
        ("", "b.md"),
    ],
)
def test_a_broken_link_or_a_page_without_a_place_fails_the_build(hooks, page, problem, tmp_path, caplog):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    (tmp_path / "index.md").write_text(f"# A\n\n{page}\n")
    (tmp_path / "b.md").write_text("# B\n")
    nav = [{"A": "index.md"}, {"B": "b.md"}] if page else [{"A": "index.md"}]
    places = {"docs_dir": str(tmp_path), "site_dir": str(tmp_path.with_name(f"{tmp_path.name}-site"))}
    own = {"nav": nav, "plugins": [], "hooks": [], "extra_css": [], "theme": "mkdocs"}
    with pytest.raises(Abort, match="strict"):
        build(load_config(str(ROOT / "mkdocs.yml"), **places, **own))
    assert problem in caplog.text


def test_pictures_are_small_made_by_the_command_shown_on_a_page_and_ask_no_other_host():
    pictures = sorted((ROOT / "docs/pictures").iterdir())
    made = (ROOT / "docs/pictures.py").read_text()
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert len(pictures) >= 4
    for picture in pictures:
        assert picture.stat().st_size <= 150_000
        assert picture.name in re.split(r"[\s,]+", made)
        assert f"pictures/{picture.name}" in pages
        if picture.suffix == ".svg":
            assert not LOADING.search(picture.read_text())


def test_short_cells_of_tables_do_not_break_and_long_ones_are_wide(hooks):
    sentence = "a cell of a table that has a whole sentence"
    cells = {"+9.4 % (7.8, 11.0)": "short", "<b>also short</b>": "short", sentence: None, sentence * 3: "long"}
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    for content, name in cells.items():
        for style in ("", ' style="text-align: right;"'):
            cell = hooks.on_page_content(f'<td{style}>{content}</td><td id="x">y</td>', page, None, None)
            given = f' class="{name}"' if name else ""
            assert cell == f'<td{style}{given}>{content}</td><td id="x">y</td>'
            assert name is None or f"td.{name}" in (ROOT / "docs/site.css").read_text()


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_no_other_host(hooks, tmp_path, monkeypatch):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"))
    assert config.strict
    build(config)
    site = tmp_path / "site"
    pages = {path.relative_to(site): path.read_text() for path in site.rglob("*.html")}
    sources = [path.stem for path in (ROOT / "docs").rglob("*.md") if path.stem != "index"]
    assert {path.parent.name for path in pages} >= {*sources, "notebook", "commands", "settings", "api", "changelog"}
    assert [found for text in pages.values() for found in EXTERNAL.findall(text)] == []
    scripts = [script for text in pages.values() for script in SCRIPT.findall(text)]
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert [found for text in (*scripts, *styles, *pages.values()) for found in LOADING.findall(text)] == []
    api, notebook = pages[Path("reference/api/index.html")], pages[Path("notebook/index.html")]
    assert str(data_gen.make_data.__doc__).split("`")[0].split("\n")[0] in unescape(api)
    assert all(str(room.__doc__).split("\n")[0] in unescape(api) for room in (decode, heads, data_gen))
    assert 'id="decode.HeadPolicy.from_pretrained"' in api
    assert api.count('id="decode.HeadPolicy"') == 1
    pictures = re.findall(r'<img[^>]*src="data:image/svg\+xml;base64,([^"]+)"', notebook)
    bars, terminal = (b64decode(picture).decode() for picture in pictures)
    assert "prefers-color-scheme" in bars
    assert not re.search(r"jp-RenderedSVG[^{]*{[^}]*background", (ROOT / "docs/site.css").read_text()), "hides its text"
    assert "rich-terminal" in terminal
