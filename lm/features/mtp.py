"""Native MTP: the layer for multi-token prediction in a target's own checkpoint, as a feature draft.

Entry t represents token x_{t+1}. It reads the token's embedding and a state s_t: the target's, after its final
norm, where the target has read the text, and the output of the entry before it deeper in a draft. The one layer
is used at every depth, as engines do.

    s_{t+1} = norm(layer(W [norm(embed(x_{t+1})); norm(s_t)]))        q(x_{t+2}) = softmax(head s_{t+1})

`pair.draft.path: mtp` names it; the config replaces that by the target's path and `#mtp`. The target ignores the
layer's tensors (`mtp.*`, or a layer after its last one). transformers' MtpModel maps their names in each family, and
its layer runs here. As there, the next step reads the state after the norm; vLLM's DeepSeek reads the one before it.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import ContextManagers, logging

from configs.schema import ModelSource
from lm.cache import growing_cache, roll_back
from lm.features.base import FeatureDraft, Mask, Nodes, Outputs, States, causal
from lm.features.eagle import Eagle
from lm.features.released import draft_refusal, tensors_of, without_mtp
from lm.selfcheck import check_feeds

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")  # copies of the target's own tensors


class Mtp(Eagle):
    """The MTP layer of a target."""

    def __init__(self, model: MtpModel) -> None:
        """Take the layer of transformers' `model`, and a copy of the target's rotary embedding."""
        rotary = deepcopy(model.rotary_emb)
        FeatureDraft.__init__(self, model.config, has_embedding=False, has_head=False, rotary=rotary)
        [self.layer] = model.layers
        self.shared_norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        self._rope_keys = {"layer_type": model.config.layer_types[0]} if model.has_per_layer_rope else {}

    def forward(
        self, tokens: Nodes, states: States, positions: Nodes, *, cache: Cache | None = None, mask: Mask | None = None
    ) -> Outputs:
        inputs = self.embed(tokens)
        mask = causal(tokens, cache, inputs.device) if mask is None else mask
        positions = positions + 1  # transformers counts the position of the token, not of the state
        rotation = self.rotary_emb(inputs, positions, **self._rope_keys)
        output = self.layer(
            inputs,
            states,
            position_embeddings=rotation,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
        )
        hidden = self.shared_norm(output)
        return Outputs(hidden, hidden)


def mtp_of(source: ModelSource, target: PreTrainedModel, dtype: torch.dtype | None) -> Mtp:
    """The MTP layer in a target's own checkpoint, on the CPU; `dtype` None: the target's. ValueError if the
    checkpoint has none, several, or one that cannot be read or rolled back.
    """
    of_target = without_mtp(source)
    refusal = partial(draft_refusal, source.path, remedy="use another draft")
    if of_target.path != target.name_or_path:
        subject = f"it is the MTP layer of {of_target.path}, and the target is {target.name_or_path}"
        raise refusal(subject, remedy="set pair.draft.path to mtp")
    config = target.config.get_text_config()
    dtype = dtype or target.dtype
    tensors = tensors_of(of_target, partial(_is_of_mtp, config.num_hidden_layers))
    layers = {match[1] for name in tensors if (match := re.search(r"layers\.(\d+)\.", name))}
    if len(layers) != 1:
        names = f"mtp.* or layers.{config.num_hidden_layers}.*"
        raise refusal(f"the checkpoint has {len(layers)} MTP layers (tensors {names}), and one is read")
    # what transformers' MTP needs, and the configs of some families lack, such as Qwen3-Next's
    config.num_mtp_layers = 1
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None) and not getattr(config, f"mtp_{name}", None):
            setattr(config, f"mtp_{name}", [kind])
    try:
        with ContextManagers(MtpModel.get_init_context(dtype, False, False, None)):  # on meta: no weight is drawn
            model = MtpModel(target, 1)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        cause = " ".join(str(error).split())[:200]
        raise refusal(f"transformers cannot build the MTP layer of {type(target).__name__} ({cause})") from error
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    if kinds[0] != "full_attention" or model.rotary_emb is None:
        subject = f"its layer has {kinds[0]}" if model.rotary_emb is not None else "it has no rotary positions"
        raise refusal(f"{subject}, and full attention with rotary positions is read")
    mapping: Any = model.get_weight_conversions(target)
    _fill(model, tensors, LoadStateDictConfig(weight_mapping=mapping, dtype=dtype), refusal)
    draft = Mtp(model).eval()
    draft.bind(target)
    check_feeds(target, "feeds of its MTP layer after a roll-back", partial(_feeds, draft), refusal)
    return draft


def _is_of_mtp(num_layers: int, name: str) -> bool:
    """True for the name of a tensor that a target of so many layers ignores."""
    match = _LAYER.match(name)
    is_mtp = name.startswith("mtp.") if match is None else int(match[1]) >= num_layers
    return is_mtp and not name.endswith(_SHARED)


def _fill(
    model: MtpModel, tensors: dict[str, Tensor], settings: LoadStateDictConfig, refusal: Callable[[str], ValueError]
) -> None:
    """Give the layer all of its weights, and nothing else."""
    has_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loading, _ = convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=settings)
    finally:
        if has_bars:
            logging.enable_progress_bar()
    missing = {name for name in loading.missing_keys if name.startswith(("layers.", "shared_post_norm."))}
    misread = {name for name, *_ in loading.mismatched_keys} | set(loading.conversion_errors)
    problems = {"lacks": missing - misread, "also has": loading.unexpected_keys, "has other shapes of": misread}
    for problem, names in problems.items():
        if names:
            raise refusal(f"it {problem} {len(names)} tensors, first {min(names)}")


def _feeds(draft: Mtp, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs of the layer after its cache was rolled back, and without one (`lm.selfcheck`)."""
    tokens = torch.tensor([[1, 2, 3, 1, 2 + seed]])
    positions = torch.arange(5)[None]
    states = torch.randn(1, 5, draft.hidden_size, generator=torch.Generator().manual_seed(seed)).to(draft.dtype)
    cache = growing_cache(8)
    draft(tokens[:, :3], states[:, :3], positions[:, :3], cache=cache)
    roll_back(cache, 2)
    rest = draft(tokens[:, 2:], states[:, 2:], positions[:, 2:], cache=cache)
    yield rest.hidden[0], draft(tokens, states, positions).hidden[0, 2:]
