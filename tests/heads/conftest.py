import shutil
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from huggingface_hub import HfApi

from configs.schema import Config
from heads.training.command import train
from heads.training.trainer import quiet
from tests.toys.made_up import make_config, write_data


class Run(NamedTuple):
    config: Config
    results: dict[str, Any]
    output: str


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    """Lightning's advice on workers, folders and tree specs says nothing about these tests."""
    quiet()


@pytest.fixture(autouse=True)
def _no_warnings() -> None:
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 16 heads, for tests that change nothing of it."""
    kinds = {"timings": ("fed", "drawn"), "scalars": (False, True)}
    config = make_config(data_dir, tmp_path_factory.mktemp("trained"), **kinds, trainer={"logger": True})
    with warnings.catch_warnings(), redirect_stdout(StringIO()) as output:
        warnings.filterwarnings("ignore")
        results = train(config)
    return Run(config, results, output.getvalue())


@pytest.fixture
def copied(trained: Run, tmp_path: Path) -> Config:
    """The same run in a directory of this test: `heads.dir` is tmp_path/run."""
    directory = shutil.copytree(trained.config.heads.dir, tmp_path / "run")
    return replace(trained.config, heads=replace(trained.config.heads, dir=str(directory)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the hub, with a folder for each repository."""
    root = tmp_path / "hub"

    def upload(api, *, repo_id: str, folder_path: Path, **settings) -> SimpleNamespace:
        shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True)
        return SimpleNamespace(repo_url=f"https://huggingface.co/{repo_id}")

    def download(repo_id: str, **settings) -> str:
        if not (root / repo_id).is_dir():
            raise OSError(f"404: {repo_id}")
        return str(root / repo_id)

    monkeypatch.setattr(HfApi, "create_repo", lambda api, *, repo_id, **settings: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr("heads.model.files.snapshot_download", download)
    return root
