"""All metrics of a finished sweep on one split, as JSON values.

Heads are compared with a constant and with the draft's own signal (`heads.training.start`), whose two numbers are
fitted to training responses; a head that does not beat it has not converged or is of no use.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from heads.batches.features import Batch, of_timing
from heads.grid import HeadSpec
from heads.measures.histogram import Histogram, by_position, observe
from heads.measures.intervals import HEAD, SIGNAL, TOKENS, Products, ratio_interval
from heads.measures.scores import auroc, measures, reliability
from heads.measures.sums import Sums
from heads.model.inputs import SIGNALS
from store.json_files import Json

Result = Json
NUM_POSITIONS = 8
"""Draft positions with their own metrics."""
_WAYS = ("raw", "calibrated")
_KINDS = ("by_position", "survival")
"""Metrics of single tokens, and of the probability that a draft survives, by draft position."""


class SplitMetrics:
    """Metrics of every head of a sweep over one split."""

    def __init__(
        self, specs: Sequence[HeadSpec], shift: Tensor, temperature: Tensor, *, signals: Mapping[str, Sequence[float]]
    ) -> None:
        """`shift`, ln(w_rej / w_acc), and `temperature` calibrate each of the heads `specs`; `signals`: slope and
        offset of the draft's own signal, by timing.
        """
        self._signals = signals
        self._names = list(map(str, specs))
        self._shift = shift
        self._temperature = temperature
        self._rows, self._sums = dict[str, list[int]](), dict[str, dict[str, Sums]]()
        self._products = dict[str, Products]()
        for index, spec in enumerate(specs):
            self._rows.setdefault(spec.shape.timing, []).append(index)
        for timing, rows in self._rows.items():
            along = {f"{way} {kind}": len(rows) * NUM_POSITIONS for way in _WAYS for kind in _KINDS}
            counts = {"tokens": len(rows), "signal": 1} | along
            self._sums[timing] = {name: Sums(count, shift.device) for name, count in counts.items()}
            self._products[timing] = Products(len(rows), shift.device)

    @torch.no_grad()
    def update(self, logits: Mapping[str, Tensor], batch: Batch) -> None:
        """Add a batch: timing -> [heads, tokens] logits, and the features that they were computed from."""
        for timing, logit in logits.items():
            features = of_timing(batch, timing)
            sums = self._sums[timing]
            rows = self._rows[timing]
            label = features.acceptance_prob
            lengths = features.row_lengths
            if not len(label):  # the part of one of several processes may have no token
                continue
            calibrated = (logit + self._shift[rows, None].to(logit)) / self._temperature[rows, None].to(logit)
            signal = features.scalars[SIGNALS[timing]].float()
            sums["tokens"].update(observe(logit, label[None]))
            sums["signal"].update(observe(signal[None], label[None]))
            slope, offset = self._signals[timing]
            self._products[timing].update(calibrated, slope * signal + offset, label, features.response_lengths)
            for way, values in zip(_WAYS, (logit, calibrated), strict=True):
                histograms = by_position(values, label, row_lengths=lengths, num_positions=NUM_POSITIONS)
                for kind, histogram in zip(_KINDS, histograms, strict=True):
                    sums[f"{way} {kind}"].update(histogram)

    def compute(self) -> Result:
        """{"heads": {name: …}, "signals": {timing: {scalar: …}}, "labels": {timing: …}}."""
        heads = dict[str, Result]()
        signals = {}
        labels = {}
        for timing, rows in self._rows.items():
            sums = {name: of_batches.compute() for name, of_batches in self._sums[timing].items()}
            results = _head_results(sums, shift=self._shift[rows], temperature=self._temperature[rows])
            products = self._products[timing].compute()
            for result, interval in zip(results, _intervals(products), strict=True):
                result |= interval
            heads |= dict(zip([self._names[row] for row in rows], results, strict=True))
            signals[timing] = {SIGNALS[timing]: _signal_results(sums["signal"], *self._signals[timing])}
            labels[timing] = _label_results(sums["signal"]) | {"num_responses": float(products[0, -1, -1])}
        return {"heads": {name: heads[name] for name in self._names}, "signals": signals, "labels": labels}


def _head_results(sums: Mapping[str, Histogram], *, shift: Tensor, temperature: Tensor) -> list[Result]:
    tokens = sums["tokens"]
    results = _unstack({"auroc": auroc(tokens), "temperature": temperature, "shift": shift})
    affine = (torch.ones_like(shift), torch.zeros_like(shift)), (1 / temperature, shift / temperature)
    for way, of_heads in zip(_WAYS, affine, strict=True):
        token, survival = (sums[f"{way} {kind}"] for kind in _KINDS)
        of_tokens = _unstack(measures(tokens, *of_heads)._asdict())
        bins = _unstack(reliability(tokens, *of_heads))
        of_positions = _unstack(measures(token)._asdict() | {"auroc": auroc(token)})
        of_survival = _unstack(measures(survival)._asdict())
        for index, result in enumerate(results):
            at = slice(index * NUM_POSITIONS, (index + 1) * NUM_POSITIONS)
            result |= {f"{way}_{name}": value for name, value in of_tokens[index].items()}
            along = dict(zip(_KINDS, (of_positions[at], of_survival[at]), strict=True))
            result[way] = along | {"reliability": bins[index]}
    return results


def _intervals(products: Tensor) -> list[Result]:
    """95 % intervals of every head: kl_interval, of its KL in nats per token; lead, 1 - KL / KL of the draft's own
    signal; and lead_interval.
    """
    _, of_kl = ratio_interval(products, HEAD, TOKENS)
    part, of_part = ratio_interval(products, HEAD, SIGNAL)
    return _unstack({"kl_interval": of_kl.clamp_min(0), "lead": 1 - part, "lead_interval": 1 - of_part.flip(-1)})


def _signal_results(histogram: Histogram, slope: float, offset: float) -> dict[str, float]:
    calibrated = measures(histogram, slope, offset)._asdict()
    metrics = {"auroc": auroc(histogram)} | {f"calibrated_{name}": value for name, value in calibrated.items()}
    return {name: float(value) for name, value in metrics.items()} | {"slope": slope, "offset": offset}


def _label_results(histogram: Histogram) -> dict[str, float]:
    total = float(histogram.total.sum())
    mean = float(histogram.accepted.sum()) / total
    label_entropy = float(histogram.entropy.sum()) / total
    entropy_of_mean = -sum(prob * math.log(prob) for prob in (mean, 1 - mean) if prob > 0)
    return {
        "num_tokens": total,
        "mean_acceptance_prob": mean,
        "mean_entropy": label_entropy,
        "constant_kl": entropy_of_mean - label_entropy,
    }


def _unstack(columns: Mapping[str, Tensor]) -> list[Result]:
    """One dict of JSON values for each index of the first axis."""
    values = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
