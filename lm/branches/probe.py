"""Whether the branches of a trace can be recorded with a model: tried once per model, with a few tokens.

All branches of a response are fed side by side, behind one cache and a mask that keeps them apart
(`lm.branches.branched`). A model whose attention takes its positions from anything but `position_ids` (ALiBi), or that
keeps a state instead of positions, would see other tokens than its own branch, and the trace would be wrong without a
word. So a small tree is held against plain forwards of each of its branches. Windows do not show on a few tokens, hence
a second check, of the length.
"""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lm.branches.branched import Branched, trunk
from lm.forwards import body_of, device_of
from lm.frequencies import refuse_crossing
from lm.models.mode import refuse_training
from lm.probe import probe

_TRUNK = [1, 2, 3, 1, 2]
_BRANCHES = ((2, (3, 1)), (4, (2, 2, 3)))
"""(tokens of the trunk that a branch sees, tokens of the branch)."""


def check_branches(model: PreTrainedModel) -> None:
    """Raise ValueError unless a tree of branches gives the hidden states that each branch has on its own.

    A model that passed is known; one in train mode is refused each time.
    """
    refuse_training(model)
    probe(
        model,
        _feeds(model),
        partial(_refusal, model),
        how="branches side by side",
        difference="branches side by side change its hidden states",
    )


def check_length(model: PreTrainedModel, length: int, *, num_prompt: int) -> None:
    """Raise ValueError if a layer of the model sees a window that is shorter than a response with its longest branch,
    or if the model changes its frequencies between the end of the prompt and there (`lm.frequencies`): all branches
    share a forward.
    """
    subject = f"prompt, response and branch have {length} tokens, which are read at once"
    remedy = "lower decode.max_new_tokens or data.max_prompt_tokens"
    refuse_crossing(model, num_prompt, length, subject=subject, remedy=remedy)
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        if window is not None and length > window:
            subject = f"layer {index} of {type(model).__name__} sees {window} tokens"
            raise ValueError(
                f"{subject}; prompt, response and branch have {length}, which branches need to see whole: {remedy}"
            )
        if window is None and type(layer) is not DynamicLayer:
            subject = f"layer {index} keeps a state ({type(layer).__name__})"
            raise _refusal(model, f"{subject}, of which branches would each need their own")


@torch.inference_mode()
def _feeds(model: PreTrainedModel) -> Iterator[tuple[Float[Tensor, "1 state"], Float[Tensor, "1 state"]]]:
    """(hidden states of a branch beside the others, those of the branch alone), as one row each, for every branch."""
    device, num_ids = device_of(model), model.config.get_text_config().vocab_size
    prefix = [token % num_ids for token in _TRUNK]
    cache, _ = trunk(model, prefix)
    tree = Branched(model, num_ids, cache, torch.tensor([num_seen for num_seen, _ in _BRANCHES], device=device))
    fed = [
        (token % num_ids, owner, depth)
        for owner, (_, tokens) in enumerate(_BRANCHES)
        for depth, token in enumerate(tokens)
    ]
    tokens, owners, depths = torch.tensor(fed, device=device).T
    in_one_forward = tree.feed(tokens, owners, depths).split([len(tokens) for _, tokens in _BRANCHES])
    for hidden, (num_seen, tokens) in zip(in_one_forward, _BRANCHES, strict=True):
        ids = torch.tensor([[*prefix[:num_seen], *(token % num_ids for token in tokens)]], device=device)
        alone = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0, num_seen:]
        yield hidden.flatten()[None], alone.flatten()[None]


def _refusal(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"no trace can be recorded with {type(model).__name__}: {why}; `acceptance-heads bench` compares policies "
        "without a trace"
    )
