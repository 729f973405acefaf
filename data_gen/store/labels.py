"""Labels on disk: every number of a shard once, in labels/SPLIT-NNNNN.safetensors. Hidden states are alone in
features/TIMING/SPLIT-NNNNN.safetensors, as the tensor `hidden`.

    token [token] int32            Y_i
    acceptance_prob, target_prob (p_i(Y_i)), log_q, every scalar of `stored_scalars`, acceptance_rate
                                   [token] float32, numbers of Y_i
    row_offsets [rows + 1] int64   where each response starts
    is_drafted [token of every mixing] bool
                                   true where Z_i came from Y, so where fed-time heads take the loss; mixings of a
                                   response are neighbours

Hidden states, [token, hidden] in data.feature_dtype: `drawn` are those that produced q_i, over prompt + X_<i; `fed` are
those after prompt + Z_<=i was fed, in the order of is_drafted. acceptance_rate is absent from a sequential run whose
labels are the target's. With a feature draft (`data_gen.labels.chains`) a response has the tokens of all its drafts,
draft after draft, all of them drafted, and one more tensor: draft_lengths [draft] int64.
"""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from data_gen.labels.layout import Layout
from lm.signals import stored_scalars

_NUMBERS = ("acceptance_prob", "log_q", *stored_scalars(), "acceptance_rate")


def to_safetensors(columns: Mapping[str, Tensor], layout: Layout) -> bytes:
    """The file of one shard's labels, from columns [token] (from_target: [token of every mixing]); without from_target
    all tokens are drafted.
    """
    tensors = {name: columns[name].float() for name in _NUMBERS if name in columns}
    tensors |= {
        "target_prob": columns["log_p"].float().exp().clamp(max=1),
        "token": columns["draft_ids"].to(torch.int32),
        "is_drafted": ~columns.get("from_target", torch.zeros(layout.num_tokens, dtype=torch.bool)),
        "row_offsets": torch.tensor(layout.offsets, dtype=torch.int64),
    }
    if "draft_lengths" in columns:
        tensors["draft_lengths"] = columns["draft_lengths"]
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Every tensor of a shard of labels or features."""
    return safetensors.torch.load_file(path)
