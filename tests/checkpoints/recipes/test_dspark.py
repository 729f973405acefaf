"""The recipe of the DSpark draft (same seed, same bytes, also of a run that was stopped; learned as it drafts), and the
one in the repository.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.recipes.dspark import (
    BlockPredictions,
    DSparkRecipe,
    dspark_figures,
    loss_of,
    new_dspark,
    predict_blocks,
    random_anchors,
)
from checkpoints.recipes.texts import StoryBatch, encode_story, padded
from checkpoints.recipes.tiny import Recipe, make_drafts
from configs.schema import ModelSource
from data_gen.stories.stories import stories
from lm import load_model, load_tokenizer

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
TOY = DSparkRecipe(block_size=3, markov_rank=4, num_anchors=4, batch_size=2, num_steps=3)


@pytest.fixture(scope="module")
def target():
    return load_model(ModelSource(path=str(TINY / "target"), dtype="float32", device_map="cpu"))


@pytest.fixture(scope="module")
def batch():
    tokenizer = load_tokenizer(ModelSource(path=str(TINY / "target")))
    return padded([encode_story(story, tokenizer) for story in stories("test", 8)], tokenizer.pad_token_id)


def made(folder: Path, seed: int = 0) -> bytes:
    folder.mkdir(exist_ok=True)
    if not (folder / "target").exists():
        (folder / "target").symlink_to(TINY / "target")
    make_drafts(folder, ["dspark"], seed=seed, recipe=Recipe(dspark_draft=TOY))
    return (folder / "dspark" / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_bytes_also_of_a_run_that_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoints.recipes.dspark.dspark_figures", lambda *_: {})
    whole = made(tmp_path / "whole")
    monkeypatch.setattr("checkpoints.recipes.fit._CHECKPOINT_S", 0.0)
    steps = [loss_of, loss_of]
    with monkeypatch.context() as patch:
        patch.setattr("checkpoints.recipes.dspark.loss_of", lambda blocks: steps.pop()(blocks))
        with pytest.raises(IndexError):
            made(tmp_path / "stopped")
    assert (tmp_path / "stopped" / "dspark-work" / "checkpoint.pt").is_file()
    with pytest.raises(ValueError, match="run that differs in seed"):
        made(tmp_path / "stopped", seed=1)
    made_now = []
    with monkeypatch.context() as patch:
        patch.setattr("checkpoints.recipes.dspark.loss_of", lambda blocks: made_now.append(0) or loss_of(blocks))
        assert made(tmp_path / "stopped") == whole
    assert len(made_now) == TOY.num_steps - 2, "two steps were made before"
    assert made(tmp_path / "other", seed=1) != whole
    assert not (tmp_path / "stopped" / "dspark-work").exists()
    with pytest.raises(ValueError, match=r"dspark exists.*overwrite"):
        made(tmp_path / "whole")


def test_blocks_begin_at_response_tokens_that_another_follows():
    is_learned = torch.tensor([[False, False, True, True, True], [False, True, False, False, False]])
    batch = StoryBatch(torch.zeros(2, 6, dtype=torch.long), is_learned)  # token i + 1 is of the response at True
    assert [sorted(row) for row in random_anchors(batch, None).tolist()] == [[3, 4], [0, 0]]


def test_blocks_of_a_text_that_are_learned_at_once_say_what_each_says_alone(target, batch):
    torch.manual_seed(0)
    draft = new_dspark(target, TOY).eval()
    anchors = random_anchors(batch, 3, torch.Generator().manual_seed(0))
    found = predict_blocks(draft, target, batch, anchors)
    states = target.base_model(input_ids=batch.ids, output_hidden_states=True)
    features = torch.cat([states.hidden_states[layer_id] for layer_id in draft.target_layer_ids], -1)
    for place, (row, column) in enumerate((anchors > 0).nonzero().tolist()):
        at = int(anchors[row, column])
        cache = draft.new_cache(64)
        draft.remember(draft.context(features[row : row + 1, :at]), torch.arange(at)[None], cache)
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
    blocks = BlockPredictions(
        q.log(), p, torch.tensor([[0, 1]]), torch.tensor([[0.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool)
    )
    weights, said = (1.0, math.exp(-1 / 4)), (0.5, 1 / (1 + math.exp(-2)))
    terms = [
        0.1 * -math.log(said_q) + 0.9 * 0.6 - 0.7 * math.log(c) - 0.3 * math.log(1 - c)
        for said_q, c in zip((0.5, 0.1), said, strict=True)
    ]
    expected = sum(w * term for w, term in zip(weights, terms, strict=True)) / sum(weights)
    assert loss_of(blocks).item() == pytest.approx(expected, abs=1e-6)
    cut = blocks._replace(is_inside=torch.tensor([[True, False]]))
    assert loss_of(cut).item() == pytest.approx(terms[0], abs=1e-6)


def test_the_embedded_draft_agrees_with_its_target_and_knows_how_far(target, batch):
    folder = TINY / "dspark"
    draft = new_dspark(target, DSparkRecipe()).eval()
    tensors = load_file(folder / "model.safetensors")
    draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    figures, shipped = dspark_figures(draft, target, [batch]), json.loads((folder / "figures.json").read_text())
    assert min(figures["acceptance_rates"]) > 0.65
    for name in ("acceptance_rates", "confidences", "brier"):
        assert figures[name] == pytest.approx(shipped[name], abs=0.06)
    assert figures["confidences"] == pytest.approx(figures["acceptance_rates"], abs=0.04)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2_000_000
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values())
