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

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import safetensors.torch
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from data_gen.responses.exchange import Exchange
from lm.signals import stored_scalars

_NUMBERS = ("acceptance_prob", "log_q", *stored_scalars(), "acceptance_rate")


@dataclass(frozen=True)
class Layout:
    """Rows of `lengths` positions, one after the other.

    Worked example: lengths (2, 3) have offsets (0, 2, 5); `positions([1, 0])` is 2 3 4 0 1, `order(2)` is 0 1 0 1 2 3 4
    2 3 4.
    """

    lengths: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Row i covers offsets[i] to offsets[i + 1]; rows + 1 numbers."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        """Number of positions in all rows."""
        return self.offsets[-1]

    def positions(self, rows: Sequence[int]) -> Int[Tensor, " token"]:
        """Flat positions of some rows, in the order of `rows`."""
        parts = [torch.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def order(self, times: int) -> Int[Tensor, " token"]:
        """Flat positions such that values[order] holds each row `times` times before the next."""
        rows = [row for row in range(len(self.lengths)) for _ in range(times)]
        return self.positions(rows)

    def rows_with(self, mask: Bool[Tensor, " token"]) -> dict[int, int]:
        """Row with a true position -> the first such position, counted from the row's start."""
        first: dict[int, int] = {}
        for position in mask.nonzero().squeeze(-1).tolist():
            row = bisect_right(self.offsets, position) - 1
            first.setdefault(row, position - self.offsets[row])
        return first

    def repeated(self, times: int) -> "Layout":
        """Each row `times` times before the next: the layout of several mixings."""
        return Layout(tuple(length for length in self.lengths for _ in range(times)))


def layout_of(exchanges: Sequence[Exchange]) -> Layout:
    """The layout of some exchanges, with one position per response token."""
    return Layout(tuple(len(exchange.response_ids) for exchange in exchanges))


def to_safetensors(columns: Mapping[str, Tensor], layout: Layout) -> bytes:
    """The file of one shard's labels, from columns [token]; without from_target all tokens are drafted."""
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
