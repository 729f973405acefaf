"""The confidence head inside a DSpark draft (`lm.features.dspark`), a prefix head of depth 0 (law 4.8c): as a head of
ours, and a head of ours in its place, in the format that engines load.

    confidence = sigmoid(proj . [h_i; W1[x_{i-1}]] + b)        of the state that gives place i its distribution

What is written back is the calibrated logit, (f + ln(w_rej / w_acc)) / T, folded into weight and bias, since engines
know of no calibration. The copy of the draft's directory differs from it in these two tensors alone, and a card beside
them says what they were trained for.
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
from heads.model.head import AcceptanceHead
from heads.model.provenance import Provenance
from lm.features.dspark import DSpark
from lm.finite import FLOATS
from store.json_files import read_json
from store.shards import atomic_directory

CARD = "CONFIDENCE_HEAD.md"
"""The card, under a name that no draft's own file has."""
_PARTS = ("confidence_head.proj.weight", "confidence_head.proj.bias")


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
    if not source.is_dir():
        raise FileNotFoundError(f"no draft at {source}; pair.draft.path names the directory of a DSpark draft")
    files = {path: read_safetensors(path) for path in sorted(source.glob("*.safetensors"))}
    width = _confidence_of(files, source).shape[-1]
    values = dict(zip(_PARTS, _folded(head, name, width=width), strict=True))
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


def _confidence_of(files: Mapping[Path, Mapping[str, Tensor]], source: Path) -> Tensor:
    """The weight of the draft's own confidence head."""
    stored = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    for name in _PARTS:
        if name not in stored:
            raise ValueError(
                f"the draft {source} has no {name} among its {len(stored)} tensors, so there is no confidence head to "
                "replace; name a DSpark draft that has one as pair.draft"
            )
        if stored[name].dtype not in FLOATS:
            raise ValueError(f"{name} of {source} is {stored[name].dtype}; name a draft that stores it as floats")
    return stored[_PARTS[0]]


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


def _card(head: AcceptanceHead, name: str, source: Path) -> str:
    """The card: which numbers differ, and what they were trained for."""
    config = read_json(source / "config.json", remedy="fetch the draft again")
    about = description(head.config, num_parameters=sum(parameter.numel() for parameter in head.parameters()))
    sampling = head.provenance.sampling
    fits = ", ".join(f"{key} {value}" for key, value in sampling.items()) or "unknown"
    return (
        f"# Confidence head of {source.name}, retrained\n\n"
        f"A copy of the DSpark draft `{source.name}` (block_size {config.get('block_size')}) in which "
        f"`{_PARTS[0]}` and `{_PARTS[1]}` are those of the head `{name}`, its calibration folded in; every other "
        "tensor is the draft's. Engines that serve the draft serve the copy with the same flags.\n\n"
        f"Use it for sampling {fits}, with the target and for prompts such as those below: there its sigmoid is the "
        f"probability that a drafted token is accepted. Made by `acceptance-heads export --format dspark`.\n\n{about}\n"
    )
