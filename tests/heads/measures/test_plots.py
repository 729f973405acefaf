"""Plots of a training show the best step of each kind of heads and count the tokens behind each point."""

import json
from pathlib import Path

import numpy as np
import pytest

from heads.command import load_sweep
from heads.measures.plots import learning_curves, reliability_diagram
from heads.measures.report import best_heads, by_kind
from tests.heads.conftest import Run


def test_learning_curves_mark_the_best_step_of_the_best_head_of_each_kind_beside_the_signal(trained: Run):
    sweep = load_sweep(Path(trained.config.heads.dir) / "last.ckpt")
    dev = trained.results["dev"]
    axes = learning_curves(dev, sweep.specs, history=sweep.history).axes[0]
    of_signal = {timing: dev["signals"][timing]["logit_token_prob"]["calibrated_kl"] for timing in ("fed", "drawn")}
    names = list(map(str, sweep.specs))
    marks = [line.get_xydata()[0].tolist() for line in axes.lines if line.get_marker() == "o"]
    expected = []
    for name in best_heads(dev, sweep.specs).values():
        curve = [entry["calibrated_kl"][names.index(name)] for entry in sweep.history]
        best = int(np.argmin(curve))
        timing = sweep.specs[names.index(name)].shape.timing
        expected.append([sweep.history[best]["step"], pytest.approx(curve[best] / of_signal[timing])])
    assert marks == expected
    assert len(marks) == len(by_kind(sweep.specs)) == 4
    assert len(axes.lines) == 16 + 4 + 1, "every head, a mark for each kind, and the signal"
    assert all(f"step {step:,.0f}" in label for (step, _), label in zip(marks, labels_of(axes), strict=False))


def labels_of(axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_reliability_counts_the_tokens_of_each_bin(trained: Run):
    sweep = load_sweep(Path(trained.config.heads.dir) / "last.ckpt")
    results = json.loads((Path(trained.config.heads.dir) / "val_metrics.json").read_text())["results"]
    raw, calibrated, *below = reliability_diagram(results["dev"], sweep.specs).axes
    best = best_heads(results["dev"], sweep.specs)
    for way, above, counts in (("raw", raw, below[0]), ("calibrated", calibrated, below[1])):
        for number, name in enumerate(best.values()):
            bins = results["dev"]["heads"][name][way]["reliability"]
            is_filled = np.array(bins["share"]) > 0
            drawn, counted = above.lines[1 + number], counts.lines[number]
            assert drawn.get_xdata() == pytest.approx(np.array(bins["predicted"])[is_filled])
            assert drawn.get_ydata() == pytest.approx(np.array(bins["true"])[is_filled])
            timing = name.partition("-")[0].partition("+")[0]
            assert counted.get_ydata().sum() == results["dev"]["labels"][timing]["num_tokens"]
            assert drawn.get_color() == counted.get_color()
