"""All metrics of a finished sweep on one split, as JSON values.

Heads are compared with log q(y) alone, H(q) alone and a constant. Each signal is calibrated by a logistic regression on
the same split, which favours it; a head that still does not beat it has not converged or is of no use.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heads.batches.features import Batch, Features, of_timing
from heads.grid import HeadSpec
from heads.measures.histogram import Histogram, Sums, observe
from heads.measures.scores import auroc, fit_logistic, measures, reliability
from heads.measures.survival import by_position

Result = dict[str, Any]
NUM_POSITIONS = 8
"""Number of draft positions with metrics of their own."""
SIGNALS = ("log_token_prob", "negative_entropy")


class Evaluation:
    """Metrics of every head of a sweep over one split."""

    def __init__(self, specs: Sequence[HeadSpec], *, shift: Tensor, temperature: Tensor) -> None:
        """Args:
        specs: the heads, in the order of every [heads] axis.
        shift: the shift of each head's calibration, ln(w_rej / w_acc).
        temperature: the temperature of each head's calibration.
        """
        self._names, self._rows = [str(spec) for spec in specs], dict[str, list[int]]()
        for index, spec in enumerate(specs):
            self._rows.setdefault(spec.shape.timing, []).append(index)
        self._parts = {timing: _TimingMetrics(shift[at], temperature[at]) for timing, at in self._rows.items()}

    @torch.no_grad()
    def update(self, logits: Mapping[str, Tensor], batch: Batch) -> None:
        """Add a batch: timing -> [heads, tokens] logits, and the features that they were computed from."""
        for timing, logit in logits.items():
            self._parts[timing].update(logit, of_timing(batch, timing))

    def compute(self) -> Result:
        """{"heads": {name: …}, "signals": {timing: {signal: …}}, "labels": {timing: …}}."""
        heads, signals, labels = dict[str, Any](), {}, {}
        for timing, part in self._parts.items():
            heads |= dict(zip([self._names[row] for row in self._rows[timing]], part.of_heads(), strict=True))
            histogram = part.signals.compute()
            signals[timing], labels[timing] = _signal_results(histogram), _label_results(histogram)
        return {"heads": {name: heads[name] for name in self._names}, "signals": signals, "labels": labels}


class _TimingMetrics:
    """The metrics of the heads of one timing."""

    def __init__(self, shift: Tensor, temperature: Tensor) -> None:
        self.shift, self.temperature = shift, temperature
        self.tokens, self.signals = Sums(len(shift), shift.device), Sums(len(SIGNALS), shift.device)
        count = len(shift) * NUM_POSITIONS
        self.drafts = {way: [Sums(count, shift.device) for _ in range(2)] for way in ("raw", "calibrated")}

    def update(self, logit: Tensor, features: Features) -> None:
        label, lengths = features.acceptance_prob, features.row_lengths
        calibrated = (logit + self.shift[:, None].to(logit)) / self.temperature[:, None].to(logit)
        signals = torch.stack([features.scalars["log_token_prob"].float(), -features.scalars["entropy"].float()])
        self.tokens.update(observe(logit, label[None]))
        for way, values in (("raw", logit), ("calibrated", calibrated)):
            histograms = by_position(values, label, row_lengths=lengths, num_positions=NUM_POSITIONS)
            for sums, histogram in zip(self.drafts[way], histograms, strict=True):
                sums.update(histogram)
        self.signals.update(observe(signals, label[None]))

    def of_heads(self) -> list[dict[str, Any]]:
        """All measurements of each head."""
        histogram = self.tokens.compute()
        columns = {"auroc": auroc(histogram), "temperature": self.temperature, "shift": self.shift}
        results: list[dict[str, Any]] = _unstack(columns)
        unit, zero = torch.ones_like(self.shift), torch.zeros_like(self.shift)
        affine = {"raw": (unit, zero), "calibrated": (1 / self.temperature, self.shift / self.temperature)}
        for way, of_heads in affine.items():
            of_tokens = _unstack(measures(histogram, *of_heads)._asdict())
            of_drafts = _draft_results(*(sums.compute() for sums in self.drafts[way]))
            bins = _unstack(reliability(histogram, *of_heads)._asdict())
            for index, result in enumerate(results):
                result |= {f"{way}_{name}": value for name, value in of_tokens[index].items()}
                result[way] = of_drafts[index] | {"reliability": bins[index]}
        return results


def _draft_results(token: Histogram, survival: Histogram) -> list[dict[str, Any]]:
    """Metrics of each head by draft position, and of its survival predictions."""
    along = _unstack(measures(token)._asdict() | {"auroc": auroc(token)})
    of_survival = _unstack(measures(survival)._asdict())
    parts = [slice(start, start + NUM_POSITIONS) for start in range(0, len(along), NUM_POSITIONS)]
    return [{"by_position": along[part], "survival": of_survival[part]} for part in parts]


def _signal_results(histogram: Histogram) -> dict[str, Any]:
    calibrated = measures(histogram, *fit_logistic(histogram))._asdict()
    columns = {"auroc": auroc(histogram)} | {f"calibrated_{name}": value for name, value in calibrated.items()}
    return dict(zip(SIGNALS, _unstack(columns), strict=True))


def _label_results(histogram: Histogram) -> dict[str, float]:
    """Statistics of the split's labels."""
    total, mean = float(histogram.total[0]), float(histogram.accepted[0].sum() / histogram.total[0])
    label_entropy = float(histogram.entropy[0] / histogram.total[0])
    entropy_of_mean = -sum(prob * math.log(prob) for prob in (mean, 1 - mean) if prob > 0)
    means = {"mean_acceptance_prob": mean, "mean_entropy": label_entropy}
    return {"num_tokens": total, **means, "constant_kl": entropy_of_mean - label_entropy}


def _unstack(columns: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """One dict of JSON values for each index of the first axis."""
    values = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
