"""`judge`: what is compared as a confidence, each by its own formula, and the command on the embedded draft."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Config, DataConfig, DecodeConfig, HeadsConfig, ModelSource, PairConfig
from data_gen.pipeline.command import make
from decode.policies.base import AfterDraw, Outcome
from evaluation.confidence.command import judge
from evaluation.confidence.drafts import Drafts, Predicted
from evaluation.confidence.predictors import ONLINE, OWN, PER_PLACE, learned_online, predictors
from heads import AcceptanceHead
from heads.command import export
from heads.measures.scores import measures
from heads.model.confidence import CARD
from heads.training.command import train
from lm import load_pair
from tests.toys.loop import LearnedMaxProb

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
PLACES = 3


def drafts_of(seed: int, num: int = 400) -> Drafts:
    """Drafts of 1 to 3 tokens whose confidence is off by another offset and slope at each place."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, PLACES + 1, (num,))
    total = int(lengths.sum())
    logit = torch.randn(total) * 2
    drafts = Drafts({}, {}, lengths, PLACES)
    off = torch.tensor([1.0, 0.0, -1.0])[drafts.place] + torch.tensor([0.5, 1.0, 2.0])[drafts.place] * logit
    columns = {
        "acceptance_rate": logit.sigmoid(),
        "acceptance_prob": torch.rand(total),
        "confidence_logit": off,
        "max_prob": (logit + torch.randn(total)).sigmoid(),
        "log_token_prob": -torch.rand(total),
    }
    return Drafts(columns, {"a head": logit}, lengths, PLACES)


def test_refitting_per_place_undoes_what_is_off_at_each_and_the_truth_scores_best():
    test = drafts_of(1)
    found = dict(predictors(drafts_of(0), test))
    score = {name: float(measures(test.histograms(predicted)[0]).brier.mean()) for name, predicted in found.items()}
    assert score["a head"] == pytest.approx(0, abs=1e-6)  # it is the truth
    assert score[PER_PLACE] == pytest.approx(0, abs=1e-5)
    assert score[PER_PLACE] < 0.1 * min(score[f"{OWN}, one offset and slope"], score[OWN])


def test_the_online_estimator_is_the_learning_policys_own():
    drafts = drafts_of(0, num=30)
    said = learned_online(drafts)
    policy = LearnedMaxProb()
    state, start = policy.start(), 0
    for length in drafts.lengths.tolist():
        tokens, state, reach = slice(start, start + length), policy.begin(state), 1.0
        sums = policy.nothing_learned
        for place, at in enumerate(range(start, start + length)):
            max_prob, label = (float(drafts.columns[name][at]) for name in ("max_prob", "acceptance_prob"))
            drawn = AfterDraw(place, 0.0, max_prob, 0.0, 0.0, 0.5, 0.0)
            before, (state, _) = state[0], policy.after(state, drawn)
            assert said[at].sigmoid().item() == pytest.approx(state[0] / before, abs=1e-5)
            lesson = policy.lesson(state, drawn, label)
            sums = tuple(
                tuple(a + reach * b for a, b in zip(*pair, strict=True)) for pair in zip(sums, lesson, strict=True)
            )
            reach *= label
        state = policy.end(state, Outcome(length, 0, length, 0.0, sums))
        start = tokens.stop
    assert learned_online(drafts_of(1, num=5), drafts).shape == said.shape
    assert not torch.allclose(learned_online(drafts_of(1), drafts), said)  # it learns through the streams before


def test_a_token_counts_as_often_as_verification_looks_at_it():
    drafts = drafts_of(0)
    label, logit = drafts.columns["acceptance_rate"], drafts.columns["confidence_logit"]
    token, survival = drafts.histograms(Predicted(logit, label))
    prob = drafts.columns["acceptance_prob"].double()
    sums, weights, lost = np.zeros(PLACES), np.zeros(PLACES), np.zeros(PLACES)
    start = 0
    for length in drafts.lengths.tolist():
        reach, said = 1.0, 1.0
        for place, at in enumerate(range(start, start + length)):
            confidence = logit[at].double().sigmoid().item()
            sums[place] += reach * (confidence - label[at].item()) ** 2
            weights[place] += reach
            reach, said = reach * prob[at].item(), said * confidence
            lost[place] += (said - reach) ** 2
        start += length
    counts = np.array([(drafts.lengths > place).sum().item() for place in range(PLACES)])
    np.testing.assert_allclose(measures(token).brier, sums / weights, atol=1e-5)
    np.testing.assert_allclose(measures(survival).brier, lost / counts, atol=5e-5)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("judged")
    sources = {
        name: ModelSource(path=str(TINY / path), dtype="float32")
        for name, path in (("target", "target"), ("draft", "dspark"))
    }
    made = Config(
        pair=PairConfig(**sources, num_threads=1),
        data=DataConfig(
            dir=str(folder / "data"),
            num_train=4,
            num_dev=12,
            num_test=12,
            max_new_tokens=32,
            draft_length=7,
            draft_every=4,
        ),
        heads=HeadsConfig(dir=str(folder / "run"), timings=("prefix",), specdec=False),
        decode=DecodeConfig(dir=str(folder / "decode")),
    )
    make(made)
    return made


@pytest.mark.slow
def test_the_embedded_drafts_confidence_is_judged_place_by_place(config, capsys):
    judge(config, json=True)
    found = {one["predictor"]: one for one in json.loads(capsys.readouterr().out)}
    assert json.loads((Path(config.decode.dir) / "confidence.json").read_text()) == list(found.values())
    own = found[OWN]
    assert len(own["by_place"]["brier"]) == 7
    assert 0 < own["brier"] < 0.05 < own["auroc"]  # it was trained at this very sampling
    assert own["brier"] < found[ONLINE]["brier"]
    survival = own["by_place"]["survival"]
    assert survival == sorted(survival, reverse=True)
    np.testing.assert_allclose(own["by_place"]["predicted_survival"], survival, atol=0.1)


@pytest.mark.slow
def test_a_linear_head_that_was_trained_on_it_is_judged_and_written_back(config, tmp_path, capsys):
    heads = replace(config.heads, dir=str(tmp_path / "run"), depths=(0, 1), scalars=(False,), reject_weights=(1.0,))
    config = replace(
        config,
        heads=replace(heads, reached=True),
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
    with pytest.raises(
        ValueError, match="writes one linear prefix head back, and of prefix-d1-w1 none is linear; name"
    ):
        export(config, head="prefix-d1-w1", force=True, format="dspark")


@pytest.mark.slow
def test_a_draft_without_a_confidence_head_and_no_test_prompts_are_refused(config):
    with pytest.raises(ValueError, match="num_test is 0, and confidences are judged on the test split; set it"):
        judge(replace(config, data=replace(config.data, num_test=0)))
    with pytest.raises(FileNotFoundError, match=r"no .*manifest.json: run `acceptance-heads data`"):
        judge(replace(config, data=replace(config.data, dir=str(Path(config.data.dir) / "nowhere"))))
    draft = ModelSource(path=str(TINY / "draft"), dtype="float32")
    with pytest.raises(
        ValueError, match=r"pair.draft is .*draft, which is no DSpark draft, and .* name a DSpark draft"
    ):
        judge(replace(config, pair=replace(config.pair, draft=draft)))
