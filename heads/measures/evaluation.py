"""All metrics of a finished sweep on one split, as JSON values.

Heads are compared with log q(y) alone, H(q) alone and a constant. Each signal is calibrated by a logistic regression on
the same split, which favours it; a head that still does not beat it has not converged or is of no use.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.batches.features import Batch, of_timing
from heads.grid import HeadSpec
from heads.measures.calibration import fit_logistic
from heads.measures.histogram import Histogram, observe
from heads.measures.running import NUM_POSITIONS, DraftMetric, LogitHistogram
from heads.measures.scores import Measures, auroc, measures, reliability

Result = dict[str, Any]
SIGNALS = ("log_token_prob", "negative_entropy")


class Evaluation(nn.Module):
    """Metrics of every head of a sweep over one split."""

    def __init__(self, specs: Sequence[HeadSpec], *, shift: Tensor, temperature: Tensor) -> None:
        """Args:
        specs: the heads, in the order of every [heads] axis.
        shift: the shift of each head's calibration, ln(w_rej / w_acc).
        temperature: the temperature of each head's calibration.
        """
        super().__init__()
        self._names = [str(spec) for spec in specs]
        timings = [spec.shape.timing for spec in specs]
        self._rows: dict[str, list[int]] = {
            timing: [i for i, t in enumerate(timings) if t == timing] for timing in dict.fromkeys(timings)
        }
        self._shift = {timing: shift[rows] for timing, rows in self._rows.items()}
        self._temperature = {timing: temperature[rows] for timing, rows in self._rows.items()}
        counts = {timing: len(rows) for timing, rows in self._rows.items()}
        self.tokens = nn.ModuleDict({timing: LogitHistogram(count) for timing, count in counts.items()})
        self.raw, self.calibrated = (
            nn.ModuleDict({timing: DraftMetric(count) for timing, count in counts.items()}) for _ in range(2)
        )
        self.signals = nn.ModuleDict({timing: LogitHistogram(len(SIGNALS)) for timing in counts})

    @torch.no_grad()
    def update(self, logits: Mapping[str, Tensor], batch: Batch) -> None:
        """Add a batch: timing -> [heads, tokens] logits, and the features that they were computed from."""
        for timing, logit in logits.items():
            features = of_timing(batch, timing)
            label, lengths = features.acceptance_prob, features.row_lengths
            calibrated = (logit + self._shift[timing][:, None].to(logit)) / self._temperature[timing][:, None].to(logit)
            signals = torch.stack([features.scalars["log_token_prob"].float(), -features.scalars["entropy"].float()])
            self.tokens[timing].update(observe(logit, label[None]))  # type: ignore[operator]
            self.raw[timing].update(logit, label, row_lengths=lengths)  # type: ignore[operator]
            self.calibrated[timing].update(calibrated, label, row_lengths=lengths)  # type: ignore[operator]
            self.signals[timing].update(observe(signals, label[None]))  # type: ignore[operator]

    def compute(self) -> Result:
        """{"heads": {name: …}, "signals": {timing: {signal: …}}, "labels": {timing: …}}."""
        heads: dict[str, Any] = {}
        signals, labels = {}, {}
        for timing, rows in self._rows.items():
            heads |= dict(zip([self._names[row] for row in rows], self._head_results(timing), strict=True))
            histogram = self.signals[timing].compute()  # type: ignore[operator]
            signals[timing], labels[timing] = _signal_results(histogram), _label_results(histogram)
        return {"heads": {name: heads[name] for name in self._names}, "signals": signals, "labels": labels}

    def _head_results(self, timing: str) -> list[dict[str, Any]]:
        histogram = self.tokens[timing].compute()  # type: ignore[operator]
        shift, temperature = self._shift[timing].to(histogram.weight), self._temperature[timing].to(histogram.weight)
        results: list[dict[str, Any]] = [
            {"auroc": value, "temperature": t, "shift": s}
            for value, t, s in zip(auroc(histogram).tolist(), temperature.tolist(), shift.tolist(), strict=True)
        ]
        for way, drafts, slope, offset in (
            ("raw", self.raw[timing], torch.ones_like(shift), torch.zeros_like(shift)),
            ("calibrated", self.calibrated[timing], 1 / temperature, shift / temperature),
        ):
            of_tokens = _unstack(measures(histogram, slope, offset))
            of_drafts = _draft_results(drafts, len(results))  # type: ignore[arg-type]
            bins = {name: value.tolist() for name, value in reliability(histogram, slope, offset)._asdict().items()}
            for index, result in enumerate(results):
                result |= {f"{way}_{name}": value for name, value in of_tokens[index].items()}
                of_bins = {name: values[index] for name, values in bins.items()}
                result[way] = of_drafts[index] | {"reliability": of_bins}
        return results


def _draft_results(metric: DraftMetric, num_heads: int) -> list[dict[str, Any]]:
    """Metrics of each head by draft position, and of its survival predictions."""
    token = metric.token.compute()
    by_position, of_survival = (_unstack(measures(part)) for part in (token, metric.survival.compute()))
    along = [values | {"auroc": score} for values, score in zip(by_position, auroc(token).tolist(), strict=True)]
    positions = [slice(head * NUM_POSITIONS, (head + 1) * NUM_POSITIONS) for head in range(num_heads)]
    return [{"by_position": along[part], "survival": of_survival[part]} for part in positions]


def _signal_results(histogram: Histogram) -> dict[str, Any]:
    slope, offset = fit_logistic(histogram)
    fitted = _unstack(measures(histogram, slope, offset))
    scores = auroc(histogram).tolist()
    return {
        name: {"auroc": scores[index], **{f"calibrated_{key}": value for key, value in fitted[index].items()}}
        for index, name in enumerate(SIGNALS)
    }


def _label_results(histogram: Histogram) -> dict[str, float]:
    """Statistics of the split's labels."""
    total, mean = float(histogram.total[0]), float(histogram.accepted[0].sum() / histogram.total[0])
    label_entropy = float(histogram.entropy[0] / histogram.total[0])
    entropy_of_mean = -sum(prob * math.log(prob) for prob in (mean, 1 - mean) if prob > 0)
    return {
        "num_tokens": total,
        "mean_acceptance_prob": mean,
        "mean_entropy": label_entropy,
        "constant_kl": entropy_of_mean - label_entropy,
    }


def _unstack(of_rows: Measures) -> list[dict[str, float]]:
    columns = {name: value.tolist() for name, value in of_rows._asdict().items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
