"""What is compared as a confidence: the draft's own head as it is and refitted, heads of ours, and what needs no head.

    confidence head                     as the draft has it
    ..., one offset and slope           a f + b, a logistic regression on dev (`heads.measures.calibration`)
    ..., an offset and slope per place  the same at each place of the block
    a head                              its calibrated logit
    logit(max q), learned online        vLLM's estimator: a logistic regression on logit(max q) that follows what
                                        verification reveals (`decode.policies.learning`), through dev and then test
    q(y)                                of the drawn token, a logistic regression on dev: it may end a draft behind its
                                        token, never before it (law 4.3), and predicts that token's own acceptance_prob

Regressions weigh a token by how often verification looks at it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from decode.policies.base import mapped
from decode.policies.learning import FIRST, learned_from, lesson_of, logit_of
from evaluation.confidence.drafts import Drafts, Predicted
from heads.batches.features import RATE
from heads.measures.calibration import fit_logistic
from heads.measures.histogram import Histogram

OWN = "confidence head"
PER_PLACE = f"{OWN}, an offset and slope per place"
ONLINE = "logit(max q), learned online"
OF_TOKEN = "q(y), of the drawn token"


def predictors(dev: Drafts, test: Drafts) -> Iterator[tuple[str, Predicted]]:
    """Every predictor by its name, fitted on dev, with its predictions on test."""
    rate = test.columns[RATE]
    own, on_dev = (drafts.columns["confidence_logit"] for drafts in (test, dev))
    yield OWN, Predicted(own, rate)
    token, _ = dev.histograms(Predicted(on_dev, dev.columns[RATE]))
    slope, offset = fit_logistic(pooled(token))
    yield f"{OWN}, one offset and slope", Predicted(slope * own + offset, rate)
    slope, offset = fit_logistic(token)
    yield PER_PLACE, Predicted(slope[test.place] * own + offset[test.place], rate)
    for name, logit in test.logits.items():
        yield name, Predicted(logit, rate)
    yield ONLINE, Predicted(learned_online(dev, test), rate)
    of_dev, of_test = (drafts.columns["log_token_prob"] for drafts in (dev, test))
    token, _ = dev.histograms(Predicted(of_dev, dev.columns["acceptance_prob"]))
    slope, offset = fit_logistic(pooled(token))
    yield OF_TOKEN, Predicted(slope * of_test + offset, test.columns["acceptance_prob"])


def pooled(by_place: Histogram) -> Histogram:
    """The histogram of all places together, [1]."""
    return Histogram(*(part.sum(0, keepdim=True) for part in by_place))


def learned_online(*streams: Drafts) -> Float[Tensor, " tokens"]:
    """Logits that logit(max q) is given in the last of some streams of drafts, by a regression that has seen the drafts
    before, each once it was verified.

    Each token teaches as much as it is likely to be revealed: by the product of the acceptance_probs before it.
    """
    learned: Any = FIRST
    for drafts in streams:
        inputs, labels = logit_of(drafts.padded("max_prob")), drafts.padded("acceptance_prob")
        said = np.full_like(inputs, np.nan)
        for number, (f, label, length) in enumerate(zip(inputs, labels, drafts.lengths.tolist(), strict=True)):
            f, label = f[:length], label[:length]
            shift, slope, _ = learned.weights
            said[number, :length] = shift + slope * f
            lesson = lesson_of(learned.weights, (f, np.zeros(length)), label)
            reach = np.append(1.0, label[:-1].cumprod())
            learned = learned_from(learned, mapped(lambda values, reach=reach: float((values * reach).sum()), lesson))
    return torch.from_numpy(said[~np.isnan(said)]).float()
