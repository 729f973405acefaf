"""python -m evaluation judge: how well calibrated a DSpark draft's confidences are on your prompts, by position.

They predict the acceptance rate before a token is drawn. Compared are the draft's own confidence head, the same with an
offset and slope fitted on dev (one, or one per position), and your prefix heads. A token is weighted by the probability
that verification reaches it (law 4.8c).
"""

from collections.abc import Mapping
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from configs.schema import Config
from data_gen.pipeline.sizes import settled
from decode.experiment import Experiment
from evaluation.table import Table, announce, printing, shown
from heads import AcceptanceHead
from heads.batches.features import RATE, of_timing
from heads.batches.module import FeatureData
from heads.measures.histogram import Histogram
from heads.measures.scores import auroc, fit_logistic, measures
from heads.measures.survival import by_position
from lm import Sampling
from lm.features.dspark import DSpark
from lm.features.released import released_layout_of
from store.progress import Bar
from store.shards import write_atomic

OWN = "confidence head"
PER_POSITION = f"{OWN}, an offset and slope per position"


class Drafts(NamedTuple):
    """Every draft of a split, one after the other."""

    rate: Float[Tensor, " tokens"]
    """acceptance_rate, which is predicted."""
    acceptance_prob: Float[Tensor, " tokens"]
    logits: Mapping[str, Float[Tensor, " tokens"]]
    """Predictions of the draft's own head and of yours, by name."""
    lengths: Int[Tensor, " drafts"]
    block_size: int

    def histograms(self, logit: Float[Tensor, " tokens"]) -> tuple[Histogram, Histogram]:
        """Histograms of tokens and of the survival of drafts, by position."""
        settings: dict[str, Any] = {"row_lengths": self.lengths, "num_positions": self.block_size, "is_draft": True}
        return by_position(logit[None], self.acceptance_prob, label=self.rate[None], **settings)


def judge(config: Config, *, json: bool = False) -> None:
    """Measure the calibration of a DSpark draft's confidence head on your prompts.

    Args:
        config: of the experiment, whose pair.draft is a DSpark draft and whose data exists. Prefix heads of
            decode.heads, or of heads.dir/exported, are measured too.
        json: print everything as one JSON document on stdout; tables then go to stderr.

    Raises:
        FileNotFoundError: no data.
        ValueError: no draft with a confidence head, or no test prompts.
    """
    with printing(aside=json):
        scores = [score_of(name, *histograms) for name, histograms in predictors(*_drafts(config)).items()]
        title = f"{config.data.dir}, test split; {Sampling(**vars(config.pair.sampling)).text}"
        columns = {name: (name, "" if name == "predictor" else ".5f") for name in scores[0] if name != "by_position"}
        note = "survival: every token of the draft so far is accepted"
        Table(f"confidences at all positions; {title}", shown(scores, columns), note).print()
        for name in ("brier", "ece", "survival_ece"):
            rows = [
                {"predictor": one["predictor"]}
                | {str(position): f"{value:.4f}" for position, value in enumerate(one["by_position"][name], 1)}
                for one in scores
            ]
            Table(f"{name} by position; {title}", rows).print()
        path = Path(config.decode.dir) / "confidence.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, dumps(scores, indent=1).encode())
        announce([path])
    if json:
        print(dumps(scores))


def _drafts(config: Config) -> tuple[Drafts, Drafts]:
    """The drafts of dev and test."""
    experiment, sets, path = Experiment(config), config.heads, config.pair.draft.path
    if released_layout_of(config.pair.draft) != "dspark":
        raise ValueError(f"pair.draft is {path}, which is not a DSpark draft; set it to one with a confidence head")
    if not config.data.num_test:
        raise ValueError("data.num_test is 0, but judge needs a test split; set it and run `acceptance-heads data`")
    sets = replace(sets, timings=("prefix",), scalars=(True,), embeddings=(False,), specdec=False, features="cached")
    data = FeatureData(settled(config.data, sets, is_verbose=False), sets, pair=config.pair)
    heads = {name: head for name, head in experiment.heads.items() if head.timing == "prefix"}
    draft = experiment.pair.drafting
    assert isinstance(draft, DSpark), "its layout is DSpark's"
    if draft.confidence_head is None:
        raise ValueError(f"pair.draft is {path}, which has no confidence head; set it to a DSpark draft with one")
    return _read(data, "dev", draft, heads), _read(data, "test", draft, heads)


@torch.inference_mode()
def _read(data: FeatureData, split: str, draft: DSpark, heads: Mapping[str, AcceptanceHead]) -> Drafts:
    parts = []
    for batch in Bar(data.loader(split), desc=f"read {split}", unit="batches"):
        features = of_timing(batch, "prefix")
        logits = [draft.confidence(features.hidden.float().to(draft.device, draft.dtype)).float().cpu()]
        for head in heads.values():
            scalars = features.columns(head.inputs.scalars) if head.inputs.scalars else None
            logits.append(head.calibrated_logit(head(features.hidden, scalars)).float())
        prob = batch["drawn"].acceptance_prob.float()
        parts.append((features.scalars[RATE].float(), prob, features.row_lengths, *logits))
    rate, prob, lengths, *columns = map(torch.cat, zip(*parts, strict=True))
    return Drafts(rate, prob, dict(zip((OWN, *heads), columns, strict=True)), lengths, draft.block_size)


def predictors(dev: Drafts, test: Drafts) -> dict[str, tuple[Histogram, Histogram]]:
    """Every predictor with its histograms on test, the draft's own first."""
    own, (by_position, _) = test.logits[OWN], dev.histograms(dev.logits[OWN])
    position = torch.cat([torch.arange(length) for length in test.lengths.tolist()])
    slope, offset = fit_logistic(pooled(by_position))
    slopes, offsets = (values[position] for values in fit_logistic(by_position))
    refits = {f"{OWN}, one offset and slope": slope * own + offset, PER_POSITION: slopes * own + offsets}
    return {name: test.histograms(logit) for name, logit in ({OWN: own} | refits | {**test.logits}).items()}


def pooled(by_position: Histogram) -> Histogram:
    """The histogram of all positions together, [1]."""
    return Histogram(*(part.sum(0, keepdim=True) for part in by_position))


def score_of(name: str, token: Histogram, survival: Histogram) -> dict[str, Any]:
    """The measures of one predictor, over all positions and by position."""
    whole, of_tokens, of_survival = measures(pooled(token)), measures(token), measures(survival)
    predicted = (survival.mean_logit.sigmoid() * survival.weight).sum(-1) / survival.total
    columns = {"brier": of_tokens.brier, "ece": of_tokens.ece, "auroc": auroc(token)}
    columns |= {"survival_brier": of_survival.brier, "survival_ece": of_survival.ece}
    columns |= {"predicted_survival": predicted, "survival": survival.accepted.sum(-1) / survival.total}
    score = {measure: float(getattr(whole, measure)) for measure in ("brier", "kl", "ece")}
    score |= {"auroc": float(auroc(pooled(token))), "survival_brier": float(measures(pooled(survival)).brier)}
    by_position = {measure: values.tolist() for measure, values in columns.items()}
    return {"predictor": name, **score, "by_position": by_position}
