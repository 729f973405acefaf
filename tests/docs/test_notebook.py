"""The notebook of docs runs from its own folder, from nothing, to its last assertion; its outputs suit a site."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/notebook.ipynb"
TRIO = Path("checkpoints/tiny")
MAX_BYTES = 200_000


def codes(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch):
    """A run of the notebook in a folder, in a kernel that imports this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    return lambda at: NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(at)}}).execute()


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


@pytest.mark.slow
def test_the_notebook_runs_from_nothing_to_the_targets_text_and_says_what_is_missing_elsewhere(execute, tmp_path: Path):
    with pytest.raises(CellExecutionError, match="start the notebook inside the repository"):
        execute(tmp_path)
    shutil.copytree(ROOT / TRIO, tmp_path / TRIO)
    (tmp_path / "docs").mkdir()
    shown = printed(codes(nbformat.read(NOTEBOOK, as_version=4))[-1])
    ran = execute(tmp_path / "docs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "docs", "runs"]
    assert list((tmp_path / "docs").iterdir()) == []
    exported = tmp_path / "runs/notebook/heads/exported"
    assert {path.parent.name.partition("+")[0] for path in exported.glob("*/config.json")} == {"drawn", "fed"}
    assert all('"max_rejection_prob"' in path.read_text() for path in exported.glob("*/config.json"))
    assert "class=" in (tmp_path / "runs/notebook/generation.svg").read_text()
    assert printed(codes(ran)[-1]) == shown, "the target's greedy text is not the one that the page shows"


def test_outputs_are_there_small_and_name_no_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert text == nbformat.writes(notebook) + "\n", "not as nbformat writes it"
    assert len(text.encode()) <= MAX_BYTES
    assert [cell.execution_count for cell in codes(notebook)] == list(range(1, len(codes(notebook)) + 1))
    outputs = [output for cell in codes(notebook) for output in cell.outputs]
    assert not {output.output_type for output in outputs} - {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}  # no progress
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 2
    assert re.findall(r"/(?:home|root|tmp|work|Users)/[\w./-]*", text) == []
