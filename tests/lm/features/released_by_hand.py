"""Directories of feature drafts, written by hand in every released layout, and plain computations of what they mean.

The computations share nothing with `lm.features` but their formulas: attention head by head, over whole sequences, with
no cache.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.toys.random_drafts import LAYERS, SIZES, VOCAB, WIDTH

HEADS, KV_HEADS, INNER = (SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
HEAD, RANK, REDUCED = WIDTH // HEADS, 5, [0, 2, 3, 6]
KEYS = {name: value for name, value in SIZES.items() if not name.endswith("token_id")}
KEYS |= {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
KEYS |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
IDS = [1, 2, 2]
"""Layers that the EAGLE-3 directories read; the target is too shallow for the three that are usual."""
T2D = torch.tensor([each in REDUCED for each in range(VOCAB)])
D2T = torch.tensor([each - place for place, each in enumerate(REDUCED)])
MAPS = {"d2t": D2T, "t2d": T2D}


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    how = {"generator": torch.Generator().manual_seed(4), "dtype": torch.float64}
    return {name: ("norm" in name) + 0.35 * torch.randn(shape, **how) for name, shape in shapes.items()}


Shapes = dict[str, tuple[int, ...]]


def layer_shapes(prefix: str, input_size: int) -> Shapes:
    sizes = {"q": (WIDTH, input_size), "k": (KV_HEADS * HEAD, input_size), "v": (KV_HEADS * HEAD, input_size)}
    shapes = {f"{prefix}self_attn.{name}_proj.weight": size for name, size in (sizes | {"o": (WIDTH, WIDTH)}).items()}
    sizes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    shapes |= {f"{prefix}mlp.{name}_proj.weight": size for name, size in sizes.items()}
    return shapes | {f"{prefix}post_attention_layernorm.weight": (WIDTH,)}


def eagle3_shapes(prefix: str) -> Shapes:
    shapes = layer_shapes(prefix, 2 * WIDTH)
    shapes |= {f"{prefix}{name}.weight": (WIDTH,) for name in ("input_layernorm", "hidden_norm")}
    return shapes | {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (len(REDUCED), WIDTH)}


def released(layout: str) -> tuple[dict, dict[str, Tensor]]:
    """(config.json, tensors) of a directory."""
    if layout == "eagle":
        shapes = {"embed_tokens.weight": (VOCAB, WIDTH), "fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)}
        return dict(KEYS), weights(shapes | layer_shapes("layers.0.", WIDTH))
    if layout == "eagle3":
        keys = KEYS | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(REDUCED)}
        keys |= {"target_hidden_size": WIDTH, "eagle_aux_hidden_state_layer_ids": IDS}
        return keys, weights(eagle3_shapes("midlayer.")) | MAPS
    if layout in WINDOWS:
        return window_blocks(layout)
    if layout.startswith("dspark"):
        return dspark(layout.removeprefix("dspark_"))
    if layout == "specforge":
        keys, tensors = released("eagle3")
        del keys["eagle_aux_hidden_state_layer_ids"]
        keys |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in IDS]}, "norm_output": True}
        return keys | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, tensors
    if layout.startswith("speculators"):
        kind, size = ("fc_norm", (WIDTH,)) if layout == "speculators_fc_norm" else ("input_norm", (3 * WIDTH,))
        names = ["input_norm.weight"] if kind == "input_norm" else [f"fc_norm.{place}.weight" for place in range(3)]
        keys = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        keys |= {"transformer_layer_config": dict(KEYS), "draft_vocab_size": len(REDUCED), "norm_before_residual": True}
        keys |= {"norm_before_fc": kind == "input_norm", "fc_norm": kind == "fc_norm", "norm_output": True}
        keys |= {"eagle_aux_hidden_state_layer_ids": IDS}
        shapes = eagle3_shapes("layers.0.") | dict.fromkeys(names, size)
        if layout == "speculators_qwen3":
            layer = KEYS | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": HEAD}
            shapes |= qwen3_shapes("layers.1.") | head_norms("layers.0.")
            # keys with transformers' default are not written
            keys["transformer_layer_config"] = {name: value for name, value in layer.items() if name != "rms_norm_eps"}
        return keys, weights(shapes) | MAPS
    keys = KEYS | {"large_hidden_size": WIDTH, "large_num_attention_heads": HEADS}
    keys |= {"block_size": 5, "num_hidden_layers": 2}
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {"lm_head.weight": (VOCAB, WIDTH)}
    for place in range(2):
        prefix = f"model.layers.{place}."
        shapes |= layer_shapes(prefix, WIDTH) | {f"{prefix}input_layernorm.weight": (WIDTH,)}
        shapes |= {f"{prefix}cross_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in ("q", "o")}
    return keys, weights(shapes)


def head_norms(prefix: str) -> Shapes:
    return {f"{prefix}self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}


def qwen3_shapes(prefix: str) -> Shapes:
    return layer_shapes(prefix, WIDTH) | {f"{prefix}input_layernorm.weight": (WIDTH,)} | head_norms(prefix)


def window_blocks(layout: str) -> tuple[dict, dict[str, Tensor]]:
    """(config.json, tensors) of blocks that draft nothing from the anchor: a window, and no embeddings."""
    tensors = dspark("vanilla" if layout == "speculators_dspark" else "dflash")[1]
    del tensors["embed_tokens.weight"]
    layer = KEYS | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": HEAD, "use_sliding_window": True}
    layer |= {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    if layout == "specforge_dflash":
        del tensors["lm_head.weight"]
        nested = {"mask_token_id": 6, "target_layer_ids": [-1, 1]}
        keys = {"architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": LAYERS}
        return layer | keys | {"dflash_config": nested}, tensors
    keys = {"speculators_model_type": "dspark", "transformer_layer_config": layer, "draft_vocab_size": len(REDUCED)}
    keys |= {"block_size": 5, "aux_hidden_state_layer_ids": [0, 2], "mask_token_id": 6, "sample_from_anchor": False}
    keys |= {"markov_rank": RANK, "markov_head_type": "vanilla", "sliding_window_non_causal": False}
    keys |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    tensors |= {name: tensors[name][REDUCED] for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    return keys, tensors | MAPS


def dspark(markov: str) -> tuple[dict, dict[str, Tensor]]:
    """(config.json, tensors) of a directory of DeepSpec's."""
    rank = 0 if markov == "dflash" else RANK
    keys = KEYS | {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2}
    keys |= {"block_size": 4, "target_layer_ids": [-1, 1], "num_target_layers": LAYERS, "mask_token_id": 6}
    keys |= {"head_dim": HEAD, "markov_rank": rank, "enable_confidence_head": rank > 0, "num_anchors": 3}
    shapes: Shapes = {f"{name}.weight": (VOCAB, WIDTH) for name in ("embed_tokens", "lm_head")}
    shapes |= {"norm.weight": (WIDTH,), "hidden_norm.weight": (WIDTH,), "fc.weight": (WIDTH, 2 * WIDTH)}
    for place in range(2):
        shapes |= qwen3_shapes(f"layers.{place}.")
    if rank:
        keys |= {"markov_head_type": markov, "confidence_head_with_markov": True}
        shapes |= {f"markov_head.markov_w{part}.weight": (VOCAB, rank) for part in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, WIDTH + rank), "confidence_head.proj.bias": (1,)}
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, WIDTH + rank), "markov_head.gate_proj.bias": (rank,)}
    if markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + WIDTH)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    return keys, weights(shapes)


DSPARKS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_dflash")
WINDOWS = ("specforge_dflash", "speculators_dspark")
WINDOW = 2
EAGLE3S = ("eagle3", "specforge", "speculators", "speculators_fc_norm", "speculators_qwen3")
KINDS = {"eagle": "eagle", "glide": "glide"} | dict.fromkeys(EAGLE3S, "eagle3") | dict.fromkeys(DSPARKS, "dspark")
KINDS |= dict.fromkeys(WINDOWS, "dspark")
"""What each layout is a draft of."""
LAYOUTS = tuple(KINDS)


def write(directory: Path, config: dict, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def normed(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(rows: Tensor) -> Tensor:
    """RoPE of rows at positions 0, 1, …"""
    half = rows.shape[1] // 2
    angles = torch.arange(len(rows))[:, None] / 10000.0 ** (torch.arange(half) / half)
    low, high = rows[:, :half], rows[:, half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], 1)


def attention(queries: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor) -> Tensor:
    """All heads one after the other; keys and values by key-value head, rotated already; `seen` [query, key]."""
    outputs = []
    for head in range(HEADS):
        group = head * len(keys) // HEADS
        scores = rotated(queries[:, head * HEAD : (head + 1) * HEAD]) @ keys[group].T / HEAD**0.5
        outputs.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values[group])
    return torch.cat(outputs, 1)


def self_attention(inputs: Tensor, tensors: dict[str, Tensor], prefix: str, seen: Tensor | None = None) -> Tensor:
    """Causal, unless `seen` says which keys each query sees."""
    queries, keys, values = (inputs @ tensors[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
    if f"{prefix}self_attn.q_norm.weight" in tensors:
        queries, keys = (
            normed(part.unflatten(1, (-1, HEAD)), tensors[f"{prefix}self_attn.{name}_norm.weight"]).flatten(1)
            for name, part in (("q", queries), ("k", keys))
        )
    seen = torch.ones(len(inputs), len(inputs), dtype=torch.bool).tril() if seen is None else seen
    attended = attention(queries, [rotated(key) for key in keys.split(HEAD, 1)], list(values.split(HEAD, 1)), seen)
    return attended @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def mlp(states: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """With the norm before it, and what it adds to."""
    rows = normed(states, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return states + (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T


def wide(narrow: Tensor) -> Tensor:
    """Logits of the reduced vocabulary over the whole one."""
    logits = torch.full((VOCAB,), float("-inf"), dtype=torch.float64)
    logits[REDUCED] = narrow
    return logits


class Truth:
    """What a target says of a sequence, from plain forwards without any cache."""

    def __init__(self, model, committed: list[int]) -> None:
        with torch.no_grad():
            output = model(torch.tensor([committed]), output_hidden_states=True, use_cache=True)
        self.embed = model.get_input_embeddings().weight.detach()
        self.head = model.get_output_embeddings().weight.detach()
        self.final = output.hidden_states[-1][0]
        self.read_by_blocks = torch.cat([output.hidden_states[place][0] for place in (0, 2)], -1)
        self.aux = torch.cat([output.hidden_states[place][0] for place in IDS], -1)
        layers = output.past_key_values.layers[LAYERS - 2 :]
        self.cached = [([*layer.keys[0]], [*layer.values[0]]) for layer in layers]


def expected(
    layout: str, config: dict, tensors: dict[str, Tensor], *, truth: Truth, tokens: list[int], num_known: int
) -> tuple[Tensor, Tensor | None]:
    """(logits after `tokens`, of which the target has read `num_known`; logit of the confidence in the next token, if
    there is a head for it). An EAGLE's further states are its own.
    """
    if layout == "glide":
        return _glide(tensors, truth, tokens, num_known), None
    if KINDS[layout] == "dspark":
        return _dspark(config, tensors, truth, tokens, num_known)
    is_first = layout == "eagle"
    prefix = "midlayer." if layout in ("eagle3", "specforge") else "layers.0."
    embedded = (tensors["embed_tokens.weight"] if is_first else truth.embed)[tokens[1:]]
    states = truth.final[:num_known] if is_first else _entering(config, tensors, truth.aux[:num_known])
    while True:
        count = len(states)
        if is_first:
            inputs = torch.cat([embedded[:count], states], 1) @ tensors["fc.weight"].T + tensors["fc.bias"]
            residual = inputs
        else:
            hidden = normed(states, tensors[f"{prefix}hidden_norm.weight"])
            inputs = torch.cat([normed(embedded[:count], tensors[f"{prefix}input_layernorm.weight"]), hidden], 1)
            residual = hidden if config.get("norm_before_residual") else states
        output = mlp(residual + self_attention(inputs, tensors, prefix), tensors, prefix)
        if layout == "speculators_qwen3":
            inputs = normed(output, tensors["layers.1.input_layernorm.weight"])
            output = mlp(output + self_attention(inputs, tensors, "layers.1."), tensors, "layers.1.")
        output = output[-1:]
        after = output if is_first else normed(output, tensors["norm.weight"])
        if count == len(tokens) - 1:
            return after[0] @ truth.head.T if is_first else wide(after[0] @ tensors["lm_head.weight"].T), None
        states = torch.cat([states, after if "norm_before_fc" in config and config["norm_output"] else output])


def _entering(config: dict, tensors: dict[str, Tensor], features: Tensor) -> Tensor:
    if config.get("norm_before_fc"):
        features = normed(features, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        parts = [normed(part, tensors[f"fc_norm.{place}.weight"]) for place, part in enumerate(features.chunk(3, -1))]
        features = torch.cat(parts, -1)
    return features @ tensors["fc.weight"].T


def _glide(tensors: dict[str, Tensor], truth: Truth, tokens: list[int], num_known: int) -> Tensor:
    states = tensors["model.embed_tokens.weight"][tokens]
    for place, (keys, values) in enumerate(truth.cached):
        prefix = f"model.layers.{place}."
        states = states + self_attention(normed(states, tensors[f"{prefix}input_layernorm.weight"]), tensors, prefix)
        queries = states @ tensors[f"{prefix}cross_attn.q_proj.weight"].T
        seen = torch.ones(len(tokens), num_known, dtype=torch.bool)
        attended = attention(queries, [key[:num_known] for key in keys], [value[:num_known] for value in values], seen)
        states = mlp(states + attended @ tensors[f"{prefix}cross_attn.o_proj.weight"].T, tensors, prefix)
    return normed(states[-1], tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def _in_window(config: dict, num_known: int, size: int) -> Tensor:
    """What each row of the text and of a block sees in a sliding layer."""
    steps = torch.arange(size)
    first = num_known - WINDOW + (steps + 1 if "dflash_config" in config else 0 * steps)
    of_block = torch.cat([torch.arange(num_known) >= first[:, None], steps <= steps[:, None]], 1)
    return torch.cat([torch.ones(num_known, num_known + size, dtype=torch.bool), of_block])


def _dspark(
    config: dict, tensors: dict[str, Tensor], truth: Truth, tokens: list[int], num_known: int
) -> tuple[Tensor, Tensor | None]:
    context = normed(truth.read_by_blocks[:num_known] @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    size = config["block_size"]
    states = tensors.get("embed_tokens.weight", truth.embed)[[tokens[num_known], *[6] * (size - 1)]]
    for place in range(2):
        prefix = f"layers.{place}."
        rows = torch.cat([context, normed(states, tensors[f"{prefix}input_layernorm.weight"])])
        everything = torch.ones(len(rows), len(rows), dtype=torch.bool)
        seen = _in_window(config, num_known, size) if size == 5 and place == 0 else everything
        states = mlp(states + self_attention(rows, tensors, prefix, seen)[num_known:], tensors, prefix)
    states = normed(states, tensors["norm.weight"])[-4:]
    latent, state = torch.zeros(RANK, dtype=torch.float64), torch.zeros(RANK, dtype=torch.float64)
    for place, token in enumerate(tokens[num_known:]):
        logits = tensors.get("lm_head.weight", truth.head) @ states[place]
        confidence = None
        if "markov_head.markov_w1.weight" not in tensors:
            continue
        embedded = latent = tensors["markov_head.markov_w1.weight"][token]
        if config["markov_head_type"] == "gated":
            gate, shift = (tensors[f"markov_head.gate_proj.{name}"] for name in ("weight", "bias"))
            latent = (gate @ torch.cat([states[place], embedded]) + shift).sigmoid() * embedded
        if config["markov_head_type"] == "rnn":
            joint, shift = (tensors[f"markov_head.joint_proj.{name}"] for name in ("weight", "bias"))
            gate, candidate, output = (joint @ torch.cat([state, embedded, states[place]]) + shift).split(RANK)
            state, latent = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh(), output.tanh()
        logits = logits + tensors["markov_head.markov_w2.weight"] @ latent
        seen = torch.cat([states[place], embedded])
        confidence = tensors["confidence_head.proj.weight"][0] @ seen + tensors["confidence_head.proj.bias"][0]
    return wide(logits) if len(logits) < VOCAB else logits, confidence
