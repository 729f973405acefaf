import warnings
from pathlib import Path

import pytest

from heads.training.trainer import quiet
from tests.toys.made_up import write_data


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Lightning's advice on workers, folders and tree specs says nothing about these tests."""
    quiet()
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))
