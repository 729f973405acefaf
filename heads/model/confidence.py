"""The confidence head of a DSpark draft (`lm.features.dspark`), a prefix head of depth 0 (law 4.8c): read as an
`AcceptanceHead`, or replaced by one in the format that engines load.

    confidence = sigmoid(proj . [h_i; W1[x_{i-1}]] + b)        h_i: the state that gives position i its distribution

Engines do not calibrate, so weight and bias are written with the calibration folded in: (f + ln(w_rej / w_acc)) / T.
Only these two tensors differ from the original draft; a card beside them names their training data.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from heads.model.card import description
from heads.model.files import read_safetensors
from heads.model.head import AcceptanceHead, Provenance
from lm.features.dspark import DSpark
from lm.sampling import FLOATS
from store.json_files import read_json
from store.shards import atomic_directory

CARD = "CONFIDENCE_HEAD.md"
"""File name of the card; no released draft has a file of this name."""
_PARTS = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def confidence_head_of(draft: DSpark, provenance: Provenance | None = None) -> AcceptanceHead:
    """The draft's confidence head as a prefix head, which ignores its other inputs; ValueError if it has none."""
    if draft.confidence_head is None:
        raise ValueError(
            f"the draft {draft.name_or_path} has no confidence head (enable_confidence_head is false); train a "
            "prefix head for it"
        )
    proj = draft.confidence_head.proj
    head = AcceptanceHead(draft.hidden_size, 0, "prefix", provenance=provenance)
    weight = functional.pad(proj.weight, (0, draft.hidden_size - proj.weight.shape[1]))
    head.load_state_dict({"out.weight": weight, "out.bias": proj.bias})
    return head.eval()


def write_confidence_head(head: AcceptanceHead, name: str, *, source: Path, out: Path) -> Path:
    """Copy a DSpark draft's directory, atomically, from `source` to `out`, with a linear prefix head as its confidence
    head; the card and messages call it `name`. ValueError for a draft without a confidence head or of another width, a
    head that is not linear in its inputs, or an `out` that is not such a copy.
    """
    if out.exists() and not (out / CARD).is_file():
        raise ValueError(f"{out} exists and is not an exported confidence head; name another directory (--out)")
    files = {path: read_safetensors(path) for path in sorted(source.glob("*.safetensors"))}
    values = dict(zip(_PARTS, _folded(head, name, width=_width_of(files, source)), strict=True))
    with atomic_directory(out) as folder:
        for path in (path for path in sorted(source.iterdir()) if path.is_file() and path.name != CARD):
            tensors = files.get(path, {})
            if replaced := {part: values[part].to(tensors[part].dtype) for part in _PARTS if part in tensors}:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata()
                save_file(tensors | replaced, folder / path.name, metadata=metadata)
            else:
                shutil.copyfile(path, folder / path.name)
        (folder / CARD).write_text(_card(head, name, source), encoding="utf-8")
    return out


def _width_of(files: Mapping[Path, Mapping[str, Tensor]], source: Path) -> int:
    stored = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    for name in _PARTS:
        if name not in stored:
            raise ValueError(
                f"the draft {source} has no tensor {name}, so it has no confidence head to replace; set "
                "pair.draft to a DSpark draft with one"
            )
        if stored[name].dtype not in FLOATS:
            raise ValueError(f"{name} of {source} has dtype {stored[name].dtype}; use a draft that stores it as floats")
    return stored[_PARTS[0]].shape[-1]


def _folded(head: AcceptanceHead, name: str, *, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of the calibrated logit; ValueError unless it is linear in the confidence head's inputs."""
    if head.timing != "prefix" or head.depth or head.inputs.scalars or head.inputs.is_normalised:
        raise ValueError(
            f"the head {name} is {head.shape_name}, but a confidence head is one linear layer; export a linear "
            "prefix head without scalars, such as prefix-d0-w1 (heads.timings [prefix], depths [0])"
        )
    weight = head.out.weight.detach()
    size = f"the head {name} has width {head.hidden_size}"
    if head.hidden_size < width:
        raise ValueError(
            f"{size}, but this draft's confidence head has {width}; export a head that was trained for this draft"
        )
    if weight[:, width:].any():
        raise ValueError(
            f"{size}, but engines pass a confidence head only the first {width} numbers; train the head for a "
            "draft whose Markov head is vanilla"
        )
    weight = weight[:, :width] / head.provenance.calibration_temperature
    return weight, head.calibrated_logit(head.out.bias.detach())


def _card(head: AcceptanceHead, name: str, source: Path) -> str:
    config = read_json(source / "config.json", remedy="fetch the draft again")
    about = description(head.config, num_parameters=head.num_parameters)
    fits = ", ".join(f"{key} {value}" for key, value in head.provenance.sampling.items()) or "unknown"
    return (
        f"# Confidence head of {source.name}, retrained\n\nA copy of the DSpark draft `{source.name}` "
        f"(block_size {config.get('block_size')}) in which `{_PARTS[0]}` and `{_PARTS[1]}` come from the head "
        f"`{name}`, with its calibration folded in; every other tensor is the original draft's. Engines that "
        f"serve the draft serve this copy with the same flags.\n\nUse it for sampling {fits}, with the target "
        "and the kind of prompts named below. There its sigmoid is the probability that a drafted token is "
        f"accepted. Made by `acceptance-heads export --format dspark`.\n\n{about}\n"
    )
