"""python -m evaluation judge: how far the confidences of a DSpark draft can be trusted, on these prompts and under this
`Sampling`.
"""

import json as json_format
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import Config
from data_gen.pipeline.sizes import settled
from decode.experiment import Experiment
from evaluation.confidence.drafts import Drafts
from evaluation.confidence.predictors import OF_TOKEN, OWN, pooled, predictors
from evaluation.sheet import Sheet, announce, printing
from heads.batches.module import FeatureData
from heads.measures.histogram import Histogram
from heads.measures.scores import auroc, measures
from lm import Sampling
from lm.features.dspark import DSpark
from lm.features.released import released_layout_of
from store.shards import write_atomic


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One predictor on test: over all places, and place by place."""

    predictor: str
    brier: float
    gain: float
    """The share of the confidence head's Brier score that is saved."""
    kl: float
    """KL of the prediction from the truth, in nats: what training lowers."""
    ece: float
    auroc: float
    survival_brier: float
    by_place: dict[str, list[float]]
    """brier, ece and auroc of tokens; survival_brier, survival_ece, and the means of predicted and true survival."""


def judge(config: Config, *, json: bool = False) -> None:
    """Judge a DSpark draft's confidence head on your prompts, place by place; beside refits and heads of yours.

    Args:
        config: of the experiment, whose pair.draft is a DSpark draft; the data is there. Its heads are those of
            decode.heads or of heads.dir/exported; prefix heads count.
        json: print everything as one JSON document on stdout; tables then go to stderr.

    Raises:
        FileNotFoundError: no data.
        ValueError: no draft with a confidence head, or no test prompts.
    """
    sampling = Sampling(**vars(config.pair.sampling))
    with printing(aside=json):
        judged = list(_judged(*_drafts(config)))
        for sheet in sheets(judged, title=f"{config.data.dir}, test split; {sampling.text}"):
            sheet.print()
        path = Path(config.decode.dir) / "confidence.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        document = json_format.dumps([vars(one) for one in judged], indent=1)
        write_atomic(path, document.encode())
        announce([path])
    if json:
        print(json_format.dumps([vars(one) for one in judged]))


def _drafts(config: Config) -> tuple[Drafts, Drafts]:
    """The drafts of dev and test."""
    experiment, sets, path = Experiment(config), config.heads, config.pair.draft.path
    remedy = "and a confidence head is judged: name a DSpark draft that has one as pair.draft"
    if released_layout_of(config.pair.draft) != "dspark":
        raise ValueError(f"pair.draft is {path}, which is no DSpark draft, {remedy}")
    if not config.data.num_test:
        raise ValueError("data.num_test is 0, and confidences are judged on the test split; set it, and make the data")
    sets = replace(sets, timings=("prefix",), scalars=(True,), embeddings=(False,), specdec=False, features="cached")
    data = FeatureData(settled(config.data, sets, is_told=False), sets, pair=config.pair)
    heads = {name: head for name, head in experiment.heads.items() if head.timing == "prefix"}
    draft = experiment.pair.drafting
    assert isinstance(draft, DSpark), "its layout says so"
    if draft.confidence_head is None:
        raise ValueError(f"pair.draft is {path}, which has none (enable_confidence_head is false), {remedy}")
    dev, test = (Drafts.of(data, split, draft, heads) for split in ("dev", "test"))
    return dev, test


def _judged(dev: Drafts, test: Drafts) -> Iterator[Judged]:
    own: float | None = None
    for name, predicted in predictors(dev, test):
        token, survival = test.histograms(predicted)
        whole, of_tokens, of_survival = measures(pooled(token)), measures(token), measures(survival)
        brier = float(whole.brier)
        own = brier if own is None else own
        yield Judged(
            predictor=name,
            brier=brier,
            gain=1 - brier / own,
            kl=float(whole.kl),
            ece=float(whole.ece),
            auroc=float(auroc(pooled(token))),
            survival_brier=float(measures(pooled(survival)).brier),
            by_place={
                "brier": of_tokens.brier.tolist(),
                "ece": of_tokens.ece.tolist(),
                "auroc": auroc(token).tolist(),
                "survival_brier": of_survival.brier.tolist(),
                "survival_ece": of_survival.ece.tolist(),
                "predicted_survival": _mean_prediction(survival),
                "survival": (survival.accepted.sum(-1) / survival.total).tolist(),
            },
        )


def _mean_prediction(survival: Histogram) -> list[float]:
    values: list[float] = ((survival.mean_logit.sigmoid() * survival.weight).sum(-1) / survival.total).tolist()
    return values


def sheets(judged: Sequence[Judged], *, title: str) -> list[Sheet]:
    """One table over all places, and one for each measure by place."""
    rows = [
        {
            "predictor": one.predictor,
            "Brier": f"{one.brier:.5f}",
            "less than the confidence head's": "" if one.predictor in (OWN, OF_TOKEN) else f"{one.gain:+.1%}",
            "KL": f"{one.kl:.4f}",
            "ECE": f"{one.ece:.4f}",
            "AUROC": f"{one.auroc:.4f}",
            "Brier of survival": f"{one.survival_brier:.5f}",
        }
        for one in judged
    ]
    note = (
        "Brier score and ECE against the acceptance rate before the token is drawn, each token weighed by how often "
        f"verification looks at it; those of {OF_TOKEN} against that token's acceptance probability, which is another "
        "quantity. Survival: that the whole draft up to a place is accepted."
    )
    named = {"brier": "Brier", "ece": "ECE", "auroc": "AUROC", "survival_ece": "ECE of survival"}
    return [
        Sheet(f"confidences over all places; {title}", rows, note),
        *(Sheet(f"{label} by place; {title}", _by_place(judged, name)) for name, label in named.items()),
    ]


def _by_place(judged: Sequence[Judged], name: str) -> list[dict[str, Any]]:
    return [
        {"predictor": one.predictor} | {str(place): f"{value:.4f}" for place, value in enumerate(one.by_place[name], 1)}
        for one in judged
    ]
