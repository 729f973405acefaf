"""Laws of the recipe (same seed, same bytes) and of the embedded trio: it loads, is small and accepted unevenly."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.recipes import texts
from checkpoints.recipes.texts import ASSISTANT, END, encode_story, padded
from checkpoints.recipes.tiny import TRIO, Recipe, log_q, make_trio
from configs.schema import ModelSource, PairConfig
from data_gen.prompts.stories import stories
from lm import Pair, load_pair
from tests.data_gen.on_disk import files_of

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
TOY = (1, 16, 32, 2)
SIZES = {"vocab_size": 300, "num_tokenizer_stories": 40, "batch_size": 4, "target_steps": 5, "distil_steps": 3}
TOY_RECIPE = Recipe(target=TOY, draft=TOY, micro=TOY, **SIZES)


@pytest.fixture(scope="module")
def trio() -> Pair:
    sources = {name: ModelSource(path=str(TINY / name), dtype="float32") for name in TRIO}
    return load_pair(PairConfig(**sources))


def test_the_same_seed_gives_the_same_bytes_and_models_on_disk_are_replaced_only_on_request(tmp_path):
    for name in "ab":
        make_trio(tmp_path / name, recipe=TOY_RECIPE)
    first = files_of(tmp_path / "a")
    with pytest.raises(ValueError, match=r"target exists.*overwrite"):
        make_trio(tmp_path / "b", seed=1, recipe=TOY_RECIPE)
    assert first == files_of(tmp_path / "b")
    make_trio(tmp_path / "b", seed=1, recipe=TOY_RECIPE, overwrite=True)
    other = files_of(tmp_path / "b")
    assert all(first[f"{name}/model.safetensors"] != other[f"{name}/model.safetensors"] for name in TRIO)


def test_an_interrupted_recipe_writes_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("checkpoints.recipes.tiny.imitation_loss", interrupt)
    with pytest.raises(SystemExit):  # Lightning's
        make_trio(tmp_path / "out", recipe=TOY_RECIPE)
    assert not (tmp_path / "out").exists()


def test_only_answers_are_learned_and_every_row_of_whole_chunks_is_seen_once_per_epoch():
    story = stories("train", 1)[0]
    tokenizer = texts.train_tokenizer(stories("train", 40), 300)
    ids, start = encode_story(story, tokenizer)
    batch = padded([(ids, start), ([*ids, 7, 7], start)], pad_id=0)
    learned = batch.ids[0, 1:][batch.is_learned[0]].tolist()
    assert tokenizer.decode(learned) == story.answer + END
    assert batch.ids[0, -2:].tolist() == [0, 0]
    every = [encode_story(each, tokenizer)[0] for each in stories("train", 64)]
    source = texts.story_batches(stories("train", 64), tokenizer, batch_size=4, seed=0)
    for _ in range(2):
        rows = [row.tolist() for _ in range(16) for row in next(source).ids]
        assert sorted([token for token in row if token != tokenizer.pad_token_id] for row in rows) == sorted(every)


def test_a_digit_is_a_token_any_text_survives_and_the_chat_template_ends_where_the_target_speaks(trio):
    tokenizer = trio.tokenizer
    assert tokenizer.tokenize("14 + 9") == ["1", "4", "Ġ+", "Ġ", "9"]
    text = "Ünïcode, tabs\tand 漢字 \U0001f600 are spelled in bytes"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Work out 2 + 3."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == f"<|user|>\nWork out 2 + 3.\n{ASSISTANT}\n"
    assert (tokenizer.eos_token, trio.eos_ids) == (END, {tokenizer.eos_token_id})


def test_the_trio_is_finite_bfloat16_with_one_tokenizer_in_at_most_6_mb():
    files = {name: {file.name: file.read_bytes() for file in (TINY / name).iterdir()} for name in TRIO}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert len({files[model][name] for model in TRIO}) == 1
    assert sum(len(content) for contents in files.values() for content in contents.values()) <= 6_000_000
    for tensor in (tensor for name in TRIO for tensor in load_file(TINY / name / "model.safetensors").values()):
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all()


def test_acceptance_is_high_and_uneven_and_the_micro_is_accepted_less(trio):
    rows = [encode_story(story, trio.tokenizer) for story in stories("test", 16)]
    batch = padded(rows, trio.tokenizer.pad_token_id)
    draft, micro = (
        texts.acceptance_rates(partial(log_q, model), trio.target, [batch]) for model in (trio.draft, trio.micro)
    )
    assert 0.65 <= draft.mean() <= 0.9
    assert draft.std() >= 0.2
    assert micro.mean() <= draft.mean() - 0.03
