"""The policies' inputs from one draft step (law 4.3), for all rows at once, with one transfer to the host.

They are the same as in `decode.loop.signals`: signals of the untruncated distribution at temperature 1, and head scores
at the head's timing (laws 4.8 to 4.8c). All rows are at the same draft position, so a fed-time head
scores in each step the tokens of the step before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decode.loop.signals import after_draw
from decode.policies.base import AfterDraw, Policy
from heads.model.head import AcceptanceHead
from lm.signals import SCALARS, signals_of

Embedding = Callable[[Int[Tensor, " rows"]], Float[Tensor, "rows hidden"]]


class BatchSignals:
    """Reads the signals of a batch, step after step of a round."""

    def __init__(self, embedding: Embedding) -> None:
        """Args:
        embedding: token ids -> the draft's input embeddings.
        """
        self._embedding = embedding
        self._previous: tuple[Mapping[Any, Tensor], Tensor] | None = None

    @torch.inference_mode()
    def read(
        self,
        position: int,
        logits: Float[Tensor, "rows vocab"],
        hidden: Float[Tensor, "rows hidden"],
        token: Int[Tensor, " rows"],
        *,
        policies: Sequence[Policy],
    ) -> tuple[list[int], list[AfterDraw]]:
        """The tokens of a step, and the signals for each row's policy.

        Args:
            position: draft position of the tokens, from 0.
            logits: the draft's logits, before any sampling transform.
            hidden: the hidden states that gave the logits.
            token: drafted token of each row.
            policies: policy of each row.
        """
        names = frozenset[str]().union(*(policy.signals for policy in policies))
        if not names:
            return token.tolist(), [AfterDraw(position)] * len(policies)
        token = token.long()
        columns: dict[Any, Tensor] = {**signals_of(logits, token, [*SCALARS, *(names & {"max_prob", "top_prob"})])}
        for head in dict.fromkeys(head for policy in policies for head in policy.heads):
            if head.timing != "fed":
                columns[head] = self._scored(head, hidden, columns, token)
            elif position > 0 and self._previous is not None:
                columns[head] = self._scored(head, hidden, *self._previous)
        self._previous = columns, token
        # float64 holds every id exactly
        tokens, *rows = torch.stack([token.double(), *(column.double() for column in columns.values())]).tolist()
        numbers = dict(zip(columns, rows, strict=True))
        return [int(token_id) for token_id in tokens], [
            _row_signals(policy, position, row, numbers) for row, policy in enumerate(policies)
        ]

    def _scored(
        self, head: AcceptanceHead, hidden: Tensor, columns: Mapping[Any, Tensor], token: Tensor
    ) -> Float[Tensor, " rows"]:
        """The head's logits for these tokens, which have these scalars."""
        return head(hidden, *head.inputs.among(columns, lambda: self._embedding(token)))


def _row_signals(
    policy: Policy, position: int, row: int, numbers: Mapping[str | AcceptanceHead, list[float]]
) -> AfterDraw:
    """Signals of one row, with the scores of its policy's own heads."""
    signals = {name: column[row] for name, column in numbers.items() if isinstance(name, str)}
    heads = {"fed_logit": policy.fed_head, "prefix_logit": policy.prefix_head, "drawn_logit": policy.drawn_head}
    scores = {name: numbers[head][row] for name, head in heads.items() if head is not None and head in numbers}
    return after_draw(position, signals | scores)
