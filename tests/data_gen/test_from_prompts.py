"""A list of prompts that cannot be an experiment is refused before anything is written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from configs import load_config
from configs.schema import Config, ModelSource, PairConfig
from data_gen import make_data
from data_gen.loaded import source_of_loaded
from data_gen.store.manifest import describe_model
from decode import complete
from heads import AcceptanceHead, Provenance, train_heads
from tests.data_gen.on_disk import files_of, rows_of

ROOT = Path(__file__, "../../..").resolve()
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
    assert loaded.pair == named.pair
    assert not Path(folder, "models").exists()
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


def changed_weight(model, tokenizer):
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6


def untied(model, tokenizer):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


CHANGES = {
    "its weights differ from": changed_weight,
    "its config differs from": lambda model, tokenizer: setattr(model.config, "rope_theta_of_mine", 5.0),
    "its generation config differs from": lambda model, tokenizer: setattr(model.generation_config, "eos_token_id", 7),
    "its tokenizer or chat template differs": lambda model, tokenizer: setattr(tokenizer, "chat_template", "{{ 1 }}"),
    "its origin is not on this machine": lambda model, tokenizer: setattr(model, "name_or_path", "/no/such"),
    "its weights are of type": lambda model, tokenizer: model.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_loaded_model_that_was_changed_in_anything_is_saved(toy_pair, tmp_path, capsys, reason):
    model = AutoModelForCausalLM.from_pretrained(toy_pair / "target")
    tokenizer = AutoTokenizer.from_pretrained(toy_pair / "target")
    assert source_of_loaded(model, tokenizer, tmp_path / "target") == ModelSource(path=str(toy_pair / "target"))
    tokenizer(["a", "longer"], padding=True, return_tensors="pt")  # which leaves its setting in the tokenizer
    assert source_of_loaded(model, tokenizer, tmp_path / "target").path == str(toy_pair / "target")
    assert not (tmp_path / "target").exists()
    CHANGES[reason](model, tokenizer)
    assert source_of_loaded(model, tokenizer, tmp_path / "target").path == str(tmp_path / "target")
    assert f"the loaded model is saved in {tmp_path / 'target'}, because {reason}" in capsys.readouterr().out
    assert (tmp_path / "target" / "config.json").is_file()


def test_a_loaded_model_in_another_dtype_is_its_directory_in_that_dtype_and_tied_weights_are_compared(tmp_path):
    tiny = ROOT / MODELS["draft"]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)  # stored in bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert source_of_loaded(model, tokenizer, tmp_path / "a") == ModelSource(path=str(tiny), dtype="float32")
    model.model.norm.bfloat16()
    assert source_of_loaded(model, tokenizer, tmp_path / "a").path == str(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert source_of_loaded(model, tokenizer, tmp_path / "b") == ModelSource(path=str(tiny))
    untied(model, tokenizer)
    assert source_of_loaded(model, tokenizer, tmp_path / "b").path == str(tmp_path / "b")


def test_a_model_of_the_hub_is_its_commit(toy_pair, tmp_path, monkeypatch):
    """The cache is laid out as huggingface_hub does."""
    commits = ["c" * 40, "d" * 40]
    repository = tmp_path / "hub" / "models--owner--name"
    for commit, model in zip(commits, ("target", "draft"), strict=True):
        shutil.copytree(toy_pair / model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tokenizer = AutoTokenizer.from_pretrained(toy_pair / "target")
    first, second = (AutoModelForCausalLM.from_pretrained("owner/name", revision=commit) for commit in commits)
    source = source_of_loaded(first, tokenizer, tmp_path / "target")
    assert source == ModelSource(path="owner/name", revision=commits[0])
    assert describe_model(source)["commit"] == describe_model(ModelSource(path="owner/name"))["commit"] == commits[0]
    assert source_of_loaded(second, tokenizer, tmp_path / "target").path == str(tmp_path / "target"), "another revision"


def test_a_loaded_model_in_place_of_a_path_is_refused_in_one_line(models):
    with pytest.raises(ValueError, match=r"pair\.target\.path is a LlamaForCausalLM, but must be a path; save it"):
        PairConfig(target=ModelSource(path=models["target"]), draft=ModelSource(path="a"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "timing"), [({}, "drawn"), ({"timings": ("fed",)}, "fed")])
def test_heads_of_a_directory_have_any_timing_and_its_yaml_serves_every_call(settings, timing, tmp_path):
    """The defaults of `train_heads`, on a directory as `make_data` wrote it."""
    prompts = [f"Ana has {n} shells and finds {more} more. How many?" for n in range(2, 8) for more in range(2, 6)]
    root = tmp_path / "mine"
    config = make_data(prompts, dir=str(root), max_new_tokens=24, **MODELS)
    settings |= {"depths": (0,), "force": True}
    head = train_heads(str(root), embeddings=(False,), max_epochs=2, **settings)
    assert (head.timing, [path.parent.parent for path in root.rglob("config.json")]) == (
        timing,
        [root / "heads/exported"],
    )
    assert train_heads(root / "data", dir=tmp_path / "b", max_epochs=1, **settings).timing == timing
    assert replace(load_config(root / "experiment.yaml"), arguments=()) == config
    first, second = (complete(of, "Ana has 3 shells.", max_new_tokens=8) for of in (config, root / "experiment.yaml"))
    assert first == second


def test_half_a_character_skips_its_prompt_and_no_other(tmp_path):
    prompts = [f"How many are {i} and 4?" for i in range(11)]
    config = make_data([*prompts, "\ud83d half"], dir=str(tmp_path / "mine"), max_new_tokens=4, **MODELS)
    [problem] = map(json.loads, Path(config.data.dir, "errors.jsonl").read_text().splitlines())
    assert (problem["id"], problem["outcome"]) == ("11", "skipped")
    assert "half of a character" in problem["reason"]
    with pytest.raises(ValueError, match=r"the prompt 'caf\\udce9' has half a character"):
        complete(config, "caf\udce9", policy="fixed_length:k=2")


def test_more_prompts_keep_the_shards_of_the_first_and_duplicates_do_not_count(tmp_path):
    prompts = [f"How many are {i} and 4?" for i in range(12)]
    settings = {"dir": str(tmp_path / "mine"), "max_new_tokens": 2, "rows_per_shard": 2, **MODELS}
    config = make_data([*prompts, *prompts[:6]], **settings)
    rows = Path(config.data.dir, "rows")
    before = {path.name: path.read_bytes() for path in rows.glob("*.parquet")}
    grown = make_data([*prompts, *prompts[:6], *(f"And {i} plus 9?" for i in range(8))], **settings)
    assert (config.data.num_dev, grown.data.num_dev, grown.decode.num_test) == (1, 1, 1)
    assert {name: (rows / name).read_bytes() for name in before} == before
    assert len(list(rows.glob("*.parquet"))) > len(before)


def test_a_model_with_an_adapter_is_refused_until_it_is_merged(tmp_path):
    class Adapted(PreTrainedModel):
        def __init__(self): ...

        def merge_and_unload(self): ...

    attached = AutoModelForCausalLM.from_pretrained(MODELS["draft"])
    attached._hf_peft_config_loaded = True  # by `load_adapter` of transformers
    for draft in (Adapted(), attached):
        with pytest.raises(ValueError, match=r"the draft is a model with an adapter; pass the merged one"):
            make_data(["one", "two", "three"], target=MODELS["target"], draft=draft, dir=str(tmp_path))
