"""What both readers of signals share: what is read of a draft step (`OfToken`), by whom (`SignalReader`), and the laws
of its numbers.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data_gen.labels.scalars import SCALARS, scalars_of
from decode.policies.base import AfterDraw, Policy
from heads.model.head import AcceptanceHead
from heads.model.stepwise import StepwiseHead, Vocabulary
from lm import DraftModel, FeatureModel, Sampler
from lm.features.stepwise import BlockModel


class OfToken(NamedTuple):
    """Numbers of the untruncated temperature-1 distribution and the token drawn from it: what policies may ask for, and
    the scalars that are read in one go with them.
    """

    entropy: float
    """H(q) in nats."""
    max_prob: float
    """max_v q(v)."""
    log_token_prob: float
    """log q(y)."""


_OF_DISTRIBUTION = frozenset({"entropy", "max_prob", "token_prob", "top_prob"})
_NUM_TOP = 10
"""Tokens that llama.cpp's draft sampler keeps."""


@runtime_checkable
class SignalReader(Protocol):
    """Reads the signals that one policy asks for, step after step of a draft."""

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
        """Draw a token and read the signals of the step; those that the policy does not ask for mean nothing.

        Args:
            position: tokens drafted before this one in the round.
            logits: of the draft's last forward.
            q: the distribution to draw from, made of them.
            draws: the source of chance.
            row: which of that forward's rows they are; a level that verifies reads several of one forward.
            probs: softmax(logits), where the caller has it.

        Raises:
            ValueError: q is not finite.
        """
        ...

    def read(self, position: int, logits: Float[Tensor, " vocab"], token_id: int, *, row: int = -1) -> AfterDraw:
        """The signals of a token that is known already."""
        ...


class Reader:
    """The part of both readers that depends on policy and model alone."""

    def __init__(self, policy: Policy, model: DraftModel) -> None:
        unknown = policy.signals - frozenset(AfterDraw._fields)
        if unknown:
            raise ValueError(
                f"{type(policy).__name__} asks for signals {sorted(unknown)}; there are {', '.join(AfterDraw._fields)}"
            )
        self.confidence_of = _confidence_of(policy, model) if "confidence_logit" in policy.signals else None
        self.asked = policy.signals
        every = policy.fed_head, policy.prefix_head, policy.drawn_head
        placed = [None if head is None else _placed(head, model) for head in every]
        self.fed, self.prefix, self.drawn = (None if head is None else _stepwise(head, model) for head in placed)
        heads = [head for head in (self.fed, self.prefix, self.drawn) if head is not None]
        self.has_heads = bool(heads)
        self._scalars = frozenset(name for head in heads for name in head.inputs.scalars)
        self.wanted = self.asked | self._scalars
        self.needs_distribution = bool(self._scalars) or bool(self.asked & _OF_DISTRIBUTION)
        self.model = model
        self.places = places_of(policy, model)


def places_of(policy: Policy, model: DraftModel) -> tuple[torch.device, torch.device | None]:
    """Devices where the draft takes tokens, and where heads read its hidden states; a reader serves while both stay."""
    return model.device, model.output_device if policy.heads else None


def _stepwise(head: AcceptanceHead, model: DraftModel) -> StepwiseHead:
    network = getattr(model, "model", None)  # a toy has none
    owner = model.draft.embedding if isinstance(model, FeatureModel) else network and network.get_input_embeddings()
    vocabulary = Vocabulary(model.num_embeddings, model.embedding, owner)
    return StepwiseHead(head, vocabulary if head.inputs.embedding else None)


def others_among(wanted: frozenset[str]) -> list[str]:
    """Scalars among these names that are not in `OfToken`, so that they are read by their formula."""
    return sorted((SCALARS.keys() & wanted) - set(OfToken._fields))


def softmax(logits: Float[Tensor, "*position vocab"]) -> Float[Tensor, "*position vocab"]:
    """Probabilities at temperature 1, in float32 or wider."""
    return (logits if logits.itemsize >= 4 else logits.float()).softmax(-1)


def top_prob(logits: Float[Tensor, "*position vocab"]) -> Float[Tensor, "*position"]:
    """max_v q(v) / (sum of the ten largest q(v)), of q = softmax(logits)."""
    largest = logits.topk(min(_NUM_TOP, logits.shape[-1]), dim=-1).values
    return (largest - largest[..., :1]).exp().sum(-1).reciprocal()


def numbers_of(
    logits: Float[Tensor, " vocab"], token: Int[Tensor, " 1"], wanted: frozenset[str]
) -> dict[str, Float[Tensor, " 1"]]:
    """The wanted signals and scalars of a token drawn from softmax(logits), without a transfer to the host."""
    logits = logits if logits.itemsize >= 4 else logits.float()
    log_probs = logits.log_softmax(-1)
    columns = {"log_token_prob": log_probs.gather(0, token), **scalars_of(logits[None], token, others_among(wanted))}
    if "token_prob" in wanted:
        columns["token_prob"] = columns["log_token_prob"].exp()
    if "max_prob" in wanted:
        columns["max_prob"] = log_probs.amax(0, keepdim=True).exp()
    if "top_prob" in wanted:
        columns["top_prob"] = top_prob(logits[None])
    if "entropy" in wanted:
        columns["entropy"] = -torch.dot(log_probs.exp(), log_probs.clamp_min(-1e4)).clamp_max(0.0).view(1)
    return columns


def scored(
    head: StepwiseHead, hidden: Float[Tensor, " hidden"], numbers: dict[str, Tensor], token: Int[Tensor, " 1"]
) -> Float[Tensor, " 1"]:
    """The head's logit for a token of which these numbers are known."""
    scalars = [numbers[name] for name in head.inputs.scalars]
    return head(hidden, torch.cat(scalars) if scalars else None, token)


def nothing_of(position: int) -> AfterDraw:
    """The signals of a step, where none is asked for."""
    return AfterDraw(position, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _confidence_of(policy: Policy, model: DraftModel) -> BlockModel:
    """The model of a DSpark draft that has a confidence head."""
    if isinstance(model, BlockModel) and model.draft.confidence_head is not None:
        return model
    raise ValueError(
        f"{type(policy).__name__} asks for the draft's own confidence, and this draft has no confidence head; use a "
        "DSpark draft that has one, or another policy"
    )


def _placed(head: AcceptanceHead, model: DraftModel) -> AcceptanceHead:
    """The head where the draft's hidden states are, if it fits."""
    if head.hidden_size != model.hidden_size:
        raise ValueError(
            f"the head reads hidden states of width {head.hidden_size} and this draft's are {model.hidden_size} wide; "
            "a head serves only the draft that it was trained on"
        )
    return head.eval().to(model.output_device)
