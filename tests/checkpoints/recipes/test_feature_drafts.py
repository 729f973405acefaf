"""The recipe of the feature drafts (same seed, same bytes; released layouts; taught as they draft), and those in the
repository.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.recipes.feature_drafts import DraftRecipe, feature_figures, log_q_by_depth, new_feature_draft
from checkpoints.recipes.texts import NUM_DEPTHS, StoryBatch, TargetReading, encode_story, padded
from checkpoints.recipes.tiny import Recipe, make_drafts
from configs.schema import ModelSource, PairConfig
from data_gen.stories.stories import stories
from lm import load_model, load_pair
from lm.features.released import released_layout_of
from lm.features.stepwise import feature_model
from lm.features.taps import TappedModel

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
FEATURE_DRAFTS = ("eagle", "glide")
TOY_RECIPE = Recipe(eagle_and_glide=DraftRecipe(batch_size=4, num_steps=2))


def pair_of(kind: str, directory: Path = TINY):
    sources = {"target": ModelSource(path=str(TINY / "target"), dtype="float32")}
    return load_pair(PairConfig(**sources, draft=ModelSource(path=str(directory / kind), dtype="float32")))


def folder_with_target(path: Path) -> Path:
    path.mkdir()
    (path / "target").symlink_to(TINY / "target")
    return path


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_the_released_layouts(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoints.recipes.feature_drafts.feature_figures", lambda *_: {})
    first, again, other = (folder_with_target(tmp_path / name) for name in "abc")
    for folder, seed in ((first, 0), (again, 0), (other, 1)):
        make_drafts(folder, FEATURE_DRAFTS, seed=seed, recipe=TOY_RECIPE)
    for kind in FEATURE_DRAFTS:
        bytes_of = [(folder / kind / "model.safetensors").read_bytes() for folder in (first, again, other)]
        assert bytes_of[0] == bytes_of[1] != bytes_of[2]
        assert released_layout_of(ModelSource(path=str(first / kind))) == kind
        assert pair_of(kind, first).drafting.config.max_position_embeddings == 1024
    with pytest.raises(ValueError, match=r"eagle exists.*overwrite"):
        make_drafts(first, FEATURE_DRAFTS, recipe=TOY_RECIPE)


@pytest.mark.parametrize("kind", FEATURE_DRAFTS)
def test_what_is_said_of_a_text_at_each_depth_is_what_decoding_says(kind):
    torch.manual_seed(0)
    target = load_model(ModelSource(path=str(TINY / "target"), dtype="float32", device_map="cpu"))
    draft = new_feature_draft(kind, target).eval()
    for parameter in draft.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)  # cross-attention begins at zero
    ids = torch.randint(3, target.config.vocab_size, (2, 12))
    reading = TargetReading.of(target, StoryBatch(ids, torch.ones(2, 11, dtype=torch.bool)))
    places = reading.is_learned.nonzero().tolist()
    for depth, log_q in enumerate(log_q_by_depth(draft, reading), 1):
        for row, (text, place) in zip(log_q, places, strict=True):
            tapped = TappedModel(target, draft)
            tapped.forward(ids[text, : place + 1 - depth].tolist())
            decoded = feature_model(draft, tapped).forward(ids[text, : place + 1].tolist())[0].log_softmax(-1)
            torch.testing.assert_close(row, decoded, atol=1e-4, rtol=0)
    assert depth == NUM_DEPTHS


@pytest.mark.parametrize(("kind", "least"), [("eagle", 0.75), ("glide", 0.85)])
def test_the_embedded_feature_drafts_agree_with_their_target_at_every_depth(kind, least):
    pair = pair_of(kind)
    batch = padded([encode_story(story, pair.tokenizer) for story in stories("test", 16)], pair.tokenizer.pad_token_id)
    assert min(feature_figures(pair.drafting, pair.target, [batch])["acceptance_rates"]) > least


def test_the_embedded_feature_drafts_are_finite_bfloat16_of_at_most_2_mb():
    files = [TINY / kind / "model.safetensors" for kind in FEATURE_DRAFTS]
    assert sum(file.stat().st_size for file in files) <= 2_000_000
    for file in files:
        for tensor in load_file(file).values():
            assert tensor.dtype == torch.bfloat16
            assert tensor.isfinite().all()
