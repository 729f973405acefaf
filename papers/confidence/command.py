"""acceptance-heads judge: how well calibrated a DSpark draft's confidences are on your prompts, by position.

They predict the acceptance rate before a token is drawn. Compared are the draft's own confidence head, the same with an
offset and slope fitted on dev (one, or one per position), your prefix heads, vLLM's estimator, which needs no head, and
the acceptance rate itself, as a perfect confidence would predict it; where data.prompts has several sets, by set too. A
token is weighted by the probability that verification reaches it (law 4.8c).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from configs.load import accepts_yaml
from configs.schema import Config
from decode.experiment import Experiment
from evaluation.table import Table, announce, printing, shown
from heads import AcceptanceHead
from heads.batches.features import RATE, of_timing
from heads.batches.module import FeatureData
from heads.command import confidence_data
from heads.measures.histogram import Histogram, by_position
from heads.measures.scores import auroc, fit_logistic, measures
from lm import Sampling
from lm.features.dspark import DSpark
from store.progress import Bar
from store.shards import write_atomic

OWN = "confidence head"
VLLM = "vLLM's estimator"
PERFECT = "perfect confidence"
ONE_REFIT = f"{OWN}, one offset and slope"
PER_POSITION = f"{OWN}, an offset and slope per position"
_MEASURES = {
    "brier": "Brier score",
    "kl": "KL",
    "ece": "ECE",
    "auroc": "AUROC",
    "survival_brier": "Brier score of survival",
    "kept": "kept",
}
"""Measure of a predictor -> its heading."""
_REFIT_INTERVAL, _DAMPING, _RIDGE = 100, 50.0, 1e-3  # of vLLM's estimator


class Drafts(NamedTuple):
    """Every draft of a split, padded to whole blocks with zeros."""

    is_token: Bool[Tensor, "draft position"]
    rate: Float[Tensor, "draft position"]
    """acceptance_rate, which is predicted."""
    acceptance_prob: Float[Tensor, "draft position"]
    max_logit: Float[Tensor, "draft position"]
    """logit(max q) at the temperature of the sampling, within +- 40."""
    logits: Mapping[str, Float[Tensor, "draft position"]]
    """Predictions of the draft's own head and of yours, by name."""

    def histograms(self, logit: Float[Tensor, "draft position"]) -> Iterator[Histogram]:
        """Histograms of tokens and of the survival of drafts, by position, and of all positions in the last row."""
        at = self.is_token
        both = by_position(
            logit[at][None],
            self.acceptance_prob[at],
            label=self.rate[at][None],
            row_lengths=self.is_token.sum(1),
            num_positions=at.shape[1],
            is_draft=True,
        )
        for parts in both:
            yield Histogram(*(torch.cat([part, part.sum(0, keepdim=True)]) for part in parts))

    def kept(self, logit: Float[Tensor, "draft position"]) -> Float[Tensor, " position_or_all"]:
        """The share of accepted tokens that remains, by position and in all, if only half of the tokens are verified:
        those with the largest predicted survival.
        """
        predicted = functional.logsigmoid(logit).masked_fill(~self.is_token, -torch.inf).cumsum(1)
        survival = self.acceptance_prob.cumprod(1)
        num = int(self.is_token.sum()) // 2
        best = predicted.flatten().argsort(descending=True, stable=True)[:num]
        kept = torch.zeros_like(survival).flatten().index_fill(0, best, 1.0).view_as(survival) * survival
        return torch.cat([kept.sum(0) / survival.sum(0), (kept.sum() / survival.sum())[None]])


@accepts_yaml
def judge(config: Config, *, json: bool = False) -> None:
    """Run `acceptance-heads judge`; `configs.measuring` documents its flags."""
    data, draft = confidence_data(config)
    if not config.data.num_test:
        raise ValueError("data.num_test is 0, but judge needs a test split; set it and run `acceptance-heads data`")
    heads = {name: head for name, head in Experiment(config).heads.items() if head.timing == "prefix"}
    read = partial(_read, data, draft, heads, config.pair.sampling.temperature or 1.0)
    with printing(json) as publish:
        dev = read("dev")
        by_split = {}
        for split in (name for name in data.tested if name.startswith("test")):
            drafts = read(split)
            by_split[split] = [measures_of(name, drafts, logit) for name, logit in predictors(dev, drafts).items()]
        scores = by_split.pop("test")
        for split, of_set in by_split.items():
            for score, part in zip(scores, of_set, strict=True):
                score.setdefault("by_set", {})[split.removeprefix("test/")] = part
        title = f"{config.data.dir}, test split; {Sampling(**vars(config.pair.sampling)).text}"
        columns = {"predictor": ("predictor", ""), **{heading: (name, ".5f") for name, heading in _MEASURES.items()}}
        note = (
            "survival: every token of the draft so far is accepted; kept: accepted tokens that remain if only half of "
            f"all tokens are verified, those with the largest predicted survival. The row {PERFECT} bounds every head"
        )
        Table(f"confidences at all positions; {title}", shown(scores, columns), note).print()
        headings = {"brier": "Brier score", "ece": "ECE", "survival_ece": "ECE of survival", "kept": "kept"}
        for name, heading in headings.items():
            Table(f"{heading} by position; {title}", [_cells(score, name) for score in scores]).print()
        if by_split:
            parts = [(split, score) for split, of_set in by_split.items() for score in of_set]
            rows = [{"set": split} | _cells(score, "kept") | {"all": f"{score['kept']:.4f}"} for split, score in parts]
            Table(f"kept by prompt set and position; {title}", rows, names=2).print()
        path = Path(config.decode.dir) / "confidence.json"
        write_atomic(path, dumps(scores, indent=1).encode())
        announce([path])
        publish(scores)


def _cells(score: Mapping[str, Any], measure: str) -> dict[str, str]:
    by_position = enumerate(score["by_position"][measure], 1)
    return {"predictor": score["predictor"]} | {str(position): f"{value:.4f}" for position, value in by_position}


@torch.inference_mode()
def _read(
    data: FeatureData, draft: DSpark, heads: Mapping[str, AcceptanceHead], temperature: float, split: str
) -> Drafts:
    parts = []
    (name, _, only) = split.partition("/")
    for batch in Bar(data.loader(name, only=only), desc=f"read {split}", unit="batches"):
        features = of_timing(batch, "prefix")
        states = features.hidden.float().to(draft.device, draft.dtype)
        largest = (draft.logits(states).float() / temperature).log_softmax(-1).amax(-1).cpu()
        max_logit = (largest - torch.log(-torch.expm1(largest))).clamp(-40, 40)
        logits = [draft.confidence(states).float().cpu()]
        for head in heads.values():
            logits.append(head.calibrated_logit(head(features.hidden, head.inputs.stacked(features.scalars))))
        prob = batch["drawn"].acceptance_prob
        parts.append((features.row_lengths, features.scalars[RATE], prob, max_logit, *logits))
    lengths, *columns = map(torch.cat, zip(*parts, strict=True))
    is_token = torch.arange(draft.block_size) < lengths[:, None]
    padded = torch.zeros(is_token.shape, dtype=torch.float64)
    rate, prob, max_logit, *logits = (padded.masked_scatter(is_token, column.double()) for column in columns)
    return Drafts(is_token, rate, prob, max_logit, dict(zip((OWN, *heads), logits, strict=True)))


def predictors(dev: Drafts, test: Drafts) -> dict[str, Float[Tensor, "draft position"]]:
    """Every predictor with its logits on test, the draft's own first."""
    base = test.logits[OWN]
    (of_tokens, _) = dev.histograms(dev.logits[OWN])
    slopes, offsets = fit_logistic(of_tokens)
    refits = {ONE_REFIT: slopes[-1] * base + offsets[-1], PER_POSITION: slopes[:-1] * base + offsets[:-1]}
    return {OWN: base, **refits, **test.logits, VLLM: estimated_online(dev, test), PERFECT: test.rate.logit(1e-12)}


def estimated_online(*streams: Drafts) -> Float[Tensor, "draft position"]:
    """Logits that vLLM's estimator (0.32.0, adaptive verification) gives the last of some streams of drafts.

    a = sigmoid(slope * logit(max q) + offset of the position), from slope 0.5 and offsets -0.2. Every 100 steps, here
    one draft each, one Newton step on what these steps revealed, with a ridge of 1e-3; of each parameter's step
    n / (n + 50) is taken, where n counts the tokens that teach it. Earlier steps are forgotten. Departure: a token
    teaches its acceptance_prob, weighted by the probability that verification reaches it; vLLM sees one outcome.
    """
    slope, offset = torch.tensor([0.5, -0.2], dtype=torch.float64)
    for drafts in streams:
        logits = []
        labels = drafts.acceptance_prob
        reach = functional.pad(labels.cumprod(1)[:, :-1], (1, 0), value=1.0) * drafts.is_token
        steps = (part.split(_REFIT_INTERVAL) for part in (drafts.max_logit, labels, reach))
        for x, label, weight in zip(*steps, strict=True):
            logits.append(slope * x + offset)
            prob = logits[-1].sigmoid()
            curvature = weight * prob * (1 - prob)
            error = weight * (label - prob)
            cross = (curvature * x).sum(0)
            diag = curvature.sum(0) + _RIDGE
            pull = error.sum(0)
            num = weight.sum(0)
            slope_step = (error * x).sum() - (cross * pull / diag).sum()
            slope_step = slope_step / ((curvature * x * x).sum() + _RIDGE - (cross**2 / diag).sum())
            slope_step = slope_step * num.sum() / (num.sum() + _DAMPING)
            slope_step = slope_step if slope + slope_step >= 0 else torch.zeros_like(slope)
            slope = slope + slope_step
            offset = offset + (pull - cross * slope_step) / diag * num / (num + _DAMPING)
    return torch.cat(logits)


def measures_of(name: str, drafts: Drafts, logit: Float[Tensor, "draft position"]) -> dict[str, Any]:
    """The measures of one predictor, over all positions and by position."""
    token, survival = drafts.histograms(logit)
    of_token = measures(token)
    of_survival = measures(survival)
    values = {
        **{measure: getattr(of_token, measure) for measure in ("brier", "kl", "ece")},
        "auroc": auroc(token),
        "survival_brier": of_survival.brier,
        "survival_ece": of_survival.ece,
        "predicted_survival": (survival.mean_logit.sigmoid() * survival.weight).sum(-1) / survival.total,
        "survival": survival.accepted.sum(-1) / survival.total,
        "kept": drafts.kept(logit),
    }
    score: dict[str, Any] = {"predictor": name} | {measure: values[measure][-1].item() for measure in _MEASURES}
    return score | {"by_position": {measure: of[:-1].tolist() for measure, of in values.items() if measure != "kl"}}
