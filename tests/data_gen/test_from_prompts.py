"""A list of prompts that cannot be an experiment is refused before anything is written."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedModel

from configs.schema import Config, ModelSource, PairConfig
from data_gen import make_data
from decode import complete
from heads import AcceptanceHead, Provenance, train_heads
from tests.data_gen.on_disk import files_of, rows_of

MODELS = {"target": "checkpoints/tiny/target", "draft": "checkpoints/tiny/draft"}


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        (["one", "two"], {}, "a list of at least 3"),
        ("a text that is no list", {}, "a list of at least 3"),
        (["one", "two", "three"], {"max_tokens": 5}, "'max_tokens' is not a setting of make_data; it takes batch_size"),
        (["one", "two", "three"], {"temperature": -1.0}, "temperature"),
        (["one", "two", {"texts": 3}], {}, r"prompts\[2\]: expected one of the fields messages"),
        (["one", "two", [{"role": "user"}]], {}, r"prompts\[2\]: expected a list of messages"),
    ],
)
def test_what_is_no_experiment_is_refused_and_leaves_nothing(prompts, settings, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        make_data(prompts, dir=str(tmp_path / "mine"), **MODELS | settings)
    assert not (tmp_path / "mine" / "data").exists()


def test_a_training_in_python_says_once_what_heads_are_worth_and_takes_no_other_setting(tmp_path, monkeypatch, capsys):
    AcceptanceHead(8, 0, provenance=Provenance(metrics={"calibrated_kl": 0.4})).save_pretrained(tmp_path)

    def exported(*_, force, **__):
        print(f"the verdict, force={force}")
        return [tmp_path]

    monkeypatch.setattr("heads.from_config.train", lambda _: print("the verdict"))
    monkeypatch.setattr("heads.from_config.export", exported)
    config = Config(pair=PairConfig(**{name: ModelSource(path=path) for name, path in MODELS.items()}))
    for force in (False, True):
        assert train_heads(config, force=force).hidden_size == 8
        assert capsys.readouterr().out == "the verdict\n"
    with pytest.raises(ValueError, match="train_heads has no setting 'learning_rat'"):
        train_heads(config, learning_rat=0.1)


def test_loaded_models_and_a_dataset_of_messages_become_data_and_a_reply(toy_pair, tmp_path, models):
    """The rows are those of the same models by their paths, and a second call resumes."""
    datasets = pytest.importorskip("datasets")
    tokenizer = AutoTokenizer.from_pretrained(toy_pair / "target")
    messages = [[{"role": "user", "content": f"Say {number}"}] for number in range(4)]
    settings = {"max_new_tokens": 4, "max_prompt_tokens": 90, "num_train": 2, "num_dev": 1, "num_test": 1}
    records, folder = datasets.Dataset.from_dict({"messages": messages}), str(tmp_path / "a")
    loaded = make_data(records, **models, tokenizer=tokenizer, dir=folder, **settings)
    named = make_data(messages, **{name: str(toy_pair / name) for name in models}, dir=str(tmp_path / "b"), **settings)
    assert rows_of(loaded) == rows_of(named)
    whole = files_of(loaded.data.dir)
    with pytest.raises(ValueError, match="the target is a LlamaForCausalLM; give its tokenizer too"):
        make_data(messages, **models, dir=folder)
    make_data(messages, **models, tokenizer=tokenizer, dir=folder, **settings)
    assert files_of(loaded.data.dir) == whole
    conversation = [*messages[0], {"role": "assistant", "content": "0"}, {"role": "user", "content": "and 1"}]
    first, longer = (complete(loaded, prompt, policy="fixed_length:k=2") for prompt in (messages[0], conversation))
    assert first == complete(loaded, "Say 0", policy="fixed_length:k=2") != longer
    with pytest.raises(ValueError, match="the roles user, user; give turns and replies in alternation"):
        complete(loaded, messages[0] * 2)


def test_a_loaded_model_in_place_of_a_path_is_refused_in_one_line(models):
    with pytest.raises(ValueError, match=r"pair\.target\.path is a LlamaForCausalLM, but must be a path; save it"):
        PairConfig(target=ModelSource(path=models["target"]), draft=ModelSource(path="a"))  # type: ignore[arg-type]


def test_half_a_character_skips_its_prompt_and_no_other(tmp_path):
    prompts = [f"How many are {i} and 4?" for i in range(11)]
    config = make_data([*prompts, "\ud83d half"], dir=str(tmp_path / "mine"), max_new_tokens=4, **MODELS)
    [problem] = map(json.loads, Path(config.data.dir, "errors.jsonl").read_text().splitlines())
    assert (problem["id"], problem["outcome"]) == ("11", "skipped")
    assert "half of a character" in problem["reason"]
    with pytest.raises(ValueError, match=r"the prompt 'caf\\udce9' has half a character"):
        complete(config, "caf\udce9", policy="fixed_length:k=2")


def test_a_model_with_an_adapter_is_refused_until_it_is_merged(tmp_path):
    class Adapted(PreTrainedModel):
        def __init__(self): ...

        def merge_and_unload(self): ...

    with pytest.raises(ValueError, match=r"the draft is a model with an adapter; pass its merge_and_unload"):
        make_data(["one", "two", "three"], target=MODELS["target"], draft=Adapted(), dir=str(tmp_path))
