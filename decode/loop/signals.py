"""What a policy sees of one draft step (law 4.3): signals of the distribution q_i and of its token y_i
(`lm.signals`), and the scores of heads.

Every head reads the hidden state that produced q_i, which is the state after y_{i-1}. The timings differ in scalars:

    fed_logit       those of y_{i-1}
    drawn_logit     those of y_i
    prefix_logit    those of q_i, such as its entropy

Only the signals that the policy names are computed. The token is drawn in the same step, so that token and signals
reach the host together. A policy that stops before the draw sees the distribution alone, and the token is discarded.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from decode.loop.step import NO_STATES, DraftSteps, computed
from decode.policies.base import AfterDraw, Policy, timing_of
from heads.model.head import AcceptanceHead
from heads.model.step import HostHead, Vocabulary
from lm import DraftModel, FeatureModel, Sampler
from lm.draws import array_of, refuse_no_token
from lm.features.model import BlockModel
from lm.signals import POSITION, Normalised, TokenStats, signals_of, token_stats

_NO_STATS = TokenStats(0.0, 0.0, -math.inf, 0.0, 0.0)


class SignalReader:
    """Reads the signals of one policy, step after step of a draft, on its device: the steps of one row."""

    num_before = 0
    """Tokens of the response before the round."""
    on_host = False
    """Whether it reads tokens as numbers; otherwise as tensors on the device."""

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        """Raises ValueError for a signal that does not exist, or a head or confidence that the draft does not fit."""
        if unknown := policy.signals - frozenset(AfterDraw._fields):
            raise ValueError(
                f"{type(policy).__name__} reads signals {sorted(unknown)}; use some of {', '.join(AfterDraw._fields)}"
            )
        self.model = model
        self.requested = policy.signals
        self.devices = model.device, model.output_device
        has_confidence = isinstance(model, BlockModel) and model.draft.confidence_head is not None
        self.confidence_of = model if isinstance(model, BlockModel) and "confidence_logit" in policy.signals else None
        if "confidence_logit" in policy.signals and not has_confidence:
            raise ValueError(
                f"{type(policy).__name__} reads the draft's own confidence, but this draft has no confidence head; use "
                "a DSpark draft that has one, or another policy"
            )
        self.heads: Sequence[AcceptanceHead] = policy.heads
        for head in self.heads:
            if head.hidden_size != model.hidden_size:
                raise ValueError(
                    f"the head reads hidden states of width {head.hidden_size} and this draft's are "
                    f"{model.hidden_size} wide; use a head that was trained for this draft"
                )
            head.eval().to(model.output_device)
        self.names = computed(self.heads, self.requested)
        self._policies = [policy]
        self._steps = DraftSteps(model.embedding)

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
        """Draw a token of q and read the signals of the step; those that the policy does not name are meaningless.

        `position` is the number of tokens drafted before this one in the round, `row` the index of these logits among
        those of the draft's last forward, and `probs` softmax(logits), if it is known. ValueError if q is not finite.
        """
        token = draws.token(q) if self.on_host else draws.draw(q)
        return self._read(position, logits, token, self.model.hidden, row=row, probs=probs)

    def read(
        self,
        position: int,
        logits: Float[Tensor, " vocab"],
        token_id: int,
        *,
        states: Float[Tensor, "rows hidden"] | None = None,
        row: int = -1,
    ) -> AfterDraw:
        """The signals of a token that is already known; `states`: of a forward, None: of the draft's last one."""
        token = token_id if self.on_host else torch.full((1,), token_id, device=logits.device)
        states = self.model.hidden if states is None else states
        return self._read(position, logits, token, states, row=row)[1]

    def _read(
        self,
        position: int,
        logits: Tensor,
        token: Any,
        states: Tensor | None,
        *,
        row: int = -1,
        probs: Tensor | None = None,
    ) -> tuple[int, AfterDraw]:
        [token_id], [drawn] = self._steps.read(
            position,
            Normalised(logits[None], None if probs is None else probs[None]),
            states[row][None] if self.heads and states is not None else None,
            token,
            policies=self._policies,
            nums_before=[self.num_before],
            confidence=None if self.confidence_of is None else self.confidence_of.confidence(),
        )
        return refuse_no_token(token_id, logits), drawn


class HostSignals(SignalReader):
    """Signals of a draft on the CPU, in numpy: torch's calls on single rows cost a fifth of a small model's step."""

    on_host = True

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        super().__init__(policy, model)
        self._has_entropy = "entropy" in self.names
        self._has_logits = not {"logit_token_prob", "logit_max_prob"}.isdisjoint(self.names)
        self._others = [name for name in self.names if name not in (*TokenStats._fields, POSITION)]
        numbers = (*TokenStats._fields, POSITION, *self._others)
        self._scores = []
        for head in self.heads:
            vocabulary = _vocabulary_of(model) if head.inputs.embedding else None
            self._scores.append((timing_of(head), HostHead(head, vocabulary, names=numbers).score))
        self._previous: tuple[tuple[float, ...], int] = _NO_STATS, 0

    def _read(
        self,
        position: int,
        logits: Tensor,
        token: int,
        states: Tensor | None,
        *,
        row: int = -1,
        probs: Tensor | None = None,
    ) -> tuple[int, AfterDraw]:
        if not self.requested:
            return token, AfterDraw(position)
        known: dict[str, float] = {}
        stats = _NO_STATS
        if self.names:
            stats = token_stats(logits, token, probs=probs, has_entropy=self._has_entropy, has_logits=self._has_logits)
        columns = signals_of(Normalised(logits[None]), torch.tensor([token]), self._others) if self._others else {}
        others = {name: column.item() for name, column in columns.items()}
        if "top_prob" in others:
            known["top_prob"] = others["top_prob"]
        if self.confidence_of is not None:
            known["confidence_logit"] = self.confidence_of.confidence().item()
        if self.heads:
            assert states is not None, NO_STATES
            hidden = array_of(states)[row]  # numpy's index costs a tenth of torch's
            newest = (*stats, math.log1p(self.num_before + position), *others.values()), token
            for timing, score in self._scores:
                if timing != "fed":
                    known[f"{timing}_logit"] = score(hidden, *newest)
                elif position > 0:
                    known["fed_logit"] = score(hidden, *self._previous)
            self._previous = newest
        return token, AfterDraw(
            position,
            stats.entropy,
            stats.max_prob,
            token_prob=math.exp(stats.log_token_prob),
            logit_token_prob=stats.logit_token_prob,
            **known,
        )


def reader_of(policy: Policy, model: DraftModel, made: SignalReader | None = None) -> SignalReader:
    """The reader for the device of the draft, or `made`, an earlier one of both, unless the draft was moved since."""
    if made is not None and made.devices == (model.device, model.output_device):
        return made
    is_on_host = model.device.type == model.output_device.type == "cpu"
    return (HostSignals if is_on_host else SignalReader)(policy, model)


def _vocabulary_of(model: DraftModel) -> Vocabulary:
    network = getattr(model, "model", None)  # a toy has none
    owner = model.draft.embedding if isinstance(model, FeatureModel) else network and network.get_input_embeddings()
    return Vocabulary(model.num_embeddings, model.embedding, owner)
