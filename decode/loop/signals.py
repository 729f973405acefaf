"""What a policy sees of one draft step (law 4.3).

Entropy, largest probability and token probability are those of the untruncated temperature-1 distribution (law 4.1). Head scores (law 4.8):

    fed_logit      head(hidden state after y_{i-1} was fed, scalars of y_{i-1}): known before y_i is drawn; +inf at the first token
    drawn_logit    head(hidden state that produced q_i, scalars of y_i): known once y_i is drawn

    scalars of y_i = log q_i(y_i), H(q_i), … (`data_gen.labels.scalars`), embedding of y_i = its row of the draft's input embeddings;
    each only if the head takes it

Only what the policy names in `signals` is computed. The token is drawn in the same step, so that token and signals travel together; a
policy that stops before the draw is asked about distributions alone and its token is thrown away unseen. `DeviceSignals` computes on the
draft's device and reads everything with one host transfer; `HostSignals` does the same for a draft on the CPU, distributions with numpy,
since torch's calls on single rows would be a fifth of a small model's step.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from decode.policies.base import AfterDraw, Policy
from heads.model.head import AcceptanceHead
from heads.model.inputs import Inputs
from heads.model.stepwise import StepwiseHead
from lm import CachedModel, Draws, array_of


class OfToken(NamedTuple):
    """Numbers of the untruncated temperature-1 distribution and the token drawn from it: what policies may ask for, and every scalar."""

    entropy: float
    """H(q) in nats."""
    max_prob: float
    """max_v q(v)."""
    log_token_prob: float
    """log q(y)."""


_INFINITY = float("inf")
_NOTHING = OfToken(0.0, 0.0, 0.0)
_OF_DISTRIBUTION = frozenset({"entropy", "max_prob", "token_prob"})
_ABSENT = {"entropy": 0.0, "max_prob": 0.0, "fed_logit": _INFINITY, "token_prob": 0.0, "drawn_logit": 0.0}


@runtime_checkable
class SignalReader(Protocol):
    """Reads the signals that one policy asks for, step after step of a draft."""

    def draw(
        self, position: int, logits: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], draws: Draws, *, row: int = -1
    ) -> tuple[int, AfterDraw]:
        """Draw a token and read the signals of the step; those that the policy does not ask for mean nothing.

        Args:
            position: tokens drafted before this one in the round.
            logits: of the draft's last forward.
            q: the distribution to draw from, made of them.
            draws: the source of chance.
            row: which of that forward's rows they are; a level that verifies reads several of one forward.

        Raises:
            ValueError: q is not finite.
        """
        ...

    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        """The signals of a token that is known already."""
        ...


def reader_of(policy: Policy, model: CachedModel) -> SignalReader:
    """The reader for the device that the draft is on.

    Args:
        policy: names its signals, and the heads that score tokens.
        model: the draft; its `hidden` must be kept if there are heads.

    Raises:
        ValueError: a signal that does not exist, a head whose width is not the draft's.
    """
    return (HostSignals if model.device.type == "cpu" else DeviceSignals)(policy, model)


class _Reader:
    """What both readers know of policy and model."""

    def __init__(self, policy: Policy, model: CachedModel) -> None:
        unknown = policy.signals - frozenset(AfterDraw._fields)
        if unknown:
            raise ValueError(f"{type(policy).__name__} asks for signals {sorted(unknown)}; there are {', '.join(AfterDraw._fields)}")
        self._asked = policy.signals
        placed = [None if head is None else _placed(head, model) for head in (policy.fed_head, policy.drawn_head)]
        self._fed, self._drawn = (None if head is None else StepwiseHead(head, names=OfToken._fields) for head in placed)
        self._heads = [head for head in (self._fed, self._drawn) if head is not None]
        self._scalars = frozenset(name for head in self._heads for name in head.inputs.scalars)
        self._has_embedding = any(head.inputs.embedding for head in self._heads)
        self._needs_distribution = bool(self._scalars) or bool(self._asked & _OF_DISTRIBUTION)
        self._model = model


class HostSignals(_Reader):
    """`SignalReader` of a draft on the CPU."""

    _newest: tuple[OfToken, Tensor | None] = (_NOTHING, None)
    """Numbers and embedding of the newest token, which a fed-time head scores in the next step."""

    def draw(
        self, position: int, logits: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], draws: Draws, *, row: int = -1
    ) -> tuple[int, AfterDraw]:
        token_id = draws.token(q)
        return token_id, self.read(position, logits, token_id, row=row) if self._asked else _nothing_of(position)

    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        if not self._asked:
            return _nothing_of(position)
        numbers = _of_row(array_of(logits), token_id) if self._needs_distribution else _NOTHING
        fed_logit, drawn_logit = _INFINITY, 0.0
        if self._heads:
            assert self._model.hidden is not None, "a head scores hidden states: the draft must keep them"
            hidden = self._model.hidden[row]
            embedding = self._model.embedding(torch.tensor([token_id]))[0].detach() if self._has_embedding else None
            if self._fed is not None and position > 0:
                fed_logit = self._fed.score(hidden, *self._newest)
            if self._drawn is not None:
                drawn_logit = self._drawn.score(hidden, numbers, embedding)
            self._newest = numbers, embedding
        return AfterDraw(position, numbers.entropy, numbers.max_prob, fed_logit, math.exp(numbers.log_token_prob), drawn_logit)


class DeviceSignals(_Reader):
    """`SignalReader` of a draft on an accelerator: nothing waits for the device but the one transfer at the end."""

    _newest: Mapping[Inputs, Tensor | None] = MappingProxyType({})
    """What heads read of the newest token, which a fed-time head scores in the next step."""

    @torch.inference_mode()
    def draw(
        self, position: int, logits: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], draws: Draws, *, row: int = -1
    ) -> tuple[int, AfterDraw]:
        token_id, drawn = self._read(position, logits, draws.draw(q), row)
        if token_id == len(q):
            raise ValueError("a distribution to draw from is not finite; load the model in float32 or check its weights")
        return token_id, drawn

    @torch.inference_mode()
    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        return self._read(position, logits, torch.tensor([token_id], device=logits.device), row)[1]

    def _read(self, position: int, logits: Tensor, token: Tensor, row: int) -> tuple[int, AfterDraw]:
        if not self._asked:
            return int(token), _nothing_of(position)
        columns = self._of_distribution(logits, token) if self._needs_distribution else {}
        inputs = self._inputs_of(columns, token)
        previous, self._newest = self._newest, inputs
        if self._fed is not None and position > 0:
            columns["fed_logit"] = self._score(self._fed, previous[self._fed.inputs], row)
        if self._drawn is not None:
            columns["drawn_logit"] = self._score(self._drawn, inputs[self._drawn.inputs], row)
        names = [name for name in columns if name in self._asked]
        # as floats, which hold every id below 2^24 exactly; a distribution that is not finite draws an id beyond the last
        values = torch.cat([column.to(torch.float32) for column in (token, *(columns[name] for name in names))]).tolist()
        return int(values[0]), AfterDraw(position=position, **(_ABSENT | dict(zip(names, values[1:], strict=True))))

    def _of_distribution(self, logits: Tensor, token: Tensor) -> dict[str, Tensor]:
        """Signals of softmax(logits), each of shape [1]."""
        log_probs = (logits if logits.itemsize >= 4 else logits.float()).log_softmax(-1)
        token = token.clamp(max=len(logits) - 1)
        wanted = self._asked | self._scalars
        columns = {"log_token_prob": log_probs.gather(0, token)}
        if "token_prob" in self._asked:
            columns["token_prob"] = columns["log_token_prob"].exp()
        if "max_prob" in wanted:
            columns["max_prob"] = log_probs.amax(0, keepdim=True).exp_()
        if "entropy" in wanted:
            columns["entropy"] = torch.dot(log_probs.exp(), log_probs.clamp_min(-1e4)).neg_().view(1)
        return columns

    def _inputs_of(self, columns: dict[str, Tensor], token: Tensor) -> dict[Inputs, Tensor | None]:
        """What heads read of the drawn token beside a hidden state, by what they take: heads that take the same share one tensor."""
        embedding = self._model.embedding(token)[0] if self._has_embedding else None
        taken = {head.inputs for head in self._heads}
        return {
            inputs: inputs.concatenated(
                torch.cat([columns[name] for name in inputs.scalars]) if inputs.scalars else None, embedding if inputs.embedding else None
            )
            for inputs in taken
        }

    def _score(self, head: StepwiseHead, inputs: Tensor | None, row: int) -> Float[Tensor, " 1"]:
        assert self._model.hidden is not None, "a head scores hidden states: the draft must keep them"
        return head(self._model.hidden[row], inputs)


def _of_row(logits: np.ndarray, token_id: int) -> OfToken:
    """Of softmax(logits)."""
    top = logits.max()
    shifted = logits - top
    weights = np.exp(shifted)
    total = weights.sum()
    log_total = math.log(total)
    entropy = log_total - float(weights @ np.maximum(shifted, -1e4)) / float(total)
    return OfToken(entropy, 1.0 / float(total), float(shifted[token_id]) - log_total)


def _nothing_of(position: int) -> AfterDraw:
    """The signals of a step, where none is asked for."""
    return AfterDraw(position, 0.0, 0.0, 0.0, 0.0, 0.0)


def _placed(head: AcceptanceHead, model: CachedModel) -> AcceptanceHead:
    """The head where the draft's hidden states are, if it fits."""
    if head.hidden_size != model.hidden_size:
        raise ValueError(
            f"the head reads hidden states of width {head.hidden_size} and this draft's are {model.hidden_size} wide; "
            "a head serves only the draft that it was trained on"
        )
    return head.eval().to(model.output_device)
