"""A DSpark draft's confidences by DeepSpec's own code beside ours, such as those of an exported directory
(`acceptance-heads export --format dspark`).

    python -m benchmarks.deepspec --deepspec DIR --draft DIR --target DIR [--num_texts 8]

DIR of --deepspec is a checkout of github.com/deepseek-ai/DeepSpec (MIT), which is no part of this project. On stories
of the test split, from every eighth token of each answer: DeepSpec loads the directory, drafts a block greedily and
gives its confidences; ours are of the same tokens. Both compute in float32. Exits with 1 where two differ by more
than 1e-5, or a token does. The last line is one JSON document.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from jsonargparse import auto_cli
from torch import Tensor
from transformers import DynamicCache

from checkpoints.recipes.training import encode_story
from configs.schema import ModelSource, PairConfig
from data_gen.stories.stories import stories
from lm import load_pair
from lm.features.dspark import DSpark

_LIMIT = 1e-5
_EVERY = 8


class Block(NamedTuple):
    """What a draft says of one block."""

    tokens: Int[Tensor, " place"]
    confidence: Float[Tensor, " place"]


def compare(deepspec: str, draft: str, target: str, *, num_texts: int = 8) -> None:
    """Compare every block of some texts."""
    if not (Path(deepspec) / "deepspec" / "modeling").is_dir():
        raise SystemExit(f"error: no checkout of DeepSpec at {deepspec}; clone it and name its directory (--deepspec)")
    sources = (ModelSource(path=path, dtype="float32") for path in (target, draft))
    pair = load_pair(PairConfig(**dict(zip(("target", "draft"), sources, strict=True))))
    ours = pair.drafting
    if not isinstance(ours, DSpark) or ours.confidence_head is None:
        raise SystemExit(f"error: {draft} is no DSpark draft with a confidence head; name one (--draft)")
    sys.path.insert(0, deepspec)
    theirs = importlib.import_module("deepspec.modeling.dspark").Qwen3DSparkModel.from_pretrained(
        draft, dtype=torch.float32, attn_implementation="sdpa"
    )
    rows = [encode_story(story, pair.tokenizer) for story in stories("test", num_texts)]
    worst, differing, num = 0.0, 0, 0
    for ids, start in rows:
        features = _features(pair.target, ours, ids)
        for anchor in range(start, len(ids) - 1, _EVERY):
            block = _theirs(theirs.eval(), features, ids, anchor)
            own = _ours(ours, features, torch.tensor(ids), anchor, block.tokens)
            worst = max(worst, float((own.confidence - block.confidence).abs().max()))
            differing += int((own.tokens != block.tokens).sum())
            num += len(block.tokens)
    print(json.dumps({"draft": draft, "confidences": num, "largest_difference": worst, "tokens_differing": differing}))
    sys.exit(int(worst > _LIMIT or differing > 0))


@torch.no_grad()
def _features(target: Any, draft: DSpark, ids: list[int]) -> Float[Tensor, "1 token feature"]:
    states = target.base_model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer_id] for layer_id in draft.target_layer_ids], -1)


@torch.no_grad()
def _theirs(model: Any, features: Tensor, ids: list[int], anchor: int) -> Block:
    """A block by DeepSpec's evaluation code, greedily, nothing cut."""
    ops = importlib.import_module("deepspec.eval.dspark.draft_ops")
    block = torch.full((1, model.block_size), model.mask_token_id)
    block[0, 0] = ids[anchor]
    # as their forward_dspark_draft_block, which crops the cache as only an older transformers does
    hidden = model._forward_backbone(
        target_hidden_states=features[:, :anchor],
        noise_embedding=model.embed_tokens(block),
        position_ids=torch.arange(anchor + model.block_size)[None],
        past_key_values=DynamicCache(),
        use_cache=True,
        is_causal=False,
    )
    proposal = ops.build_dspark_proposal(
        model,
        draft_input_ids=block,
        block_hidden=hidden,
        block_size=model.block_size,
        temperature=0.0,
        confidence_threshold=0.0,
    )
    return Block(proposal.verify_input_ids[0, 1:], proposal.confidence_logits[0].sigmoid())


@torch.no_grad()
def _ours(draft: DSpark, features: Tensor, ids: Tensor, anchor: int, tokens: Tensor) -> Block:
    """The same block, after these tokens."""
    states = draft.on_text(features, ids[None], torch.tensor([[anchor]]))[0, 0]
    hidden = draft.joined(states, torch.cat([ids[anchor : anchor + 1], tokens[:-1]]))
    return Block(draft.logits(hidden).argmax(-1), draft.confidence(hidden).sigmoid())


if __name__ == "__main__":
    auto_cli(compare, as_positional=False)
