"""A list of prompts that cannot be an experiment is refused before anything is written."""

import pytest

from configs.schema import Config, ModelSource, PairConfig
from data_gen import make_data
from heads import AcceptanceHead, Provenance, train_heads

MODELS = {"target": "checkpoints/tiny/target", "draft": "checkpoints/tiny/draft"}


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        (["one", "two"], {}, "a list of at least 3"),
        ("a text that is no list", {}, "a list of at least 3"),
        (["one", "two", "three"], {"max_tokens": 5}, "'max_tokens' is not a setting of make_data; it takes batch_size"),
        (["one", "two", "three"], {"temperature": -1.0}, "temperature"),
    ],
)
def test_what_is_no_experiment_is_refused_and_leaves_nothing(prompts, settings, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        make_data(prompts, dir=str(tmp_path / "mine"), **MODELS, **settings)
    assert not (tmp_path / "mine" / "data").exists()


def test_a_training_in_python_says_once_what_its_heads_are_worth(tmp_path, monkeypatch, capsys):
    AcceptanceHead(8, 0, provenance=Provenance(metrics={"calibrated_kl": 0.4})).save_pretrained(tmp_path)

    def exported(*_, force, **__):
        print(f"the verdict, force={force}")
        return [tmp_path]

    monkeypatch.setattr("heads.from_config.train", lambda _: print("the verdict"))
    monkeypatch.setattr("heads.from_config.export", exported)
    pair = PairConfig(**{name: ModelSource(path=path) for name, path in MODELS.items()})
    for force in (False, True):
        assert train_heads(Config(pair=pair), force=force).hidden_size == 8
        assert capsys.readouterr().out == "the verdict\n"


def test_a_setting_that_heads_do_not_have_is_refused():
    pair = PairConfig(**{name: ModelSource(path=path) for name, path in MODELS.items()})
    with pytest.raises(ValueError, match="train_heads has no setting 'learning_rat'"):
        train_heads(Config(pair=pair), learning_rat=0.1)
