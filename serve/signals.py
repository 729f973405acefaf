"""The policies' inputs from one draft step (law 4.3), for all rows at once, with one transfer to the host.

They are the same as in `decode.loop.signals`: signals of the untruncated distribution at temperature 1, and head scores
at the head's timing (laws 4.8 to 4.8c). All rows are at the same draft position, so a fed-time head
scores in each step the tokens of the step before.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data_gen.labels.scalars import scalars_of
from decode.loop.reading import nothing_of, top_prob
from decode.policies.base import AfterDraw, Policy
from heads.model.head import AcceptanceHead

Embedding = Callable[[Int[Tensor, " rows"]], Float[Tensor, "rows hidden"]]
_INFINITY = float("inf")


class BatchSignals:
    """Reads the signals of a batch, step after step of a round."""

    def __init__(self, embedding: Embedding) -> None:
        """Args:
        embedding: token ids -> the draft's input embeddings.
        """
        self._embedding = embedding
        self._before: tuple[dict[str, Tensor], Tensor] | None = None

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
        columns = self._columns(position, logits, hidden, token, policies)
        # float64 holds every id exactly
        values = torch.stack([token.double(), *(column.double() for column in columns.values())]).tolist()
        numbers = dict(zip(columns, values[1:], strict=True))
        return [int(value) for value in values[0]], [
            _row_signals(policy, position, row, numbers) for row, policy in enumerate(policies)
        ]

    def _columns(
        self, position: int, logits: Tensor, hidden: Tensor, token: Tensor, policies: Sequence[Policy]
    ) -> dict[str | AcceptanceHead, Float[Tensor, " rows"]]:
        """Signals by name and scores by head, if any policy reads them."""
        wanted = frozenset[str]().union(*(policy.signals for policy in policies))
        if not wanted:
            return {}
        logits = logits if logits.itemsize >= 4 else logits.float()
        scalars, token = scalars_of(logits, token.long()), token.long()
        columns: dict[str | AcceptanceHead, Tensor] = {
            "entropy": scalars["entropy"],
            "token_prob": scalars["log_token_prob"].exp(),
        }
        if "max_prob" in wanted:
            columns["max_prob"] = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        if "top_prob" in wanted:
            columns["top_prob"] = top_prob(logits)
        for head in dict.fromkeys(head for policy in policies for head in policy.heads):
            if head.timing != "fed":
                columns[head] = self._scored(head, hidden, scalars, token)
            elif position > 0 and self._before is not None:
                columns[head] = self._scored(head, hidden, *self._before)
        self._before = scalars, token
        return columns

    def _scored(
        self, head: AcceptanceHead, hidden: Tensor, scalars: dict[str, Tensor], token: Tensor
    ) -> Float[Tensor, " rows"]:
        """The head's logits for these tokens, which have these scalars."""
        return head(hidden, *head.inputs.among(scalars, lambda: self._embedding(token)))


def _row_signals(
    policy: Policy, position: int, row: int, numbers: dict[str | AcceptanceHead, list[float]]
) -> AfterDraw:
    """Signals of one row; those that its policy does not read are placeholders."""
    if not numbers:
        return nothing_of(position)
    fed, prefix, drawn = policy.fed_head, policy.prefix_head, policy.drawn_head
    return AfterDraw(
        position=position,
        entropy=numbers["entropy"][row],
        max_prob=numbers["max_prob"][row] if "max_prob" in numbers else 0.0,
        fed_logit=numbers[fed][row] if fed is not None and fed in numbers else _INFINITY,
        prefix_logit=numbers[prefix][row] if prefix is not None and prefix in numbers else 0.0,
        token_prob=numbers["token_prob"][row],
        drawn_logit=numbers[drawn][row] if drawn is not None and drawn in numbers else 0.0,
        top_prob=numbers["top_prob"][row] if "top_prob" in numbers else 0.0,
    )
