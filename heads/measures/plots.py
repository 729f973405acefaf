"""Plots of a finished training: learning curves, reliability, and errors along a draft."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from heads.measures.figure import GREY, INK, add_legend, draw_bins, panels_of
from heads.measures.report import best_heads, by_kind, signal_kl
from heads.model.files import LEAST_KL


def save_plots(directory: Path, result: Result, *, history: list[Result], specs: Sequence[HeadSpec]) -> list[Path]:
    """Draw every plot of the results on dev into a directory; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {"reliability": reliability_diagram(result, specs), "along_draft": along_draft(result, specs)}
    if history:
        figures["learning_curves"] = learning_curves(result, specs, history=history)
    for name, figure in figures.items():
        figure.savefig(directory / f"{name}.png", dpi=120)
    return [directory / f"{name}.png" for name in figures]


def reliability_diagram(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Predicted and true acceptance probability, raw and calibrated, of the best head of each kind of inputs, above
    the number of tokens in each bin.
    """
    figure, panels = panels_of(2, width=9.0, height=5.0, rows=(3, 1))
    for number, way in enumerate(("raw", "calibrated")):
        above, below = panels[number::2]
        draw_bins(above, below, _bins(result, specs, way=way))
        above.set_title(f"{way} probabilities", fontsize=10)
        below.set_xlabel("predicted acceptance probability")
    panels[0].set_ylabel("mean acceptance probability")
    add_legend(figure, panels[0])
    return figure


def _bins(result: Result, specs: Sequence[HeadSpec], *, way: str) -> dict[str, dict[str, np.ndarray]]:
    timings = {str(spec): spec.shape.timing for spec in specs}
    every = {}
    for name in best_heads(result, specs).values():
        bins = {key: np.array(values) for key, values in result["heads"][name][way]["reliability"].items()}
        bins["count"] = np.round(bins["share"] * result["labels"][timings[name]]["num_tokens"])
        every[name] = bins
    return every


def along_draft(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Calibrated token KL, token ECE and survival ECE by draft position, of the best head of each kind of inputs."""
    panels = {"token KL, nats": ("by_position", "kl"), "token ECE": ("by_position", "ece")}
    panels["survival ECE"] = ("survival", "ece")
    figure, every = panels_of(len(panels), width=12.0, height=3.6)
    for axes, (title, (group, metric)) in zip(every, panels.items(), strict=True):
        for name in best_heads(result, specs).values():
            values = [entry[metric] for entry in result["heads"][name]["calibrated"][group]]
            axes.plot(range(1, len(values) + 1), values, marker=".", label=name)
        axes.set(xlabel="draft position", title=title, ylim=(0, None))
    add_legend(figure, every[0])
    return figure


def learning_curves(result: Result, specs: Sequence[HeadSpec], *, history: list[Result]) -> Figure:
    """Calibrated KL on dev at each validation as a part of that of the draft's own signal, which makes timings
    comparable: every head pale, the best of each kind of inputs in full colour with a dot at its best step.
    """
    figure, (axes,) = panels_of(1, width=8.0, height=4.2)
    steps = [entry["step"] for entry in history]
    best = set(best_heads(result, specs).values())
    for number, of_kind in enumerate(by_kind(specs).values()):
        for spec in of_kind:
            of_signal = max(signal_kl(result, spec.shape.timing), LEAST_KL)
            curve = [entry["calibrated_kl"][specs.index(spec)] / of_signal for entry in history]
            if str(spec) not in best:
                axes.plot(steps, curve, color=f"C{number}", linewidth=0.8, alpha=0.3)
                continue
            step = int(np.argmin(curve))
            label = f"{spec}: {curve[step]:.3f} at step {steps[step]:,}"
            axes.plot(steps, curve, color=f"C{number}", linewidth=1.8, label=label, zorder=3)
            axes.plot(steps[step], curve[step], "o", color=f"C{number}", markeredgecolor=INK, zorder=4)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1, label="the draft's own signal")
    axes.set(xlabel="optimiser steps", ylabel="KL on dev over that of the draft's own signal")
    add_legend(figure, axes)
    return figure
