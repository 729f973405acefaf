"""The drafts of a split, with all that a confidence can be made of: what the data keeps of them, read through the
draft's output head, and no model else.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.batches.features import RATE, Features, of_timing
from heads.batches.module import FeatureData
from heads.measures.histogram import Histogram
from heads.measures.survival import by_place
from heads.model.head import AcceptanceHead
from lm.features.dspark import DSpark
from store.progress import Bar

Heads = Mapping[str, AcceptanceHead]
"""Prefix heads by name."""


class Predicted(NamedTuple):
    """Predictions of one kind for the tokens of a split, and what they are of."""

    logit: Float[Tensor, " tokens"]
    label: Float[Tensor, " tokens"]


class Drafts:
    """Every draft of a split, one after the other.

    Attributes:
        columns: acceptance_rate, acceptance_prob, log_token_prob, entropy, max_prob and confidence_logit of each token.
        logits: calibrated logit of each head, by its name.
        lengths: tokens of each draft.
        num_places: places of a block.
    """

    def __init__(
        self,
        columns: Mapping[str, Float[Tensor, " tokens"]],
        logits: Mapping[str, Float[Tensor, " tokens"]],
        lengths: Int[Tensor, " drafts"],
        num_places: int,
    ) -> None:
        self.columns, self.logits, self.lengths, self.num_places = columns, logits, lengths, num_places

    @classmethod
    @torch.inference_mode()
    def of(cls, data: FeatureData, split: str, draft: DSpark, heads: Heads) -> "Drafts":
        """Read a split."""
        columns: list[dict[str, Tensor]] = []
        logits: list[dict[str, Tensor]] = []
        lengths = []
        for batch in Bar(data.loader(split), desc=f"read {split}", unit="batches"):
            features = of_timing(batch, "prefix")
            hidden = features.hidden.float()
            distribution = draft.logits(hidden.to(draft.device, draft.dtype)).float().softmax(-1)
            columns.append(
                {
                    "max_prob": distribution.amax(-1).cpu(),
                    "confidence_logit": draft.confidence(hidden.to(draft.device, draft.dtype)).float().cpu(),
                    "acceptance_prob": batch["drawn"].acceptance_prob.float(),
                    **{name: features.scalars[name].float() for name in (RATE, "log_token_prob", "entropy")},
                }
            )
            logits.append({name: _calibrated(head, features) for name, head in heads.items()})
            lengths.append(features.row_lengths)
        return cls(_joined(columns), _joined(logits), torch.cat(lengths), draft.block_size)

    @cached_property
    def place(self) -> Int[Tensor, " tokens"]:
        """Place of each token in its draft, from 0."""
        firsts = (self.lengths.cumsum(0) - self.lengths).repeat_interleave(self.lengths)
        return torch.arange(len(firsts)) - firsts

    def histograms(self, predicted: Predicted) -> tuple[Histogram, Histogram]:
        """(tokens by place, weighed by how often verification looks at them; survival by place), from `by_place`."""
        return by_place(
            predicted.logit[None],
            label=predicted.label[None],
            acceptance_prob=self.columns["acceptance_prob"],
            row_lengths=self.lengths,
            num_places=self.num_places,
        )

    def padded(self, name: str) -> Float[np.ndarray, "draft place"]:
        """A column, draft by draft; NaN where a draft has no token."""
        result = np.full((len(self.lengths), self.num_places), np.nan)
        owners = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        result[owners.numpy(), self.place.numpy()] = self.columns[name].numpy()
        return result


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _calibrated(head: AcceptanceHead, features: Features) -> Float[Tensor, " tokens"]:
    scalars = features.columns(head.inputs.scalars) if head.inputs.scalars else None
    logit: Tensor = head.calibrated_logit(head(features.hidden, scalars))
    return logit.float()
