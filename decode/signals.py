"""What a policy sees of one draft step (law 4.3), computed on the draft's device and read with one host transfer.

Entropy, largest probability and token probability are those of the untruncated temperature-1 distribution (law 4.1). Head scores (law 4.8):

    fed_logit      head(hidden state after y_{i-1} was fed, scalars of y_{i-1}): known before y_i is drawn; +inf at the first token
    drawn_logit    head(hidden state that produced q_i, scalars of y_i): known once y_i is drawn

    scalars of y_i = (log q_i(y_i), H(q_i)), embedding of y_i = its row of the draft's input embeddings, each only if the head takes it

Only what the policy names in `signals` is computed. The token is drawn in the same step, so that token and signals travel together; a
policy that stops before the draw is asked about distributions alone and its token is thrown away unseen.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decode.fused_head import FusedHead
from decode.policies.base import AfterDraw, Policy
from heads.head import AcceptanceHead
from lm import CachedModel

_OF_DISTRIBUTION = frozenset({"entropy", "max_prob", "token_prob"})


class SignalReader:
    """Reads the signals that one policy asks for, step after step of a draft."""

    def __init__(self, policy: Policy, model: CachedModel) -> None:
        """Args:
            policy: names its signals, and the heads that score tokens.
            model: the draft; its `hidden` must be kept if there are heads.

        Raises:
            ValueError: a signal that does not exist, a head whose width is not the draft's.
        """
        unknown = policy.signals - frozenset(AfterDraw._fields)
        if unknown:
            raise ValueError(f"{type(policy).__name__} asks for signals {sorted(unknown)}; there are {', '.join(AfterDraw._fields)}")
        self._asked = policy.signals
        self._fed, self._drawn = (_placed(head, model) for head in (policy.fed_head, policy.drawn_head))
        self._has_scalars = any(head is not None and head.scalars for head in (self._fed, self._drawn))
        self._has_embedding = any(head is not None and head.embedding for head in (self._fed, self._drawn))
        self._needs_distribution = self._has_scalars or bool(self._asked & _OF_DISTRIBUTION)
        self._model = model
        self._inputs: _TokenInputs = (None, None)

    @torch.inference_mode()
    def read(self, position: int, logits: Float[Tensor, " vocab"], token: Int[Tensor, " 1"], *, row: int = -1) -> tuple[int, AfterDraw]:
        """The token's id and the signals of the step that drew it; those that the policy does not ask for are 0.

        Args:
            position: tokens drafted before this one in the round.
            logits: of the draft's last forward.
            token: drawn from them, on their device.
            row: which of that forward's rows they are; a level that verifies (`decode.pre_verified`) reads several of one forward.
        """
        if not self._asked:
            return int(token), AfterDraw(position, 0.0, 0.0, 0.0, 0.0, 0.0)
        columns = self._of_distribution(logits, token) if self._needs_distribution else {}
        previous, self._inputs = self._inputs, self._inputs_of(columns, token)
        if self._fed is not None and position > 0:
            columns["fed_logit"] = self._score(self._fed, previous, row)
        if self._drawn is not None:
            columns["drawn_logit"] = self._score(self._drawn, self._inputs, row)
        names = [name for name in columns if name in self._asked]
        values = _on_host([token, *(columns[name] for name in names)])
        return int(values[0]), AfterDraw(position=position, **(_ABSENT | dict(zip(names, values[1:], strict=True))))

    def _of_distribution(self, logits: Float[Tensor, " vocab"], token: Int[Tensor, " 1"]) -> dict[str, Tensor]:
        """Signals of softmax(logits), each of shape [1]."""
        log_probs = (logits if logits.itemsize >= 4 else logits.float()).log_softmax(-1)
        columns = {"log_token_prob": log_probs.gather(0, token)}
        if "token_prob" in self._asked:
            columns["token_prob"] = columns["log_token_prob"].exp()
        if "max_prob" in self._asked:
            columns["max_prob"] = log_probs.amax(0, keepdim=True).exp_()
        if self._has_scalars or "entropy" in self._asked:
            columns["entropy"] = torch.dot(log_probs.exp(), log_probs.clamp_min(-1e4)).neg_().view(1)
        return columns

    def _inputs_of(self, columns: dict[str, Tensor], token: Int[Tensor, " 1"]) -> "_TokenInputs":
        """What heads are told of the drawn token beside a hidden state."""
        scalars = torch.cat([columns["log_token_prob"], columns["entropy"]]) if self._has_scalars else None
        embedding = self._model.embedding(token)[0] if self._has_embedding else None
        return scalars, embedding

    def _score(self, head: FusedHead, inputs: "_TokenInputs", row: int) -> Float[Tensor, " 1"]:
        scalars, embedding = inputs
        assert self._model.hidden is not None, "a head scores hidden states: the draft must keep them"
        return head(self._model.hidden[row], scalars if head.scalars else None, embedding if head.embedding else None)


_TokenInputs = tuple[Tensor | None, Tensor | None]
_ABSENT = {"entropy": 0.0, "max_prob": 0.0, "fed_logit": float("inf"), "token_prob": 0.0, "drawn_logit": 0.0}


def _on_host(columns: list[Tensor]) -> list[float | int]:
    """The one number of each column; from another device in one transfer, as floats that hold every id below 2^24 exactly."""
    if columns[0].device.type == "cpu":
        return [column.item() for column in columns]
    return torch.cat([column.to(torch.float32) for column in columns]).tolist()


def _placed(head: AcceptanceHead | None, model: CachedModel) -> FusedHead | None:
    """The head on the draft's device, if it fits."""
    if head is None:
        return None
    if head.hidden_size != model.hidden_size:
        raise ValueError(
            f"the head reads hidden states of width {head.hidden_size} and this draft's are {model.hidden_size} wide; "
            "a head serves only the draft that it was trained on"
        )
    return FusedHead(head.eval().to(model.device))
