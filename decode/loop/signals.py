"""What a policy sees of one draft step (law 4.3): signals of the distribution and the token (`lm.signals`), and scores
of heads, `fed_logit`, `prefix_logit` and `drawn_logit`. All of them read the hidden state that produced q_i, which is
also the one after y_{i-1} was fed, and their scalars: a fed-time head those of y_{i-1}, a drawn-time head those of y_i,
a prefix head H(q_i) alone.

Only the signals that the policy names are computed. The token is drawn in the same step, so that token and signals
reach the host together; a policy that stops before the draw sees only the distribution, and its token is discarded.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from decode.loop.step import DraftSteps, computed
from decode.policies.base import AfterDraw, Policy, timing_of
from heads.model.head import AcceptanceHead
from heads.model.step import HostHead, StepwiseHead, Vocabulary
from lm import DraftModel, FeatureModel, Sampler
from lm.draws import array_of, refuse_no_token
from lm.features.model import BlockModel
from lm.signals import POSITION, Normalised, TokenStats, signals_of, token_stats

_NO_STATS = TokenStats(0.0, 0.0, -math.inf, 0.0, 0.0)


class SignalReader:
    """Reads the signals of one policy, step after step of a draft. Subclasses say where they are computed."""

    num_before = 0
    """Tokens of the response before the round."""
    on_host = True
    """Whether it reads tokens as numbers; otherwise as tensors on the device."""

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        """Raises ValueError for a signal that does not exist, or a head or confidence that the draft does not fit."""
        if unknown := policy.signals - frozenset(AfterDraw._fields):
            raise ValueError(
                f"{type(policy).__name__} reads signals {sorted(unknown)}; use some of {', '.join(AfterDraw._fields)}"
            )
        self.model, self.requested, self.devices = model, policy.signals, _devices_of(model)
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
        return self._read(position, logits, token, row, probs)

    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        """The signals of a token that is already known."""
        token = token_id if self.on_host else torch.full((1,), token_id, device=logits.device)
        return self._read(position, logits, token, row, None)[1]

    def _read(self, position: int, logits: Tensor, token: Any, row: int, probs: Tensor | None) -> tuple[int, AfterDraw]:
        raise NotImplementedError

    @property
    def states(self) -> Float[Tensor, "rows hidden"]:
        """The states that produced the draft's last logits."""
        assert self.model.hidden is not None, "a head scores hidden states: the draft must keep them"
        return self.model.hidden


class HostSignals(SignalReader):
    """Signals of a draft on the CPU, in numpy: torch's calls on single rows cost a fifth of a small model's step."""

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        super().__init__(policy, model)
        self._has_entropy = "entropy" in self.names
        self._has_top = "top_prob" in self.names
        self._has_logits = not {"logit_token_prob", "logit_max_prob"}.isdisjoint(self.names)
        self._others = [name for name in self.names if name not in (*TokenStats._fields, POSITION, "top_prob")]
        numbers = (*TokenStats._fields, POSITION, *self._others)
        scores = {timing_of(head): HostHead(_stepwise(head, model), names=numbers).score for head in self.heads}
        self._score_fed, self._score_prefix, self._score_drawn = map(scores.get, ("fed", "prefix", "drawn"))
        self._previous: tuple[tuple[float, ...], int] = _NO_STATS, 0

    def _read(self, position: int, logits: Tensor, token: int, row: int, probs: Tensor | None) -> tuple[int, AfterDraw]:
        if not self.requested:
            return token, AfterDraw(position)
        stats, top_prob, fed_logit, prefix_logit, drawn_logit = _NO_STATS, 0.0, math.inf, 0.0, 0.0
        if self.names:
            stats = token_stats(logits, token, probs=probs, has_entropy=self._has_entropy, has_logits=self._has_logits)
        if self._has_top:
            top_prob = self._by_formula(logits, token, ["top_prob"])[0]
        if self.heads:
            hidden = array_of(self.states)[row]  # numpy's index costs a tenth of torch's
            others = self._by_formula(logits, token, self._others) if self._others else ()
            numbers = (*stats, math.log1p(self.num_before + position), *others)
            if self._score_fed is not None:
                if position > 0:
                    fed_logit = self._score_fed(hidden, *self._previous)
                self._previous = numbers, token
            if self._score_prefix is not None:
                prefix_logit = self._score_prefix(hidden, numbers)
            if self._score_drawn is not None:
                drawn_logit = self._score_drawn(hidden, numbers, token)
        confidence = 0.0 if self.confidence_of is None else self.confidence_of.confidence().item()
        before = position, stats.entropy, stats.max_prob, fed_logit, prefix_logit, top_prob, confidence
        return token, AfterDraw(*before, math.exp(stats.log_token_prob), drawn_logit, stats.logit_token_prob)

    def _by_formula(self, logits: Tensor, token_id: int, names: list[str]) -> list[float]:
        columns = signals_of(Normalised(logits[None]), torch.tensor([token_id]), names)
        return [column.item() for column in columns.values()]


class DeviceSignals(SignalReader):
    """Signals of a draft on an accelerator: the steps of one row."""

    on_host = False

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        super().__init__(policy, model)
        self._policies = [policy]
        self._steps = DraftSteps(model.embedding)

    def _read(
        self, position: int, logits: Tensor, token: Tensor, row: int, probs: Tensor | None
    ) -> tuple[int, AfterDraw]:
        [token_id], [drawn] = self._steps.read(
            position,
            Normalised(logits[None], None if probs is None else probs[None]),
            self.states[row][None] if self.heads else None,
            token,
            policies=self._policies,
            nums_before=[self.num_before],
            confidence=None if self.confidence_of is None else self.confidence_of.confidence(),
        )
        return refuse_no_token(token_id, logits), drawn


def reader_of(policy: Policy, model: DraftModel, made: SignalReader | None = None) -> SignalReader:
    """The reader for the device of the draft, or `made`, an earlier one of both, unless the draft was moved since."""
    if made is not None and made.devices == _devices_of(model):
        return made
    is_on_host = model.device.type == model.output_device.type == "cpu"
    return (HostSignals if is_on_host else DeviceSignals)(policy, model)


def _devices_of(model: DraftModel) -> tuple[torch.device, torch.device]:
    """Devices where the draft takes tokens, and where its logits and hidden states are."""
    return model.device, model.output_device


def _stepwise(head: AcceptanceHead, model: DraftModel) -> StepwiseHead:
    network: Any = getattr(model, "model", None)  # a toy has none
    owner = model.draft.embedding if isinstance(model, FeatureModel) else network and network.get_input_embeddings()
    return StepwiseHead(
        head, Vocabulary(model.num_embeddings, model.embedding, owner) if head.inputs.embedding else None
    )
