"""Small random targets and feature drafts for them, in float64."""

from functools import cache

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from heads import AcceptanceHead
from lm import CachedModel, FeatureDraft, FeatureModel, feature_model
from lm.features.dspark import DSpark
from lm.features.eagle import Eagle, Eagle3
from lm.features.glide import Glide
from lm.features.recorder import FeatureRecorder
from tests.conformance import mtp

VOCAB, WIDTH, LAYERS = 7, 16, 3
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
TARGETS = {
    "llama": LlamaConfig(num_hidden_layers=LAYERS, **SIZES),
    "qwen2": Qwen2Config(num_hidden_layers=LAYERS, **SIZES),
}
KINDS = ("eagle", "eagle3", "reduced", "layers", "glide")
BLOCK = 4
PAIRS = [(kind, family) for kind in KINDS for family in TARGETS] + [("mtp", family) for family in mtp.FAMILIES]
"""Drafts with the families of their targets; an MTP layer has a target of its own."""
BLOCKS = ("vanilla", "gated", "rnn", "dflash", "window")
"""DSpark drafts by their Markov head; DFlash has none. The last has a window, a reduced vocabulary and the target's
embedding, and drafts nothing from the anchor.
"""


def _spread(model: torch.nn.Module, seed: int, scale: float) -> None:
    """Weights that depend on the seed alone; norms and biases as well, which torch would leave at 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + noise if parameter.dim() == 1 and name.endswith("weight") else noise)


@cache
def target(family: str = "llama") -> PreTrainedModel:
    if family in mtp.FAMILIES:
        return mtp.target(family)
    model = AutoModelForCausalLM.from_config(TARGETS[family]).double().eval()
    _spread(model, 1, 0.35)
    return model


def config(**keys) -> LlamaConfig:
    return LlamaConfig(**(SIZES | {"num_hidden_layers": 1} | keys))


def block_config(markov: str, **keys) -> Qwen3Config:
    """The config of a DSpark draft of two layers that reads the target's embedding and its middle layer."""
    if markov == "window":
        of_window = {"use_sliding_window": True, "sliding_window": 2, "sample_from_anchor": False}
        of_window |= {"layer_types": ["sliding_attention", "full_attention"], "draft_vocab_size": 4}
        return block_config("vanilla", block_size=BLOCK + 1, **of_window, **keys)
    rank = 0 if markov == "dflash" else 5
    of_blocks = {"block_size": BLOCK, "target_layer_ids": [-1, 1], "num_target_layers": LAYERS, "mask_token_id": 6}
    heads = {"markov_rank": rank, "markov_head_type": markov, "enable_confidence_head": markov != "dflash"}
    sizes = SIZES | {"num_hidden_layers": 2, "head_dim": 6, "confidence_head_with_markov": markov != "gated"}
    return Qwen3Config(**(sizes | of_blocks | heads | {"num_anchors": 4} | keys))


def target_of(kind: str) -> PreTrainedModel:
    """The target of `draft(kind)`."""
    return target(kind if kind in mtp.FAMILIES else "llama")


@cache
def draft(kind: str, family: str = "llama") -> FeatureDraft:
    if kind == "mtp" or kind in mtp.FAMILIES:
        return mtp.draft(family if kind == "mtp" else kind)
    made: FeatureDraft
    if kind == "eagle":
        made = Eagle(config(), has_embedding=False)
    elif kind == "eagle3":
        norms = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        made = Eagle3(config(**norms), (1, 2, 2), target_size=WIDTH)
    elif kind == "reduced":
        made = Eagle3(config(draft_vocab_size=4), (1, 2, 3), target_size=WIDTH, has_head=True)
        made.target_ids = torch.tensor([0, 2, 3, 6])
    elif kind == "layers":
        layers = Qwen3Config(**(SIZES | {"num_hidden_layers": 2, "head_dim": 6}))
        made = Eagle3(layers, (0, 1, 2), target_size=WIDTH)
    elif kind in BLOCKS:
        made = DSpark(block_config(kind), has_embedding=kind != "window")
        if kind == "window":
            made.target_ids = torch.tensor([0, 2, 3, 6])
    else:
        made = Glide(config(large_hidden_size=WIDTH, large_num_attention_heads=4), LAYERS)
    made = made.double().eval()
    _spread(made, 2, 0.35)
    return made.bind(target(family))


def beside(model: PreTrainedModel, made: FeatureDraft, **settings: bool) -> tuple[CachedModel, FeatureModel]:
    """The target, which records what its draft reads, and the draft."""
    recording = CachedModel(model, recorder=FeatureRecorder(model, made), **settings)
    return recording, feature_model(made, recording)


def feature_head(timing: str, width: int = WIDTH, scalars: bool | tuple[str, ...] = True) -> AcceptanceHead:
    """A head that reads states of this width: any of the drafts', but for a Markov head's numbers behind them."""
    torch.manual_seed(3)
    head = AcceptanceHead(width, 1, timing, scalars)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head.double()
