"""`judge`: refits per position undo a known bias, tokens have their weights, and the command on the embedded draft."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig, PromptSource
from data_gen.pipeline.command import make
from data_gen.prompts.stories import stories
from heads import AcceptanceHead
from heads.command import export
from heads.model.confidence import CARD
from heads.training.command import train
from lm import load_pair
from papers.confidence import command as confidence
from papers.confidence.command import OWN, PER_POSITION, PERFECT, VLLM, Drafts, judge, measures_of

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
BLOCK = 3


def drafts_of(seed: int, num: int = 400) -> Drafts:
    """Drafts of 1 to 3 tokens whose confidence is off by another offset and slope at each position."""
    torch.manual_seed(seed)
    is_token = torch.arange(BLOCK) < torch.randint(1, BLOCK + 1, (num, 1))
    logit, prob = torch.randn(num, BLOCK).double() * 2, torch.rand(num, BLOCK).double() * is_token
    off = torch.tensor([1.0, 0.0, -1.0]) + torch.tensor([0.5, 1.0, 2.0]) * logit
    return Drafts(is_token, logit.sigmoid() * is_token, prob, off, {OWN: off, "a head": logit})


def test_a_refit_per_position_undoes_what_is_off_at_each():
    test = drafts_of(1)
    logits = confidence.predictors(drafts_of(0), test)
    brier = {name: measures_of(name, test, logit)["brier"] for name, logit in logits.items()}
    assert brier[PERFECT] == pytest.approx(0, abs=1e-6)
    assert brier["a head"] == pytest.approx(0, abs=1e-6)  # it is the truth
    assert brier[PER_POSITION] == pytest.approx(0, abs=1e-5)
    assert brier[PER_POSITION] < 0.1 * min(brier[confidence.ONE_REFIT], brier[OWN])


def test_the_online_estimate_learns_a_slope_and_an_offset_per_position():
    drafts = drafts_of(0, 20_000)
    logit = 0.8 * drafts.max_logit + torch.tensor([1.0, 0.3, -0.5])
    learned = confidence.estimated_online(drafts._replace(acceptance_prob=logit.sigmoid() * drafts.is_token))
    torch.testing.assert_close(learned[:100], 0.5 * drafts.max_logit[:100] - 0.2)
    torch.testing.assert_close(learned[-1500:], logit[-1500:], atol=0.05, rtol=0.02)


def test_trimming_keeps_most_accepted_tokens_where_the_survival_is_known():
    drafts = drafts_of(0)._replace(acceptance_prob=drafts_of(0).rate)
    known, reverse = drafts.kept(drafts.logits["a head"]), drafts.kept(-drafts.logits["a head"])
    assert known.shape == (BLOCK + 1,)
    assert 0.5 < float(known[-1]) <= 1
    assert float(known[-1]) > float(reverse[-1])


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("judged")
    models = {"target": "target", "draft": "dspark"}
    sources = {name: ModelSource(path=str(TINY / path), dtype="float32") for name, path in models.items()}
    tales = [json.dumps({"prompt": story.prompt}) for story in stories("train", 80, seed=9)]
    (folder / "tales.jsonl").write_text("\n".join(tales))
    sets = [PromptSource(path="stories"), PromptSource(path=str(folder / "tales.jsonl"))]
    sizes = {"split_weights": (1, 1, 1), "num_train": 4, "num_dev": 12, "num_test": 12, "max_new_tokens": 32}
    made = Config(
        pair=PairConfig(**sources, num_threads=1),
        data=DataConfig(dir=str(folder / "data"), prompts=sets, draft_length=7, draft_every=4, **sizes),
        heads=HeadsConfig(dir=str(folder / "run"), timings=("prefix",), specdec=False),
        decode=DecodeConfig(dir=str(folder / "decode")),
    )
    make(made)
    return made


@pytest.mark.slow
def test_the_embedded_drafts_confidence_is_judged_by_position_and_no_draft_without_one(config, capsys):
    judge(config, json=True)
    found = {one["predictor"]: one for one in json.loads(capsys.readouterr().out)}
    assert json.loads((Path(config.decode.dir) / "confidence.json").read_text()) == list(found.values())
    own = found[OWN]
    assert len(own["by_position"]["brier"]) == 7
    assert 0 < own["brier"] < 0.05 < own["auroc"]  # it was trained at this very sampling
    assert found[PERFECT]["kept"] >= found[VLLM]["kept"] > 0.5
    survival = own["by_position"]["survival"]
    assert survival == sorted(survival, reverse=True)
    np.testing.assert_allclose(own["by_position"]["predicted_survival"], survival, atol=0.1)
    assert found[PERFECT]["by_set"].keys() == {"stories", "tales"}
    of_sets = np.array([part["by_position"]["survival"] for part in found[PERFECT]["by_set"].values()])
    assert ((of_sets.min(0) <= survival) & (survival <= of_sets.max(0))).all(), "a mean of what the sets have"
    with pytest.raises(ValueError, match="num_test is 0, but judge needs a test split; set it"):
        judge(replace(config, data=replace(config.data, num_test=0)))
    with pytest.raises(FileNotFoundError, match=r"no .*manifest.json: run `acceptance-heads data`"):
        judge(replace(config, data=replace(config.data, dir=str(Path(config.data.dir) / "nowhere"))))
    draft = ModelSource(path=str(TINY / "draft"), dtype="float32")
    with pytest.raises(ValueError, match=r"pair.draft is .*draft, which is not a DSpark draft; set it to one"):
        judge(replace(config, pair=replace(config.pair, draft=draft)))


@pytest.mark.slow
def test_temperatures_of_the_drafts_confidences_are_written_as_sglang_takes_them(config, tmp_path):
    [path] = export(config, format="sts", out=str(tmp_path / "sts.json"))
    fitted = json.loads(path.read_text())
    assert fitted.keys() == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert len(fitted["temperatures"]) == len(fitted["ece_before"]) == len(fitted["ece_after"]) == 7
    assert all(0.1 <= temperature <= 10 for temperature in fitted["temperatures"])
    assert fitted["num_samples"] > 10
    assert np.mean(fitted["ece_after"]) <= np.mean(fitted["ece_before"])
    with pytest.raises(ValueError, match=r"pair.draft is .*draft, which is not a DSpark draft"):
        export(replace(config, pair=replace(config.pair, draft=ModelSource(path=str(TINY / "draft")))), format="sts")


@pytest.mark.slow
def test_a_linear_head_that_was_trained_on_it_is_judged_and_written_back(config, tmp_path, capsys):
    heads = replace(config.heads, dir=str(tmp_path / "run"), depths=(0, 1), scalars=(False,), reject_weights=(1.0,))
    config = replace(
        config,
        heads=heads,
        trainer={"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False},
        decode=replace(config.decode, dir=str(tmp_path / "decode")),
    )
    train(config)
    export(config, force=True)
    capsys.readouterr()
    judge(config, json=True)
    assert {"prefix-d0-w1", "prefix-d1-w1"} <= {one["predictor"] for one in json.loads(capsys.readouterr().out)}
    [path] = export(config, force=True, format="dspark")
    head = AcceptanceHead.from_pretrained(tmp_path / "run" / "exported" / "prefix-d0-w1")
    draft = ModelSource(path=str(path), dtype="float32")
    written = load_pair(replace(config.pair, draft=draft)).drafting
    hidden = torch.randn(20, written.hidden_size)
    torch.testing.assert_close(written.confidence(hidden), head.calibrated_logit(head(hidden)), atol=0.1, rtol=0.02)
    assert "temperature 1.0" in (path / CARD).read_text()
    with pytest.raises(ValueError, match=r"exactly one linear prefix head; of prefix-d1-w1 none is linear"):
        export(config, head="prefix-d1-w1", force=True, format="dspark")
