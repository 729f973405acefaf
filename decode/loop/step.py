"""One draft step of several rows, on the device of the draft: for chains on an accelerator, batches, and vLLM's plugin.

`decode.loop.signals.HostSignals` does the same for one row on the CPU, in numpy.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decode.policies.base import AfterDraw, Policy, timing_of
from heads.model.head import AcceptanceHead
from lm.signals import POSITION, Normalised, signals_of

# signals of `lm.signals` that policies read by the same name
_READ = {"entropy", "max_prob", "top_prob", "logit_token_prob"}
NO_STATES = "a head scores hidden states: the draft must keep them"
Columns = dict[str | AcceptanceHead, Float[Tensor, " rows"]]
"""Numbers of each row, by the name of a signal or by the head."""


class DraftSteps:
    """The draft steps of a round of several rows, each with one transfer to the host.

    All rows are at the same draft position, so a fed-time head scores in each step the tokens of the step before.
    """

    # signals and tokens of the step before; None: it is the first
    _previous: tuple[dict[str, Float[Tensor, " rows"]], Int[Tensor, " rows"]] | None = None

    def __init__(self, embedding: Callable[[Int[Tensor, " rows"]], Float[Tensor, "rows hidden"]]) -> None:
        """`embedding`: token ids -> the draft's input embeddings."""
        self._embedding = embedding

    @torch.inference_mode()
    def read(
        self,
        position: int,
        q: Normalised,
        hidden: Float[Tensor, "rows hidden"] | None,
        token: Int[Tensor, " rows"],
        *,
        policies: Sequence[Policy],
        nums_before: Sequence[int],
        confidence: Float[Tensor, " rows"] | None = None,
    ) -> tuple[list[int], list[AfterDraw]]:
        """The tokens of a step, and the signals for each row's policy.

        Args:
            position: draft position of the tokens, from 0.
            q: of the draft's logits [rows, vocab], before any sampling transform.
            hidden: the states that gave the logits, if a policy has heads.
            token: drafted by each row; an id beyond the last is returned as it is.
            policies: of each row.
            nums_before: tokens of each row's response before the round.
            confidence: the draft's own logits of acceptance, if a policy reads them.
        """
        heads = dict.fromkeys(head for policy in policies for head in policy.heads)
        names = computed(heads, frozenset[str]().union(*(policy.signals for policy in policies)))
        if not names and not heads and confidence is None:
            return token.tolist(), [AfterDraw(position)] * len(policies)
        count = _counts(position, nums_before, token.device) if POSITION in names else None
        if position == 0:
            self._previous = None
        known = token.long().clamp(max=q.logits.shape[-1] - 1)  # a row that is not finite draws an id beyond the last
        columns = dict(self.draft_step(q, hidden, known, heads=heads, names=names, count=count))
        if confidence is not None:
            columns["confidence_logit"] = confidence
        # as float32, which holds every id below 2^24 exactly: MPS has no float64
        tokens, *values = torch.stack([column.float() for column in (token, *columns.values())]).tolist()
        signals = []
        for row, policy in enumerate(policies):
            numbers = {name: column[row] for name, column in zip(columns, values, strict=True)}
            signals.append(_after_draw(position, numbers, policy))
        return list(map(int, tokens)), signals

    def draft_step(
        self,
        q: Normalised,
        hidden: Float[Tensor, "rows hidden"] | None,
        token: Int[Tensor, " rows"],
        *,
        heads: Iterable[AcceptanceHead],
        names: Sequence[str],
        count: Int[Tensor, " rows"] | None,
    ) -> Columns:
        """Signals of the drawn tokens, by `names`, and logits of the heads, by head, without a transfer; `count`:
        tokens of each row's response before this one, if `POSITION` is a signal.
        """
        columns = signals_of(q, token, names, count)
        scores: Columns = {}
        for head in heads:
            assert hidden is not None, NO_STATES
            source = self._previous if head.timing == "fed" else (columns, token)
            if source is not None:
                known, ids = source
                embedding = self._embedding(ids) if head.inputs.embedding else None
                scores[head] = head(hidden, head.inputs.stacked(known), embedding)
        self._previous = columns, token
        return columns | scores

    def keep(self, rows: Sequence[int]) -> None:
        """Continue the round with these rows of the step before."""
        if self._previous is not None:
            columns, token = self._previous
            index = torch.tensor(rows, device=token.device)
            self._previous = {name: column[index] for name, column in columns.items()}, token[index]


def _counts(position: int, nums_before: Sequence[int], device: torch.device) -> Int[Tensor, " rows"]:
    """Tokens of each row's response before this one: numbers of launches, without a transfer."""
    return torch.cat([torch.full((1,), position + num, device=device) for num in nums_before])


def computed(heads: Iterable[AcceptanceHead], signals: frozenset[str]) -> list[str]:
    """Names of the signals (`lm.signals`) that are computed for these heads, and for a policy of these signals."""
    names = {name for head in heads for name in head.inputs.scalars} | signals & _READ
    if "token_prob" in signals:
        names.add("log_token_prob")
    return sorted(names)


def _after_draw(position: int, numbers: Mapping[str | AcceptanceHead, float], policy: Policy) -> AfterDraw:
    """The signals of a token as a policy gets them."""
    known = {name: number for name, number in numbers.items() if name in AfterDraw._fields}
    known |= {f"{timing_of(head)}_logit": numbers[head] for head in policy.heads if head in numbers}
    return AfterDraw(position=position, token_prob=math.exp(numbers.get("log_token_prob", -math.inf)), **known)
