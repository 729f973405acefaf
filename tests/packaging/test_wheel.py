"""The wheel holds everything, and works where there is no checkout, in an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
MODELS = [ROOT / "checkpoints/tiny", ROOT / "checkpoints/smollm2"]
MADE = ROOT / "checkpoints/smollm2/target"
"""What `make smollm2` leaves in a checkout."""
# With PYTHONPATH, the checkout would be importable, and pip would take it for the installed project.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
IMPORT_EVERYTHING = """
import sys
from importlib import import_module
from importlib.metadata import files
paths = files("acceptance-heads")
modules = [path.with_suffix("") for path in paths if path.suffix == ".py" and path.stem != "__main__"]
for module in modules:
    parts = module.parts[:-1] if module.name == "__init__" else module.parts
    place = import_module(".".join(parts)).__file__
    assert place.startswith(sys.prefix), place
print(len(modules))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves its work beside the source, and takes up what it left there before."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if name == "__pycache__" or Path(folder, name) == MADE}

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in [*PACKAGES, *MODELS]:
        shutil.copytree(path, source / path.relative_to(ROOT), ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out), str(source))
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel in it. Dependencies are those of this environment."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip("--python", str(environment), "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel))
    # A folder named in a .pth file is searched, but its own .pth files are not read: this environment's editable
    # install stays behind.
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text("\n".join(sorted(installed)) + "\n")
    return environment / "bin/python"


def pip(*arguments: str) -> None:
    """Run this environment's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], env=ENVIRONMENT, check=True)


def run(python: Path, *arguments: str, at: Path) -> str:
    """What the installed command prints, run in the directory `at`."""
    done = subprocess.run([python, *arguments], cwd=at, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_every_package_and_the_trio_is_in_the_wheel(wheel: Path):
    files = [path for folder in [*PACKAGES, *MODELS] for path in folder.rglob("*") if path.is_file()]
    wanted = [path for path in files if "__pycache__" not in path.parts and MADE not in path.parents]
    names = {path.relative_to(ROOT).as_posix() for path in [*wanted, ROOT / "train.py"]}
    some = {"configs/tiny.yaml", "evaluation/report/page.html", "checkpoints/tiny/micro/model.safetensors"}
    assert some | {"checkpoints/smollm2/draft/model.safetensors"} <= names
    missing = names - set(ZipFile(wheel).namelist())
    assert not missing


def test_every_module_of_the_wheel_can_be_imported(python: Path, tmp_path: Path):
    assert int(run(python, "-c", IMPORT_EVERYTHING, at=tmp_path)) > 100


@pytest.mark.parametrize("module", ["data_gen", "train", "heads", "decode", "evaluation"])
def test_every_command_answers_help(python: Path, tmp_path: Path, module: str):
    assert "--help" in run(python, "-m", module, "--help", at=tmp_path)


def test_the_first_command_of_the_demo_runs_from_a_name(python: Path, tmp_path: Path):
    sizes = ["--data.num_train", "4", "--data.num_dev", "2", "--data.num_test", "2", "--data.max_new_tokens", "16"]
    printed = run(python, "-m", "data_gen", "--config", "tiny", *sizes, at=tmp_path)
    assert "\ndata/tiny: 8 rows" in printed
    assert (tmp_path / "data/tiny/rows/train-00000.parquet").is_file()
