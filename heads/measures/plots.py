"""Plots of a sweep: learning curves, reliability diagrams, heat maps over depth and reject weight."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from heads.measures.tables import best_heads


def save_plots(
    directory: Path, result: Result, *, history: list[dict[str, Any]], specs: Sequence[HeadSpec]
) -> list[Path]:
    """Draw every plot into a directory; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {
        "heat_map": heat_map(result, specs),
        "reliability": reliability_diagrams(result, specs),
        "along_draft": along_draft(result, specs),
    }
    if history:
        figures["learning_curves"] = learning_curves(result, specs, history=history)
    paths = []
    for name, figure in figures.items():
        figure.savefig(directory / f"{name}.png", dpi=120)
        plt.close(figure)
        paths.append(directory / f"{name}.png")
    return paths


def heat_map(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Calibrated KL and AUROC on dev over depth and reject weight, one row of panels per kind of inputs."""
    kinds = list(dict.fromkeys(spec.shape.kind for spec in specs))
    figure, axes = plt.subplots(len(kinds), 2, figsize=(9, 0.9 + 2.9 * len(kinds)), squeeze=False, layout="constrained")
    for row, inputs in zip(axes, kinds, strict=True):
        chosen = [spec for spec in specs if spec.shape.kind == inputs]
        for axis, metric, colours in zip(row, ("calibrated_kl", "auroc"), ("viridis_r", "viridis"), strict=True):
            _heat(axis, result, specs=chosen, metric=metric, colours=colours)
            axis.set_title(f"{inputs}: {metric.replace('_', ' ')}", fontsize=10)
    return figure


def reliability_diagrams(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Predicted against true acceptance probability, raw and calibrated, of the best head of each kind of inputs at
    each reject weight.
    """
    kinds = list(dict.fromkeys(spec.shape.kind for spec in specs))
    figure, axes = plt.subplots(
        len(kinds),
        2,
        figsize=(8, 0.6 + 3.7 * len(kinds)),
        squeeze=False,
        layout="constrained",
        sharex=True,
        sharey=True,
    )
    for row, inputs in zip(axes, kinds, strict=True):
        for axis, way in zip(row, ("raw", "calibrated"), strict=True):
            axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
            for spec in _best_by_weight(result, [spec for spec in specs if spec.shape.kind == inputs]):
                bins = result["heads"][str(spec)][way]["reliability"]
                filled = [
                    (x, y)
                    for x, y, share in zip(bins["predicted"], bins["true"], bins["share"], strict=True)
                    if share > 1e-3
                ]
                axis.plot(
                    *zip(*filled, strict=True),
                    marker=".",
                    label=f"w_rej {spec.reject_weight:g}, depth {spec.shape.depth}",
                )
            axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted acceptance_prob", ylabel="mean acceptance_prob")
            axis.set_title(f"{inputs}, {way}", fontsize=10)
        row[0].legend(fontsize=8)
    return figure


def along_draft(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Plot by draft position: ECE of token and of survival predictions, calibrated, of the best head of each kind of
    inputs.
    """
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    names = best_heads(result, specs)
    for axis, (group, metric, title) in zip(
        axes,
        (
            ("by_position", "kl", "token KL, nats"),
            ("by_position", "ece", "token ECE"),
            ("survival", "ece", "survival ECE"),
        ),
        strict=True,
    ):
        for name in names.values():
            values = [entry[metric] for entry in result["heads"][name]["calibrated"][group]]
            axis.plot(range(1, len(values) + 1), values, marker=".", label=name)
        axis.set(xlabel="draft position", title=title, ylim=(0, None))
    axes[0].legend(fontsize=8)
    return figure


def learning_curves(result: Result, specs: Sequence[HeadSpec], *, history: list[dict[str, Any]]) -> Figure:
    """Calibrated KL on dev at each validation, one panel per kind of inputs, with the better signal alone as the line
    to beat.
    """
    kinds = list(dict.fromkeys(spec.shape.kind for spec in specs))
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(1.2 + 4.2 * len(kinds), 4), squeeze=False, layout="constrained", sharey=True
    )
    depths = sorted({spec.shape.depth for spec in specs})
    for axis, inputs in zip(axes[0], kinds, strict=True):
        for index, spec in enumerate(specs):
            if spec.shape.kind == inputs:
                colour = plt.get_cmap("viridis")(depths.index(spec.shape.depth) / max(1, len(depths) - 1))
                is_first = spec.reject_weight == min(s.reject_weight for s in specs)
                curve = [entry["calibrated_kl"][index] for entry in history]
                axis.plot(
                    [entry["step"] for entry in history],
                    curve,
                    color=colour,
                    linewidth=1,
                    label=f"depth {spec.shape.depth}" if is_first else None,
                )
        signals = result["signals"][inputs.split("+")[0]]
        name, signal = min(signals.items(), key=lambda item: item[1]["calibrated_kl"])
        axis.axhline(signal["calibrated_kl"], color="black", linestyle="--", linewidth=1, label=f"{name} alone")
        axis.set(xlabel="optimiser steps", title=inputs)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("calibrated KL on dev, nats")
    return figure


def _heat(axis: Axes, result: Result, *, specs: Sequence[HeadSpec], metric: str, colours: str) -> None:
    depths, weights = (
        list(dict.fromkeys(values)) for values in ([s.shape.depth for s in specs], [s.reject_weight for s in specs])
    )
    values = [[result["heads"][str(s)][metric] for s in specs if s.shape.depth == depth] for depth in depths]
    flat = [value for row in values for value in row]
    image = axis.imshow(values, cmap=colours, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            is_dark = (value - min(flat)) / max(1e-12, max(flat) - min(flat))
            is_dark = 1 - is_dark if colours.endswith("_r") else is_dark
            axis.text(
                x, y, f"{value:.4f}", ha="center", va="center", fontsize=8, color="black" if is_dark > 0.5 else "white"
            )
    axis.set_xticks(range(len(weights)), [f"{weight:g}" for weight in weights])
    axis.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axis.set(xlabel="reject weight", ylabel="depth")
    axis.figure.colorbar(image, ax=axis)


def _best_by_weight(result: Result, specs: Sequence[HeadSpec]) -> list[HeadSpec]:
    best: dict[float, HeadSpec] = {}
    for spec in specs:
        value = result["heads"][str(spec)]["calibrated_kl"]
        if spec.reject_weight not in best or value < result["heads"][str(best[spec.reject_weight])]["calibrated_kl"]:
            best[spec.reject_weight] = spec if not math.isnan(value) else best.get(spec.reject_weight, spec)
    return list(best.values())
