"""What is installed can be named from anywhere, and a local file or directory of the same name wins."""

import shutil
from pathlib import Path

import pytest

from configs import Config
from configs.command import run
from configs.shipped import NAMES

ROOT = Path(__file__, "../../..").resolve()
PAIR = ["--pair.target.path", "checkpoints/tiny/target", "--pair.draft.path", "hub/draft"]


def show(config: Config) -> Config:
    """Return what was parsed."""
    return config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", ["tiny", "tiny.yaml", "configs/tiny.yaml"])
def test_an_experiment_is_named_from_any_directory(given: str):
    assert run({"show": show}, argv=["show", "--config", given]).data.dir == "data/tiny"


def test_every_yaml_of_the_checkout_has_a_name():
    assert set(NAMES) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    for name in NAMES:
        assert run({"show": show}, argv=["show", "--config", name]).data.dir == f"data/{name}"


@pytest.mark.parametrize("given", ["tiny", "configs/tiny.yaml"])
def test_a_local_file_of_that_name_wins(given: str, elsewhere: Path):
    path = elsewhere / given
    path.parent.mkdir(exist_ok=True)
    path.write_text("pair:\n  target: {path: mine}\n  draft: {path: my-draft}\n")
    assert run({"show": show}, argv=["show", "--config", given]).pair.target.path == "mine"


@pytest.mark.parametrize(("given", "meant"), [("tinny", ["tiny"]), ("other/tiny.yaml", ["tiny"]), ("elsewhere", NAMES)])
def test_a_name_that_is_not_shipped_is_refused_with_those_that_are(
    given: str, meant: list[str], capsys: pytest.CaptureFixture
):
    with pytest.raises(SystemExit, match="2"):
        run({"show": show}, argv=["show", "--config", given])
    error = capsys.readouterr().err
    assert given in error
    assert all(name in error for name in meant)


def test_the_trio_is_the_installed_one_unless_there_is_a_local_one(elsewhere: Path):
    parsed = run({"show": show}, argv=["show", *PAIR]).pair
    assert (parsed.target.path, parsed.draft.path) == (str(ROOT / "checkpoints/tiny/target"), "hub/draft")
    shutil.copytree(ROOT / "checkpoints/tiny/micro", elsewhere / "checkpoints/tiny/target")
    assert run({"show": show}, argv=["show", *PAIR]).pair.target.path == "checkpoints/tiny/target"
