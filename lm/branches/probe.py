"""Whether the branches of a trace can be recorded with a model: tried once per model, with a few tokens.

All branches of a response are fed side by side, behind one cache and a mask that keeps them apart
(`lm.branches.branched`). A model whose attention takes its positions from anything but `position_ids` (ALiBi), or that
keeps a state instead of positions, would see other tokens than its own branch, and the trace would be wrong without a
word. So a small tree is held against plain forwards of each of its branches. Windows do not show on a few tokens, hence
a second check, of the length.
"""

from weakref import WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lm.branches.branched import Branched, trunk
from lm.forwards import device_of
from lm.frequencies import refuse_crossing
from lm.models.mode import refuse_training

_PASSED: WeakSet[PreTrainedModel] = WeakSet()
_TRUNK = [1, 2, 3, 1, 2]
_BRANCHES = ((2, (3, 1)), (4, (2, 2, 3)))
"""(tokens of the trunk that a branch sees, its own tokens)."""


def check_branches(model: PreTrainedModel) -> None:
    """Raise ValueError unless a tree of branches gives the hidden states that each branch has on its own.

    A model that passed is known; one in train mode is refused each time.
    """
    refuse_training(model)
    if model in _PASSED:
        return
    try:
        error = _largest_error(model)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as problem:
        raise _refusal(
            model, f"its forward fails with branches side by side ({type(problem).__name__}: {problem})"
        ) from problem
    # half precision may choose another expert of a mixture; a wrong mask changes states by their whole spread
    if error > (1e-2 if model.dtype in (torch.float32, torch.float64) else 0.5):
        raise _refusal(model, f"branches side by side change its hidden states by {error:.2g} of their spread")
    _PASSED.add(model)


def check_length(model: PreTrainedModel, length: int, *, num_prompt: int) -> None:
    """Raise ValueError if a layer of the model sees a window that is shorter than a response with its longest branch,
    or if the model changes its frequencies between the end of the prompt and there (`lm.frequencies`): all branches
    share a forward.
    """
    what = f"prompt, response and branch have {length} tokens, which are read at once"
    refuse_crossing(
        model, num_prompt, length, what=what, remedy="lower decode.max_new_tokens or data.max_prompt_tokens"
    )
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        if window is not None and length > window:
            raise ValueError(
                f"layer {index} of {type(model).__name__} sees {window} tokens; prompt, response and branch have "
                f"{length}, which branches "
                "need to see whole: lower decode.max_new_tokens or data.max_prompt_tokens"
            )
        if window is None and type(layer) is not DynamicLayer:
            raise _refusal(
                model,
                f"layer {index} keeps a state ({type(layer).__name__}), of which branches would each need their own",
            )


@torch.inference_mode()
def _largest_error(model: PreTrainedModel) -> float:
    """The largest difference of a hidden state in the tree from the one on its own, as a share of the states' standard
    deviation.
    """
    device, num_ids = device_of(model), model.config.get_text_config().vocab_size
    prefix = [token % num_ids for token in _TRUNK]
    cache, _ = trunk(model, prefix)
    tree = Branched(model, num_ids, cache, torch.tensor([num_seen for num_seen, _ in _BRANCHES], device=device))
    fed = [
        (token % num_ids, owner, depth) for owner, (_, own) in enumerate(_BRANCHES) for depth, token in enumerate(own)
    ]
    tokens, owners, depths = torch.tensor(fed, device=device).T
    ours = tree.feed(tokens, owners, depths).split([len(own) for _, own in _BRANCHES])
    error = 0.0
    for hidden, (num_seen, own) in zip(ours, _BRANCHES, strict=True):
        alone = _states(model, [*prefix[:num_seen], *(token % num_ids for token in own)])[num_seen:]
        error = max(error, float((hidden - alone).abs().max() / alone.float().std()))
    return error


def _states(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model.base_model(input_ids=torch.tensor([ids], device=device_of(model)), use_cache=False).last_hidden_state[
        0
    ]


def _refusal(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"no trace can be recorded with {type(model).__name__}: {why}; `python -m evaluation bench` compares policies "
        "without a trace"
    )
