"""Which head decodes where none is named, and at what threshold."""

import pytest

from configs.schema import Config, HeadsConfig, ModelSource, PairConfig
from decode import HeadPolicy
from decode.experiment import Experiment
from decode.policies.auto import Auto
from decode.policies.recommended import best_head
from heads import AcceptanceHead, Provenance
from heads.model.files import rank_of
from heads.model.head import update_config

TUNED = {"max_rejection_prob": 0.6, "is_calibrated": False, "t_draft_s": 0.01, "t_target_s": 0.05}


@pytest.fixture
def exported(tmp_path):
    """Three heads of the trio's width: the second has the least loss, the third stops trees."""
    for name, loss, timing in (("a", 0.3, "drawn"), ("b", 0.2, "drawn"), ("c", 0.1, "candidate")):
        provenance = Provenance(metrics={"calibrated_kl": loss})
        AcceptanceHead(96, 0, timing, provenance=provenance).save_pretrained(tmp_path / "exported" / name)
    return tmp_path / "exported"


def experiment(exported):
    sources = {role: ModelSource(path=f"checkpoints/tiny/{role}") for role in ("target", "draft")}
    return Experiment(Config(pair=PairConfig(**sources), heads=HeadsConfig(dir=str(exported.parent))))


def test_without_heads_a_policy_without_training_decodes_and_says_so(tmp_path):
    bare = experiment(tmp_path / "exported")
    assert best_head({}) is None
    assert bare.default_policy[0] == "cumulative_token_prob"
    assert "needs no training: no head in" in bare.default_policy[1]
    with pytest.raises(FileNotFoundError, match="needs a head, and there is none"):
        bare.policy("head")


def test_untuned_heads_go_by_their_loss_at_a_calibrated_risk(exported):
    here = experiment(exported)
    assert here.default_policy[1].startswith("head b (least calibrated KL of 2)")
    policy = here.policy("head")
    assert (policy.max_rejection_prob, policy.is_calibrated) == (0.4, True)
    with pytest.raises(ValueError, match="tune"):
        here.policy("auto")
    with pytest.raises(ValueError, match="no recommended threshold"):
        HeadPolicy.from_pretrained(exported / "b")
    for name, left in (("b", "head a (least calibrated KL of 1)"), ("a", "cumulative_token_prob, which needs no")):
        update_config(exported / name, draft={"path": "another", "weights": "b" * 64})
        assert experiment(exported).default_policy[1].startswith(left)


def test_heads_of_several_timings_are_compared_by_their_part_of_the_signals_kl_and_older_ones_come_last():
    """A KL of 0.1 is the lowest, of a smoother label; with a signal of KL 0.1 there is nothing to gain."""
    metrics = {
        "drawn": {"calibrated_kl": 0.3, "signal_kl": 0.4},
        "prefix": {"calibrated_kl": 0.1, "signal_kl": 0.11},
        "older": {"calibrated_kl": 0.05},
        "oldest": {},
    }
    assert sorted(metrics, key=lambda name: rank_of(metrics[name])) == ["drawn", "prefix", "older", "oldest"]


def test_the_fastest_tuned_head_comes_first_at_its_threshold_and_is_loaded_with_it(exported):
    faster = {**TUNED, "throughput": 42.0, "tokens_per_s": 40.0, "fixed_tokens_per_s": 32.0}
    update_config(exported / "a", recommended=faster)
    slower = {**TUNED, "throughput": 35.0, "tokens_per_s": 30.0, "max_rejection_prob": 0.7}
    update_config(exported / "b", recommended=slower)
    here = experiment(exported)
    name, reason = here.default_policy
    assert name == "head"
    assert "a at its tuned threshold 0.6: the first of 2 tuned heads, predicted 2.00 times as fast" in reason
    assert "+25% over the best fixed length" in reason
    for policy in (here.policy("head"), HeadPolicy.from_pretrained(exported / "a")):
        assert (policy.max_rejection_prob, policy.is_calibrated) == (0.6, False)
        assert policy.signals == {"drawn_logit"}
    assert here.policy(f"head:{exported}/b").max_rejection_prob == 0.7
    assert here.policy(f"head:{exported}/b,max_rejection_prob=0.1").max_rejection_prob == 0.1
    assert HeadPolicy.from_pretrained(exported / "a", max_rejection_prob=0.2).max_rejection_prob == 0.2
    for rule in (here.policy("auto"), HeadPolicy.from_pretrained(exported / "a", max_rejection_prob="auto")):
        assert isinstance(rule, Auto)
        assert rule.throughput == 42.0

    update_config(exported / "b", recommended=slower | {"t_target_s": 0.5, "auto_tokens_per_s": 20.0})
    assert experiment(exported).default_policy[1].startswith("head b at its tuned threshold 0.7")
