"""The draft's own signal: the scalar that predicts a head's label without a head: logit q(y), or logit max q before y
is drawn (`heads.model.inputs.SIGNALS`).

Its prediction is sigmoid(slope z + offset), with two numbers fitted to training responses. The scalar is a logit,
because log q(y) is bounded by 0: no slope and offset of it reach the acceptance of near-certain tokens. A head is worth
decoding with only if its KL on dev is lower.
"""

from collections.abc import Iterable

import torch

from heads.batches.features import of_timing
from heads.batches.module import FeatureData
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic
from heads.measures.sums import Sums
from heads.model.inputs import SIGNALS

_NUM_RESPONSES = 2048
"""Training responses that the two numbers are fitted to."""


def fit_own_signals(data: FeatureData, timings: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Timing -> (slope, offset) of the signal of its heads, fitted to labels without hidden states, batch after batch.

    ValueError without drafted tokens.
    """
    sums = {timing: Sums(1, torch.device("cpu")) for timing in timings}
    for batch in data.training_labels(_NUM_RESPONSES):
        for timing, of_signal in sums.items():
            features = of_timing(batch, timing)
            of_signal.update(observe(features.scalars[SIGNALS[timing]][None], features.acceptance_prob[None]))
    fitted = {}
    for timing, of_signal in sums.items():
        histogram = of_signal.compute()
        if not float(histogram.total):
            raise ValueError(f"train labels of {data.data.dir} have no drafted tokens; raise data.num_train")
        slope, offset = fit_logistic(histogram)
        fitted[timing] = (float(slope), float(offset))
    return fitted
