"""Continuations of one text, each from some position of it, which are read side by side: for data and traces."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lm.cache import CAPACITY, WindowLayer, growing_cache, is_attention, make_cache, roll_back
from lm.forwards import body_of, chunks, device_of, hidden_states, refuse_training
from lm.masks import Fed, Mask, additive, visible
from lm.rope import refuse_crossing
from lm.selfcheck import check_feeds, ids_of_plan, refusal_of

States = Float[Tensor, "fed hidden"]
_MAX_READ = 2**14  # tokens, padding included, of continuations that are read again in one forward
_PREFIX = (1, 2, 3, 1, 2)
_BRANCHES = ((2, (3, 1)), (4, (2, 2, 3)))
"""A text of the check, and its continuations: (tokens of the text that one sees, its own tokens)."""


class BranchMask:
    """Continuations of a text, each from some position of it; a continuation sees the text before that, and itself.

    With continuations from positions 2 and 4 of a text of 5 tokens, a first forward of one token each has
    positions 2 and 4, and the rows of its mask are 1100010 and 1111001.
    """

    def __init__(self, num_text: int, starts: Int[Tensor, " branch"]) -> None:
        """`num_text`: entries of the text; `starts`: position at which each continuation begins."""
        self._num_text, self._starts, self._owners = num_text, starts, starts.new_empty(0)

    def feed(self, owners: Fed) -> tuple[Fed, Mask]:
        """Append an entry to each of the continuations `owners`, in turn: their positions, and their mask."""
        num_before = len(self._owners)
        starts = self._starts[owners]
        self._owners = torch.cat([self._owners, owners])
        in_branch = (self._owners == owners[:, None]).tril(num_before)  # earlier entries of its owner, and itself
        return starts + in_branch.sum(-1) - 1, visible(starts - 1, self._num_text, in_branch)


class ReadText:
    """A text that a model has read, and continuations of it, each from some position, which are read side by side.

    The text is in the cache once. Each continuation attends to the part before its start and to its own tokens,
    by a mask and explicit positions. Departure: a model with sliding windows sees its whole context here;
    `check_branches` refuses longer texts. A model with recurrent layers, whose cache cannot hold branches, reads
    each continuation again with the text before it.

    Attributes:
        cache: holds the text, and perhaps continuations after it.
        hidden: [position, hidden] final hidden states after each token of the text.
    """

    max_length = float("inf")  # tokens of a continuation

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, ids: list[int]) -> None:
        self._model, self._ids, self._device = model, ids, device_of(model)
        self._reads_again = not is_attention(make_cache(model, CAPACITY))
        # of layers without windows: the mask hides entries
        self.cache = DynamicCache(config=model.config) if self._reads_again else growing_cache(2 * len(ids))
        tokens = torch.tensor([ids], device=self._device)
        output = body_of(model)(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.hidden: States = output.last_hidden_state[0]

    def begin(self, lengths: Int[Tensor, " branch"]) -> Float[Tensor, "branch hidden"]:
        """Begin continuations after these numbers of tokens of the text, and drop those before: the hidden state
        that each one's first token follows from.
        """
        self._lengths, self._tails = lengths.to(self._device), [list[int]() for _ in lengths]
        self._mask = BranchMask(len(self._ids), self._lengths)
        if not self._reads_again:
            roll_back(self.cache, len(self._ids))
        return self.hidden[lengths.to(self.hidden.device) - 1]

    @torch.inference_mode()
    def feed(self, tokens: Fed, owners: Fed) -> States:
        """Append a token to each of the continuations `owners`, in turn: the hidden states after them."""
        tokens = tokens.to(self._device)
        owners = owners.to(self._device)
        if self._reads_again:
            return self._read_again(tokens, owners)
        positions, mask = self._mask.feed(owners)
        output = body_of(self._model)(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=additive(mask, self._model.dtype)[None, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[0]

    def _read_again(self, tokens: Fed, owners: Fed) -> States:
        for owner, token in zip(owners.tolist(), tokens.tolist(), strict=True):
            self._tails[owner].append(token)
        fed, nums = (column.tolist() for column in owners.unique(return_counts=True))
        rows = [[*self._ids[: int(self._lengths[owner])], *self._tails[owner]] for owner in fed]
        starts = [len(row) - num for row, num in zip(rows, nums, strict=True)]
        groups = chunks(len(rows), max(1, _MAX_READ // max(map(len, rows))))
        states = torch.cat([hidden_states(self._model, rows[group], starts[group]) for group in groups])
        return torch.empty_like(states).index_copy_(0, owners.argsort(stable=True).to(states.device), states)


def check_branches(model: PreTrainedModel, length: int, *, num_prompt: int) -> None:
    """Raise ValueError unless continuations that are read side by side have the hidden states that each has
    alone; or if `length` tokens, prompt, response and branch, are longer than a window of the model, or cross a
    RoPE switch.
    """
    refuse_training(model)
    refusal = refusal_of(model, "be recorded in a trace", "`acceptance-heads bench` compares policies without a trace")
    check_feeds(model, "branches side by side", partial(_branch_feeds, model), refusal)
    subject = f"prompt, response and branch have {length} tokens, which are read at once"
    remedy = "lower decode.max_new_tokens or data.max_prompt_tokens"
    refuse_crossing(model, num_prompt, length, subject=subject, remedy=remedy)
    cache = make_cache(model, CAPACITY)
    for index, layer in enumerate(cache.layers):
        if is_attention(cache) and isinstance(layer, WindowLayer) and length > layer.sliding_window:
            raise ValueError(
                f"layer {index} of {type(model).__name__} sees {layer.sliding_window} tokens; prompt, response and "
                f"branch have {length}, which branches need to see whole: {remedy}"
            )


def _branch_feeds(model: PreTrainedModel, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(hidden states of a branch beside the others, those of the branch alone) of every branch."""
    prefix = ids_of_plan(model, _PREFIX, seed)
    branches = [(num_visible, ids_of_plan(model, tokens, seed)) for num_visible, tokens in _BRANCHES]
    text = ReadText(model, prefix)
    text.begin(torch.tensor([num for num, _ in branches]))
    fed = [(token, owner) for owner, (_, ids) in enumerate(branches) for token in ids]
    hidden = text.feed(*torch.tensor(fed).T).split([len(ids) for _, ids in branches])
    for states, (num_visible, ids) in zip(hidden, branches, strict=True):
        whole = torch.tensor([[*prefix[:num_visible], *ids]], device=device_of(model))
        yield states, body_of(model)(input_ids=whole, use_cache=False).last_hidden_state[0, num_visible:]
