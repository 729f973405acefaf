"""Online features: the frozen draft computes the hidden states of each batch, once for all heads.

Labels and scalars come from disk, as for cached features; the states equal stored ones up to the stored precision.
"""

from collections.abc import Mapping, Sequence

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from transformers import PreTrainedModel

from heads.batches.features import RATE, TARGET_PROB, Batch, Features, Row, with_states
from lm.forwards import hidden_states
from lm.signals import SCALARS


class DraftFeatures:
    """Computes the features of responses with the frozen draft."""

    def __init__(self, draft: PreTrainedModel) -> None:
        self.draft = draft.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, rows: Mapping[str, Sequence[Row]], device: torch.device) -> Batch:
        """The features of some rows by timing, on `device`; moves the draft there."""
        self.draft.to(device)
        return {timing: self._features(of_timing, timing, device) for timing, of_timing in rows.items()}

    def _features(self, rows: Sequence[Row], timing: str, device: torch.device) -> Features:
        if not rows:
            empty = torch.empty(0, device=device)
            hidden = empty.new_empty(0, self.draft.config.get_text_config().hidden_size, dtype=self.draft.dtype)
            numbers = dict.fromkeys((*SCALARS, RATE, TARGET_PROB), empty)
            return Features(hidden, numbers, empty, empty.long(), empty.long())
        is_fed = timing == "fed"
        # a fed-time state is that at the token itself; a drawn-time state is that of the position before
        read = [_mixed(row) if is_fed else row.response_ids[:-1] for row in rows]
        sequences = [[*row.prompt_ids, *ids] for row, ids in zip(rows, read, strict=True)]
        states = hidden_states(self.draft, sequences, [len(row.prompt_ids) - (not is_fed) for row in rows])
        parts = states.split([len(row.response_ids) for row in rows])
        hidden = torch.cat([part[row.drafted.to(part.device)] for part, row in zip(parts, rows, strict=True)])
        return apply_to_collection(with_states(rows, hidden), Tensor, Tensor.to, device)  # type: ignore[no-any-return]


def _mixed(row: Row) -> list[int]:
    """The mixed sequence Z: the draft's tokens at the drafted positions."""
    ids = torch.tensor(row.response_ids)
    ids[row.drafted] = row.numbers["token"].long()
    return ids.tolist()  # type: ignore[no-any-return]
