"""Hidden states of the draft, computed from rows and labels alone (laws 4.6 and 4.8b): one forward of the draft per
response and timing, and never the target's.

    drawn    the state that q_i came from, over prompt + X_<i
    fed      the state after Z_i was fed, over prompt + Z_<=i

The states of a feature draft are those along its drafts (`data_gen.labels.chains`). It reads the target's states, so
the target runs once over each response; it generates and labels nothing.

States of one timing do not depend on which others are cached. The last token of a draft is fed for fed-time states
only, so forwards for drawn-time states have fewer rows than if both were computed at once, and float32 rounds
otherwise: by up to 4e-6 in states of checkpoints/tiny/eagle (root mean square 1.1), and by up to 5e-5 in weights of
heads that are trained on them.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.labels.laws import mixed
from data_gen.labels.rollout import rollouts_along
from lm import FeatureDraft
from lm.features.dspark import DSpark
from lm.forwards import hidden_states

DRAFTS_AT_ONCE = 128
"""Limits the attention mask of one forward."""
StateTiming = Literal["fed", "drawn"]


class Text(NamedTuple):
    """One response and the labels that its hidden states depend on."""

    prompt_ids: list[int]
    response_ids: list[int]
    draft_ids: Int[Tensor, " token"]
    """The drafted token Y of each position; of a feature draft, those of all its drafts, draft after draft."""
    is_drafted: Bool[Tensor, " token"]
    """Whether Z_i came from Y."""
    draft_lengths: Int[Tensor, " draft"]
    """Tokens of each draft of a feature draft."""


@runtime_checkable
class StateSource(Protocol):
    """Computes hidden states of a draft."""

    def __call__(self, texts: Sequence[Text], timing: StateTiming) -> Float[Tensor, "token hidden"]:
        """The states of every label of some texts, text after text, on the draft's device."""


class DraftStates:
    """States of a draft that is a complete model: all texts share a forward."""

    def __init__(self, draft: PreTrainedModel, *, layer: int | None = None) -> None:
        """`layer`: the number of layers after which states are taken; None: all, and the final norm."""
        self._draft = draft.eval().requires_grad_(False)
        self._layer = layer

    def __call__(self, texts: Sequence[Text], timing: StateTiming) -> Float[Tensor, "token hidden"]:
        """`StateSource`'s states, of one batch."""
        if timing == "fed":
            # after token i was fed the state is at token i itself, one position later than the state that gave q_i
            sequences = [
                text.prompt_ids
                + mixed(torch.tensor(text.response_ids), text.draft_ids.long(), ~text.is_drafted).tolist()
                for text in texts
            ]
            starts = [len(text.prompt_ids) for text in texts]
        else:
            sequences = [text.prompt_ids + text.response_ids[:-1] for text in texts]
            starts = [len(text.prompt_ids) - 1 for text in texts]
        return hidden_states(self._draft, sequences, starts, layer=self._layer)


class RolloutStates:
    """States along the drafts of a feature draft, which are fed their labelled tokens."""

    def __init__(self, draft: FeatureDraft, target: PreTrainedModel, *, draft_every: int) -> None:
        """`draft_every`: distance between the starts of two drafts, as the data has it."""
        self._draft = draft
        self._target = target
        self._draft_every = draft_every

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Text], timing: StateTiming) -> Float[Tensor, "token hidden"]:
        """`StateSource`'s states, of one text after the other. ValueError for fed-time states of whole blocks."""
        return torch.cat([self._of_text(text, is_fed=timing == "fed") for text in texts])

    def _of_text(self, text: Text, *, is_fed: bool) -> Float[Tensor, "token hidden"]:
        longest = int(text.draft_lengths.max()) if len(text.draft_lengths) else 0
        rollouts = rollouts_along(self._target, self._draft, text.prompt_ids, text.response_ids, length=longest)
        if is_fed and longest >= rollouts.max_length:
            raise ValueError(
                f"the data has drafts of {longest} tokens, all of a block, and no state follows a block's last token; "
                f"remove fed from heads.timings, or make data with data.draft_length at most {longest - 1}"
            )
        positions = torch.arange(first_position(self._draft), len(text.response_ids), self._draft_every)
        begins = begins_of(self._draft, positions, len(text.prompt_ids))
        ends = text.draft_lengths.cumsum(0)
        states = torch.empty(len(text.draft_ids), self._draft.hidden_size, dtype=self._draft.dtype)
        states = states.to(self._draft.device)
        for group in torch.arange(len(begins)).split(DRAFTS_AT_ONCE):
            lengths = text.draft_lengths[group]
            # [draft, step]: rows of `states`; those beyond a draft's length are not used
            tokens = (ends[group] - lengths)[:, None] + torch.arange(longest)
            state = rollouts.begin(begins[group])
            alive = torch.arange(len(group))
            for step in range(int(lengths.max())):
                at = tokens[alive, step]
                continues = lengths[alive] > step + 1
                is_feeding = torch.ones_like(continues) if is_fed else continues
                fed = torch.zeros_like(state)
                if is_feeding.any():
                    fed_ids = text.draft_ids[at][is_feeding].long()
                    fed[is_feeding.to(fed.device)] = rollouts.feed(fed_ids, alive[is_feeding])
                states[at.to(states.device)] = fed if is_fed else state
                alive = alive[continues]
                state = fed[continues.to(fed.device)]
        return states


def first_position(draft: FeatureDraft) -> int:
    """The position in a response at which the first draft begins. DSpark was not trained on blocks that begin at a
    prompt's last token, and decoding makes none.
    """
    return int(isinstance(draft, DSpark))


def begins_of(draft: FeatureDraft, positions: Int[Tensor, " draft"], num_prompt: int) -> Int[Tensor, " draft"]:
    """The numbers of committed tokens at which drafts begin. A prompt of one token has no state of the target's for
    EAGLE to begin with: its first draft begins one token later.
    """
    return (positions + num_prompt).clamp(min=1 + draft.lag)
