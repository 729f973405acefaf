"""The recipes of EAGLE, GliDe and DSpark drafts (same seed, same bytes; trained as they draft), and embedded drafts."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.recipes import feature_drafts
from checkpoints.recipes.feature_drafts import BlockPredictions, DraftRecipe, DSparkRecipe, loss_of, random_anchors
from checkpoints.recipes.texts import NUM_DEPTHS, StoryBatch, TargetReading, encode_story, padded
from checkpoints.recipes.tiny import Recipe, make_drafts
from configs.schema import ModelSource, PairConfig
from data_gen.prompts.stories import stories
from lm.cache import growing_cache
from lm.features.released import released_layout_of
from lm.pair import load_model, load_pair, load_tokenizer
from tests.toys.random_drafts import beside

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
CHAINS = ("eagle", "glide")
TOY = DSparkRecipe(block_size=3, markov_rank=4, num_anchors=4, batch_size=2, num_steps=3)
TOY_RECIPE = Recipe(eagle_and_glide=DraftRecipe(batch_size=4, num_steps=2), dspark_draft=TOY)


@pytest.fixture(scope="module")
def target():
    return load_model(ModelSource(path=str(TINY / "target"), dtype="float32", device_map="cpu"))


@pytest.fixture(scope="module")
def batch():
    tokenizer = load_tokenizer(ModelSource(path=str(TINY / "target")))
    return padded([encode_story(story, tokenizer) for story in stories("test", 8)], tokenizer.pad_token_id)


def made(folder: Path, *kinds: str, seed: int = 0) -> list[bytes]:
    """The weights of drafts that a toy recipe makes in a folder with the target."""
    folder.mkdir(exist_ok=True)
    if not (folder / "target").exists():
        (folder / "target").symlink_to(TINY / "target")
    make_drafts(folder, kinds, seed=seed, recipe=TOY_RECIPE)
    return [(folder / kind / "model.safetensors").read_bytes() for kind in kinds]


@pytest.mark.parametrize("kinds", [pytest.param(CHAINS, marks=pytest.mark.slow), ("dspark",)])
def test_the_same_seed_gives_the_same_bytes_also_of_a_run_that_was_stopped(kinds, tmp_path, monkeypatch):
    whole = made(tmp_path / "whole", *kinds)
    assert all(ours != theirs for ours, theirs in zip(whole, made(tmp_path / "other", *kinds, seed=1), strict=True))
    for kind in kinds:
        source = ModelSource(path=str(tmp_path / "whole" / kind), dtype="float32")
        pair = load_pair(PairConfig(target=ModelSource(path=str(TINY / "target"), dtype="float32"), draft=source))
        assert released_layout_of(source) == kind
        assert pair.drafting.config.max_position_embeddings == 1024
    with pytest.raises(ValueError, match=rf"{kinds[0]} exists.*overwrite"):
        made(tmp_path / "whole", *kinds)
    if kinds != ("dspark",):
        return
    monkeypatch.setattr("checkpoints.recipes.fit._CHECKPOINT_S", 0.0)
    work, steps, more = tmp_path / "stopped" / "dspark-work", [loss_of, loss_of], []
    with monkeypatch.context() as patch:
        patch.setattr(feature_drafts, "loss_of", lambda blocks: steps.pop()(blocks))
        with pytest.raises(IndexError):
            made(tmp_path / "stopped", *kinds)
    assert (work / "checkpoint.pt").is_file()
    with pytest.raises(ValueError, match="run that differs in seed"):
        made(tmp_path / "stopped", *kinds, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(feature_drafts, "loss_of", lambda blocks: more.append(0) or loss_of(blocks))
        assert made(tmp_path / "stopped", *kinds) == whole
    assert len(more) == TOY.num_steps - 2, "two steps were made before"
    assert not work.exists()


@pytest.mark.parametrize("kind", CHAINS)
def test_predictions_for_a_text_at_each_depth_are_those_of_decoding(kind, target):
    torch.manual_seed(0)
    draft = feature_drafts.new_feature_draft(kind, target).eval()
    for parameter in draft.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)  # cross-attention begins at zero
    ids = torch.randint(3, target.config.vocab_size, (2, 12))
    reading = TargetReading.of(target, StoryBatch(ids, torch.ones(2, 11, dtype=torch.bool)))
    positions = reading.is_learned.nonzero().tolist()
    for depth, log_q in enumerate(feature_drafts.log_q_by_depth(draft, reading), 1):
        for row, (text, position) in zip(log_q, positions, strict=True):
            recording, model = beside(target, draft)
            recording.feed(ids[text, : position + 1 - depth].tolist())
            decoded = model.feed(ids[text, : position + 1].tolist())[0].log_softmax(-1)
            torch.testing.assert_close(row, decoded, atol=1e-4, rtol=0)
    assert depth == NUM_DEPTHS


def test_blocks_begin_at_response_tokens_that_another_follows_and_say_at_once_what_each_says_alone(target, batch):
    is_learned = torch.tensor([[False, False, True, True, True], [False, True, False, False, False]])
    two = StoryBatch(torch.zeros(2, 6, dtype=torch.long), is_learned)  # token i + 1 is of the response at True
    assert [sorted(row) for row in random_anchors(two, None).tolist()] == [[3, 4], [0, 0]]
    torch.manual_seed(0)
    draft = feature_drafts.new_dspark(target, TOY).eval()
    anchors = random_anchors(batch, 3, torch.Generator().manual_seed(0))
    found = feature_drafts.predict_blocks(draft, target, batch, anchors)
    states = target.base_model(input_ids=batch.ids, output_hidden_states=True)
    features = torch.cat([states.hidden_states[layer_id] for layer_id in draft.target_layer_ids], -1)
    for place, (row, column) in enumerate((anchors > 0).nonzero().tolist()):
        at = int(anchors[row, column])
        cache = growing_cache(64)
        draft.remember(features[row : row + 1, :at], cache)
        alone = draft.block(batch.ids[row, at].view(1, 1), torch.tensor([[at]]), cache=cache)[0, 0]
        num = int(found.is_inside[place].sum())
        hidden = draft.joined(alone[:num], batch.ids[row, at : at + num])
        torch.testing.assert_close(draft.logits(hidden).log_softmax(-1), found.log_q[place, :num], atol=1e-4, rtol=0)
        torch.testing.assert_close(draft.confidence(hidden), found.confidence[place, :num], atol=1e-4, rtol=0)
        p = target.get_output_embeddings()(states.last_hidden_state[row, at : at + num]).softmax(-1)
        torch.testing.assert_close(found.p[place, :num], p)
        assert found.next_ids[place, :num].tolist() == batch.ids[row, at + 1 : at + 1 + num].tolist()
        assert num == min(TOY.block_size, int(batch.is_learned[row].nonzero().max()) + 1 - at)


def test_the_loss_weighs_entropy_distance_and_doubt_as_deepspec_does():
    q, p = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]), torch.tensor([[[0.8, 0.2], [0.6, 0.4]]])
    next_ids, doubts, is_inside = torch.tensor([[0, 1]]), torch.tensor([[0.0, 2.0]]), torch.ones(1, 2).bool()
    blocks = BlockPredictions(q.log(), p, next_ids, doubts, is_inside)
    weights, said = (1.0, math.exp(-1 / 4)), (0.5, 1 / (1 + math.exp(-2)))
    terms = [
        0.1 * -math.log(said_q) + 0.9 * 0.6 - 0.7 * math.log(c) - 0.3 * math.log(1 - c)
        for said_q, c in zip((0.5, 0.1), said, strict=True)
    ]
    expected = sum(w * term for w, term in zip(weights, terms, strict=True)) / sum(weights)
    assert loss_of(blocks).item() == pytest.approx(expected, abs=1e-6)
    cut = blocks._replace(is_inside=torch.tensor([[True, False]]))
    assert loss_of(cut).item() == pytest.approx(terms[0], abs=1e-6)


@pytest.mark.parametrize(("kind", "smallest_rate"), [("eagle", 0.75), ("glide", 0.85), ("dspark", 0.65)])
def test_the_embedded_drafts_are_small_finite_and_agree_with_their_target_at_every_depth(
    kind, smallest_rate, target, batch
):
    folder = TINY / kind
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2_000_000
    for tensor in load_file(folder / "model.safetensors").values():
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all()
    sources = {name: ModelSource(path=str(TINY / name), dtype="float32") for name in ("target", kind)}
    draft = load_pair(PairConfig(target=sources["target"], draft=sources[kind])).drafting
    figures_of = feature_drafts.dspark_figures if kind == "dspark" else feature_drafts.feature_figures
    figures = figures_of(draft, target, [batch])
    assert min(figures["acceptance_rates"]) > smallest_rate
    if kind == "dspark":
        shipped = json.loads((folder / "figures.json").read_text())
        for name in ("acceptance_rates", "confidences", "brier"):
            assert figures[name] == pytest.approx(shipped[name], abs=0.06)
        assert figures["confidences"] == pytest.approx(figures["acceptance_rates"], abs=0.04)
