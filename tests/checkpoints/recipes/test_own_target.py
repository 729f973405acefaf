"""A target read once, and the drafts that learn from it: EAGLE-3 with a reduced vocabulary, and a small Llama."""

import json
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.recipes import distillation
from checkpoints.recipes.distillation import Distillation, distil, load_readings, read_target, without_leakage
from checkpoints.recipes.own_target import Eagle3Draft, SmallDraft, layers_of, likeliest_tokens
from checkpoints.recipes.texts import encode_story
from configs.schema import ModelSource, PairConfig
from data_gen.prompts.stories import stories
from decode import SpeculativeDecoder
from decode.drafters.factory import PairModels
from decode.policies import FixedLength
from lm import Sampling
from lm.pair import load_model, load_pair, load_tokenizer

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
LAYERS = (2, 5, 7)
DISTILLATION = Distillation(num_epochs=2, num_deep_epochs=1, batch_size=4, learning_rate=4e-3, is_mixed=False)
DRAFTS = {"eagle3": partial(Eagle3Draft, vocab_size=200), "small": partial(SmallDraft, hidden_size=64, num_layers=1)}


@pytest.fixture(scope="module")
def target():
    return load_model(ModelSource(path=str(TINY / "target"), dtype="float32"))


@pytest.fixture(scope="module")
def texts():
    tokenizer = load_tokenizer(ModelSource(path=str(TINY / "target")))
    rows = [encode_story(story, tokenizer) for story in stories("train", 24)]
    return [(ids[:start], ids[start:]) for ids, start in rows]


@pytest.fixture(scope="module", autouse=True)
def eight_texts_per_shard():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("checkpoints.recipes.distillation._TEXTS_PER_SHARD", 8)
        yield


@pytest.fixture(scope="module")
def paths(target, texts, tmp_path_factory):
    assert layers_of(target) == LAYERS
    return read_target(target, texts, tmp_path_factory.mktemp("texts") / "readings", layer_ids=LAYERS)


@torch.no_grad()
def test_a_reading_is_what_the_target_says_of_the_text_alone(target, texts, paths):
    readings = [reading for path in paths for reading in load_readings(path)]
    assert [reading.ids.tolist() for reading in readings] == [prompt + response for prompt, response in texts]
    for reading, (prompt, _) in zip(readings[:3], texts, strict=False):
        output, response = target(input_ids=reading.ids[None], output_hidden_states=True), slice(len(prompt) - 1, -1)
        states = torch.cat([output.hidden_states[layer][0] for layer in LAYERS], -1)
        torch.testing.assert_close(reading.features, states, atol=1e-4, rtol=1e-4)
        log_p, ids = output.logits[0, response].log_softmax(-1).topk(64, -1)
        torch.testing.assert_close(reading.log_p[response].float(), log_p, atol=2e-2, rtol=2e-3)
        assert (reading.likeliest[response, 0] == ids[:, 0]).all()
        assert reading.is_learned.nonzero().flatten().tolist() == list(range(len(prompt) - 1, len(reading.ids) - 1))


def test_a_reading_that_was_stopped_goes_on_and_another_is_refused(target, texts, paths):
    whole = [path.read_bytes() for path in paths]
    paths[1].unlink()
    again = read_target(target, texts, paths[0].parent, layer_ids=LAYERS)
    assert [path.read_bytes() for path in again] == whole
    with pytest.raises(ValueError, match="made from other responses, layers or another target"):
        read_target(target, texts, paths[0].parent, layer_ids=(1, 2, 3))


def test_the_vocabulary_is_what_the_target_predicts_most_and_a_width_fits_its_heads(target, paths):
    with pytest.raises(ValueError, match="hidden_size is 96; use a multiple of 64 up to 128"):
        SmallDraft(target, paths, hidden_size=96, num_layers=1)
    ids = likeliest_tokens(paths, 50, vocab_size=768)
    first = torch.cat([r.likeliest[r.is_learned, 0] for path in paths for r in load_readings(path)])
    assert (ids[1:] > ids[:-1]).all()
    assert torch.isin(first.mode().values, ids)


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_learns_one_that_was_stopped_ends_in_the_same_weights_and_what_is_saved_decodes_as_the_target(
    kind, target, paths, tmp_path, monkeypatch
):
    def made(kind=kind):
        torch.manual_seed(0)
        return DRAFTS[kind](target, paths)

    whole, checkpoint = made(), tmp_path / "parts" / "checkpoint.pt"
    figures = distil(whole, paths, tmp_path / "whole" / "checkpoint.pt", DISTILLATION)
    still = replace(DISTILLATION, num_epochs=1, learning_rate=0.0)
    before = distil(made(), paths, tmp_path / "none" / "checkpoint.pt", still)
    most = {"eagle3": 0.8, "small": 0.95}[kind]  # in eight steps
    assert figures["divergences"][0] < most * before["divergences"][0]
    assert len(figures["acceptance_rates"]) == (5 if kind == "eagle3" else 1)
    learn, steps = distillation.divergences_and_rates, count()

    def interrupted(*args):
        if next(steps) == 5:
            raise InterruptedError
        return learn(*args)

    with monkeypatch.context() as patch:
        patch.setattr("checkpoints.recipes.fit._CHECKPOINT_S", 0.0)
        patch.setattr(distillation, "divergences_and_rates", interrupted)
        with pytest.raises(InterruptedError):
            distil(made(), paths, checkpoint, DISTILLATION)
    parts = made()
    distil(parts, paths, checkpoint, DISTILLATION)
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, parts.module.state_dict()[name]), name
    other = made({"eagle3": "small", "small": "eagle3"}[kind])
    cases = [(parts, paths, 1, "seed"), (parts, paths[:2], 0, "readings"), (other, paths, 0, "shapes")]
    for draft, readings, seed, what in cases:
        with pytest.raises(ValueError, match=f"differs in {what}"):
            distil(draft, readings, checkpoint, replace(DISTILLATION, seed=seed))
    check_saved(whole, kind, paths, tmp_path / "draft")


def check_saved(draft, kind: str, paths: list[Path], folder: Path) -> None:
    """Fail unless a saved draft loads beside the target, and decodes greedily as the target does alone."""
    draft.save(folder)
    folders = {"target": TINY / "target", "draft": folder}
    sources = {name: ModelSource(path=str(path), dtype="float32") for name, path in folders.items()}
    pair = load_pair(PairConfig(**sources))
    if kind == "eagle3":
        assert not [name for name in load_file(folder / "model.safetensors") if name.startswith(("lm_head", "embed"))]
        assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 200
        head = pair.drafting.lm_head.weight
        assert torch.equal(head, pair.target.get_output_embeddings().weight[pair.drafting.target_ids])
    models, greedy = PairModels(pair), Sampling(temperature=0.0)
    decoder: SpeculativeDecoder = models.decoder(models.drafter(FixedLength(4)), sampling=greedy, max_draft_length=4)
    ids = next(load_readings(paths[0])).ids[:20].tolist()
    alone = pair.target.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, 20:]
    generation = decoder.generate(ids, 16)
    assert list(generation.token_ids) == alone.tolist()
    assert generation.counts.num_drafted > 0


def test_responses_are_read_from_the_file_that_data_writes(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"id": "0", "prompt_ids": [1, 2], "response_ids": [3]}\n{"prompt_ids": [1], "response_ids": []}\n')
    assert distillation.read_responses(path) == [([1, 2], [3])]
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"responses.jsonl:1 has no prompt_ids"):
        distillation.read_responses(path)


def test_no_prompt_is_taught_and_held_out():
    texts = [([place % 16], [place]) for place in range(20)]  # the last four repeat the first four prompts
    assert without_leakage(texts) == texts[4:]
    assert without_leakage(texts[4:]) == texts[4:]
    assert without_leakage([]) == []
    # few prompts: the last shard is cut out of the last 8 texts, which must not repeat one another either
    few = [([number % 9], [number]) for number in range(18)]
    assert without_leakage(few) == [few[0], *few[9:]]
