"""`export`: exported heads score as the sweep does; names and metrics that do not exist are refused."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from configs.schema import Config
from heads import AcceptanceHead
from heads.command import export, load_sweep
from tests.heads.conftest import Run
from tests.toys.made_up import feature_data, make_config


@pytest.fixture
def config(trained: Run) -> Config:
    return trained.config


def test_exported_heads_score_as_the_sweep_does(config: Config, tmp_path: Path):
    paths = {path.name: path for path in export(config, out=str(tmp_path))}
    sweep = load_sweep(Path(config.heads.dir) / "last.ckpt")
    batch = next(iter(feature_data(config).loader("dev")))
    assert set(paths) == {str(spec) for spec in sweep.specs}
    with torch.no_grad():
        for _, stack in sweep.items():
            features = batch[stack.shape.timing]
            for spec, logit in zip(stack.specs, sweep.logits(stack, batch), strict=True):
                head = AcceptanceHead.from_pretrained(paths[str(spec)])
                ours = head(features.hidden, features.columns(head.inputs.scalars) if head.inputs.scalars else None)
                torch.testing.assert_close(ours, logit, atol=1e-4, rtol=1e-4)
                assert (head.timing, head.provenance.reject_weight) == (spec.shape.timing, spec.reject_weight)
                assert head.provenance.metrics["auroc"] > 0
                assert head.provenance.draft["path"] == "made-up/draft"
                assert (head.provenance.mixing_ratio is None) == (head.timing == "drawn")


def test_the_kl_on_train_is_over_as_many_responses_as_dev_has(config: Config, tmp_path: Path):
    [path] = export(config, head="fed-d2-w6", out=str(tmp_path))
    head, batches = AcceptanceHead.from_pretrained(path), list(feature_data(config).loader("train", num=24))
    prob = torch.cat([batch["fed"].acceptance_prob for batch in batches])
    with torch.no_grad():
        logit = torch.cat([head(batch["fed"].hidden) for batch in batches])
    kl = binary_cross_entropy_with_logits(logit, prob) - binary_cross_entropy(prob, prob)
    assert head.provenance.metrics["train_raw_kl"] == pytest.approx(float(kl), abs=1e-4)


def test_best_is_one_head_of_each_kind_and_a_name_is_one_head(trained: Run, config: Config, tmp_path: Path):
    names = [path.name for path in export(config, head="best", metric="auroc", out=str(tmp_path))]
    assert sorted(name.split("-")[0] for name in names) == ["drawn", "drawn+s", "fed", "fed+s"]
    for name in names:
        heads, kind = trained.results["dev"]["heads"], name.split("-")[0]
        of_kind = [other for other in heads if other.split("-")[0] == kind]
        assert name == max(of_kind, key=lambda other: heads[other]["auroc"])
    assert [path.name for path in export(config, head="fed-d2-w6", out=str(tmp_path))] == ["fed-d2-w6"]
    with pytest.raises(ValueError, match="no head 'fed-d9-w6'"):
        export(config, head="fed-d9-w6", out=str(tmp_path))
    with pytest.raises(ValueError, match="metric 'luck' is unknown"):
        export(config, head="best", metric="luck", out=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        export(make_config(tmp_path, tmp_path / "nowhere"))


def test_heads_that_are_worse_than_log_q_are_exported_only_with_force(config: Config, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("heads.command.beats_signal", lambda result, specs: {"fed": False})
    message = r"(?s)Best fed-time head on dev: .* Pass --force \(force=True in Python\) to .*: fed-d2-w6\.$"
    with pytest.raises(ValueError, match=message):
        export(config, head="fed-d2-w6", out=str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert export(config, out=str(tmp_path), force=True)
