"""What a policy sees of one draft step (law 4.3).

Entropy, largest probability and token probability are those of the untruncated temperature-1 distribution (law 4.1).
Head scores (law 4.8):

    fed_logit      head(hidden state after y_{i-1} was fed, scalars of y_{i-1}): known before y_i is drawn; +inf at the
                   first token
    prefix_logit   head(hidden state that produced q_i, H(q_i)): known before y_i is drawn, and about whichever it will
                   be
    drawn_logit    head(hidden state that produced q_i, scalars of y_i): known once y_i is drawn
    confidence_logit                what a DSpark draft's own head says before y_i is drawn, as a prefix head would

    scalars of y_i = log q_i(y_i), H(q_i), … (`data_gen.labels.scalars.SCALARS`), embedding of y_i = its row of the
    draft's input embeddings; each only if the head takes it

Only what the policy names in `signals` is computed. The token is drawn in the same step, so that token and signals
travel together; a policy that stops before the draw is asked about distributions alone and its token is thrown away
unseen. `DeviceSignals` computes on the draft's device and reads everything with one host transfer; `HostSignals` does
the same for a draft on the CPU with numpy, since torch's calls on single rows would be a fifth of a small model's step.
"""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from data_gen.labels.scalars import scalars_of
from decode.loop.reading import (
    OfToken,
    Reader,
    nothing_of,
    numbers_of,
    others_among,
    places_of,
    scored,
    softmax,
    top_prob,
)
from decode.policies.base import AfterDraw, Policy
from heads.model.on_host import HostHead
from lm import DraftModel, Sampler, array_of

_INFINITY = float("inf")
_NOTHING = OfToken(0.0, 0.0, 0.0)
_ABSENT = {
    "entropy": 0.0,
    "max_prob": 0.0,
    "fed_logit": _INFINITY,
    "prefix_logit": 0.0,
    "token_prob": 0.0,
    "drawn_logit": 0.0,
    "top_prob": 0.0,
    "confidence_logit": 0.0,
}


def reader_of(policy: Policy, model: DraftModel, made: Reader | None = None) -> "HostSignals | DeviceSignals":
    """The reader for the device that the draft is on.

    Args:
        policy: names its signals, and the heads that score tokens.
        model: the draft; its `hidden` must be kept if there are heads.
        made: for the same policy and model, before; it serves until the draft is moved.

    Raises:
        ValueError: a signal that does not exist, a head whose width is not the draft's.
    """
    if isinstance(made, HostSignals | DeviceSignals) and made.places == places_of(policy, model):
        return made
    return (HostSignals if model.device.type == "cpu" else DeviceSignals)(policy, model)


class HostSignals(Reader):
    """`SignalReader` of a draft on the CPU."""

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        super().__init__(policy, model)
        self._has_entropy, self._has_top = "entropy" in self.wanted, "top_prob" in self.wanted
        self._others = others_among(self.wanted)
        scores = [
            None if head is None else HostHead(head, names=(*OfToken._fields, *self._others)).score
            for head in (self.fed, self.prefix, self.drawn)
        ]
        self._score_fed, self._score_prefix, self._score_drawn = scores
        self._newest: tuple[tuple[float, ...], int] = _NOTHING, 0
        """The newest token and what heads read of it, which a fed-time head scores in the next step."""

    def draw(
        self,
        position: int,
        logits: Float[Tensor, " vocab"],
        q: Float[Tensor, " vocab"],
        draws: Sampler,
        *,
        row: int = -1,
        probs: Float[Tensor, " vocab"] | None = None,
    ) -> tuple[int, AfterDraw]:
        token_id = draws.token(q)
        return token_id, self._read(position, logits, token_id, row, probs) if self.asked else nothing_of(position)

    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        return self._read(position, logits, token_id, row, None) if self.asked else nothing_of(position)

    def _read(self, position: int, logits: Tensor, token_id: int, row: int, probs: Tensor | None) -> AfterDraw:
        numbers = self._of_token(logits, probs, token_id) if self.needs_distribution else _NOTHING
        fed_logit, prefix_logit, drawn_logit = _INFINITY, 0.0, 0.0
        if self.has_heads:
            assert self.model.hidden is not None, "a head scores hidden states: the draft must keep them"
            hidden = array_of(self.model.hidden)[row]
            read = (*numbers, *self._by_formula(logits, token_id)) if self._others else numbers
            if self._score_fed is not None:
                if position > 0:
                    fed_logit = self._score_fed(hidden, *self._newest)
                self._newest = read, token_id
            if self._score_prefix is not None:
                prefix_logit = self._score_prefix(hidden, read)
            if self._score_drawn is not None:
                drawn_logit = self._score_drawn(hidden, read, token_id)
        token_prob = math.exp(numbers.log_token_prob)
        of_top = top_prob(logits if logits.itemsize >= 4 else logits.float()).item() if self._has_top else 0.0
        confidence = 0.0 if self.confidence_of is None else self.confidence_of.confidence().item()
        return AfterDraw(
            *(position, numbers.entropy, numbers.max_prob, fed_logit, prefix_logit),
            *(token_prob, drawn_logit, of_top, confidence),
        )

    def _by_formula(self, logits: Tensor, token_id: int) -> list[float]:
        logits = logits if logits.itemsize >= 4 else logits.float()
        columns = scalars_of(logits[None], torch.tensor([token_id]), self._others)
        return [column.item() for column in columns.values()]

    def _of_token(self, logits: Tensor, probs: Tensor | None, token_id: int) -> OfToken:
        """log q(v) = logit(v) - log_total; log_total is had from the most probable token, whose probability is never
        0.
        """
        row, weights = array_of(logits), array_of(softmax(logits) if probs is None else probs)
        best = weights.argmax()
        max_prob = weights.item(best)
        log_total = row.item(best) - math.log(max_prob)
        entropy = 0.0
        if self._has_entropy:
            with np.errstate(invalid="ignore"):
                mean = float(weights.dot(row))
            # an impossible token has logit -inf, and adds nothing
            if mean != mean:
                mean = float(weights.dot(np.maximum(row, np.finfo(row.dtype).min)))
            entropy = max(log_total - mean, 0.0)  # rounding would bring near-certain tokens below 0
        return OfToken(entropy, max_prob, row.item(token_id) - log_total)


class DeviceSignals(Reader):
    """`SignalReader` of a draft on an accelerator: nothing waits for the device but the one transfer at the end."""

    _newest: tuple[dict[str, Tensor], Tensor]
    """The newest token and its numbers, which a fed-time head scores in the next step."""

    @torch.inference_mode()
    def draw(
        self,
        position: int,
        logits: Float[Tensor, " vocab"],
        q: Float[Tensor, " vocab"],
        draws: Sampler,
        *,
        row: int = -1,
        probs: Float[Tensor, " vocab"] | None = None,
    ) -> tuple[int, AfterDraw]:
        token_id, drawn = self._read(position, logits, draws.draw(q), row)
        if token_id == len(q):
            raise ValueError(
                "a distribution to draw from is not finite; load the model in float32 or check its weights"
            )
        return token_id, drawn

    @torch.inference_mode()
    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        return self._read(position, logits, torch.tensor([token_id], device=logits.device), row)[1]

    def _read(self, position: int, logits: Tensor, token: Tensor, row: int) -> tuple[int, AfterDraw]:
        if not self.asked:
            return int(token), nothing_of(position)
        known = token.clamp(max=len(logits) - 1)  # a distribution that is not finite draws an id beyond the last
        columns = numbers_of(logits, known, self.wanted) if self.needs_distribution else {}
        if self.confidence_of is not None:
            columns["confidence_logit"] = self.confidence_of.confidence()
        if self.has_heads:
            assert self.model.hidden is not None, "a head scores hidden states: the draft must keep them"
            hidden = self.model.hidden[row]
            if self.fed is not None and position > 0:
                columns["fed_logit"] = scored(self.fed, hidden, *self._newest)
            if self.prefix is not None:
                columns["prefix_logit"] = scored(self.prefix, hidden, columns, known)
            if self.drawn is not None:
                columns["drawn_logit"] = scored(self.drawn, hidden, columns, known)
            self._newest = columns, known
        names = [name for name in columns if name in self.asked]
        # as floats, which hold every id below 2^24 exactly
        values = torch.cat(
            [column.to(torch.float32) for column in (token, *(columns[name] for name in names))]
        ).tolist()
        return int(values[0]), AfterDraw(position=position, **(_ABSENT | dict(zip(names, values[1:], strict=True))))
