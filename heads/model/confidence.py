"""The confidence head inside a DSpark draft (`lm.features.dspark`), a prefix head of depth 0 (law 4.8c): as a head of
ours, and a head of ours in its place, in the format that engines load.

    confidence = sigmoid(proj . [h_i; W1[x_{i-1}]] + b)        of the state that gives place i its distribution

What is written back is the calibrated logit, (f + ln(w_rej / w_acc)) / T, folded into weight and bias, since engines
know of no calibration. The copy of the draft's directory differs from it in these numbers alone, and a card beside
them says what they were trained for.
"""

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heads.model.card import description
from heads.model.head import AcceptanceHead
from heads.model.provenance import Provenance
from lm.features.dspark import DSpark
from store.json_files import read_json
from store.shards import atomic_directory

CARD = "CONFIDENCE_HEAD.md"
"""The card, under a name that no draft's own file has."""
_PROJ = "confidence_head.proj"
_CHUNK_BYTES = 1 << 24


def confidence_head_of(draft: DSpark, provenance: Provenance | None = None) -> AcceptanceHead:
    """The draft's own confidence head as a prefix head; what it does not read of the state has weight 0.

    Raises:
        ValueError: the draft has none.
    """
    if draft.confidence_head is None:
        raise ValueError(
            f"the draft {draft.name_or_path} has no confidence head (enable_confidence_head is false); train a prefix "
            "head for it"
        )
    proj = draft.confidence_head.proj
    head = AcceptanceHead(draft.hidden_size, 0, "prefix", provenance=provenance)
    weight = proj.weight.detach().float().cpu()
    weight = functional.pad(weight, (0, draft.hidden_size - weight.shape[1]))
    head.load_state_dict({"out.weight": weight, "out.bias": proj.bias.detach().float().cpu()})
    return head.eval()


def write_confidence_head(head: AcceptanceHead, name: str, *, source: Path, out: Path) -> Path:
    """Copy a DSpark draft's directory with this head in the place of its confidence head; appears whole or not at all.

    Args:
        head: linear, of timing prefix, without scalars.
        name: what the card and messages call it.
        source: the directory of the draft.
        out: the new directory.

    Raises:
        FileNotFoundError: no draft there.
        ValueError: no DSpark draft with a confidence head, or another than the head was trained for; a head that its
            format cannot say; something else than such a copy stands at `out`.
    """
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is the draft itself, which would be changed; name another directory (--out)")
    if out.exists() and not (out / CARD).is_file():
        raise ValueError(f"{out} is there and is no export of a confidence head; name another directory (--out)")
    tensors = {tensor.name: tensor for tensor in _tensors(source)}
    weight, bias = (_found(tensors, f"{_PROJ}.{part}", source) for part in ("weight", "bias"))
    values = _folded(head, name, width=weight.shape[-1])
    with atomic_directory(out) as folder:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != CARD:
                shutil.copyfile(path, folder / path.name)
        for tensor, value in zip((weight, bias), values, strict=True):
            tensor.write(folder, value)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != CARD:
                spans = [tensor.span for tensor in (weight, bias) if tensor.file == path.name]
                _check_same(path, folder / path.name, spans)
        (folder / CARD).write_text(_card(head, name, source), encoding="utf-8")
    return out


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where a safetensors file has a tensor."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]
    """First byte, and the byte behind the last."""

    def write(self, folder: Path, value: Tensor) -> None:
        """Put numbers in the place of these."""
        data = value.to(_DTYPES[self.dtype]).contiguous().view(torch.uint8).numpy().tobytes()
        assert len(data) == self.span[1] - self.span[0], "as many numbers as there were"
        with (folder / self.file).open("r+b") as file:
            file.seek(self.span[0])
            file.write(data)


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def _tensors(source: Path) -> Iterator[_Stored]:
    """Every tensor of the safetensors files of a directory, by their headers."""
    if not source.is_dir():
        raise FileNotFoundError(f"no draft at {source}; pair.draft.path names the directory of a DSpark draft")
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            try:
                header: dict[str, Any] = json.loads(file.read(size))
            except ValueError as error:
                raise ValueError(f"{path} is no whole safetensors file ({error}); fetch the draft again") from error
        for name, facts in header.items():
            if name != "__metadata__":
                first, last = (8 + size + offset for offset in facts["data_offsets"])
                yield _Stored(
                    name=name, file=path.name, dtype=facts["dtype"], shape=tuple(facts["shape"]), span=(first, last)
                )


def _found(tensors: Mapping[str, _Stored], name: str, source: Path) -> _Stored:
    if name not in tensors:
        raise ValueError(
            f"the draft {source} has no {name} among its {len(tensors)} tensors, so there is no confidence head to "
            "replace; name a DSpark draft that has one as pair.draft"
        )
    if tensors[name].dtype not in _DTYPES:
        raise ValueError(
            f"{name} of {source} is stored as {tensors[name].dtype}; of {', '.join(_DTYPES)} alone it can be written"
        )
    return tensors[name]


def _folded(head: AcceptanceHead, name: str, *, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of the calibrated logit.

    Raises:
        ValueError: a head that is more than a linear function of what the draft's confidence head reads.
    """
    remedy = "export a linear prefix head without scalars, such as prefix-d0-w1 (heads.timings [prefix], depths [0])"
    if head.timing != "prefix" or head.depth or head.inputs.scalars or head.inputs.is_normalised:
        raise ValueError(f"the head {name} is {head.shape_name}, and a confidence head is one linear layer; {remedy}")
    if head.hidden_size < width:
        raise ValueError(
            f"the head {name} reads {head.hidden_size} numbers and this draft's confidence head {width}; export a head "
            "that was trained for this draft"
        )
    weight = head.out.weight.detach()
    if weight[:, width:].any():
        raise ValueError(
            f"the head {name} reads {head.hidden_size} numbers and this draft's confidence head the first {width} of "
            "them; engines give it no more: train the head for a draft whose Markov head is vanilla"
        )
    return weight[:, :width] / head.temperature, (head.out.bias.detach() + head.calibration_shift) / head.temperature


def _check_same(path: Path, copy: Path, spans: list[tuple[int, int]]) -> None:
    """Raise unless a copy has every byte of a file but those that were to change."""
    place = 0
    with path.open("rb") as file, copy.open("rb") as other:
        while chunk := file.read(_CHUNK_BYTES):
            pair = [bytearray(chunk), bytearray(other.read(len(chunk)))]
            for first, last in spans:
                for data in pair:
                    within = slice(max(first - place, 0), max(last - place, 0))
                    data[within] = bytes(len(data[within]))
            if pair[0] != pair[1]:
                raise ValueError(f"{copy} is no copy of {path}: the disk changed bytes, or somebody did; export again")
            place += len(chunk)
        if other.read(1):
            raise ValueError(f"{copy} is longer than {path}; export again")


def _card(head: AcceptanceHead, name: str, source: Path) -> str:
    """The card: which numbers differ, and what they were trained for."""
    config = read_json(source / "config.json", remedy="fetch the draft again")
    about = description(head.config, num_parameters=sum(parameter.numel() for parameter in head.parameters()))
    sampling = head.provenance.sampling
    fits = ", ".join(f"{key} {value}" for key, value in sampling.items()) or "unknown"
    return (
        f"# Confidence head of {source.name}, retrained\n\n"
        f"A copy of the DSpark draft `{source.name}` (block_size {config.get('block_size')}) in which "
        f"`{_PROJ}.weight` and `{_PROJ}.bias` are those of the head `{name}`, its calibration folded in; every other "
        "byte is the draft's. Engines that serve the draft serve the copy with the same flags.\n\n"
        f"Use it for sampling {fits}, with the target and for prompts such as those below: there its sigmoid is the "
        f"probability that a drafted token is accepted. Made by `acceptance-heads export --format dspark`.\n\n{about}\n"
    )
