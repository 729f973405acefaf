"""Plots of a sweep: learning curves, reliability diagrams, heat maps over depth and reject weight."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heads.grid import HeadSpec
from heads.measures.evaluation import Result
from heads.measures.tables import best_heads, by_kind


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
    paths = [directory / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=120)
    return paths


def heat_map(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Calibrated KL and AUROC on dev over depth and reject weight, one row of panels per kind of inputs."""
    kinds = by_kind(specs)
    figure = Figure(figsize=(9, 0.9 + 2.9 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2, squeeze=False)
    for row, (kind, of_kind) in zip(axes, kinds.items(), strict=True):
        for axis, metric, colours in zip(row, ("calibrated_kl", "auroc"), ("viridis_r", "viridis"), strict=True):
            _heat(axis, result, specs=of_kind, metric=metric, colours=colours)
            axis.set_title(f"{kind}: {metric.replace('_', ' ')}", fontsize=10)
    return figure


def reliability_diagrams(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Predicted and true acceptance probability, raw and calibrated, of the best head per kind and reject weight."""
    kinds = by_kind(specs)
    figure = Figure(figsize=(8, 0.6 + 3.7 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2, squeeze=False, sharex=True, sharey=True)
    for row, (kind, of_kind) in zip(axes, kinds.items(), strict=True):
        for axis, way in zip(row, ("raw", "calibrated"), strict=True):
            axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
            for spec in _best_by_weight(result, of_kind):
                bins = result["heads"][str(spec)][way]["reliability"]
                points = zip(bins["predicted"], bins["true"], bins["share"], strict=True)
                filled = [(predicted, true) for predicted, true, share in points if share > 1e-3]
                label = f"w_rej {spec.reject_weight:g}, depth {spec.shape.depth}"
                axis.plot(*zip(*filled, strict=True), marker=".", label=label)
            axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted acceptance_prob", ylabel="mean acceptance_prob")
            axis.set_title(f"{kind}, {way}", fontsize=10)
        row[0].legend(fontsize=8)
    return figure


def along_draft(result: Result, specs: Sequence[HeadSpec]) -> Figure:
    """Calibrated token KL, token ECE and survival ECE by draft position, of the best head of each kind of inputs."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (
        ("by_position", "kl", "token KL, nats"),
        ("by_position", "ece", "token ECE"),
        ("survival", "ece", "survival ECE"),
    )
    for axis, (group, metric, title) in zip(axes, panels, strict=True):
        for name in best_heads(result, specs).values():
            values = [entry[metric] for entry in result["heads"][name]["calibrated"][group]]
            axis.plot(range(1, len(values) + 1), values, marker=".", label=name)
        axis.set(xlabel="draft position", title=title, ylim=(0, None))
    axes[0].legend(fontsize=8)
    return figure


def learning_curves(result: Result, specs: Sequence[HeadSpec], *, history: list[dict[str, Any]]) -> Figure:
    """Calibrated KL on dev at each validation, one panel per kind of inputs, with the better signal as a baseline."""
    kinds = by_kind(specs)
    figure = Figure(figsize=(1.2 + 4.2 * len(kinds), 4), layout="constrained")
    axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)
    depths = sorted({spec.shape.depth for spec in specs})
    steps = [entry["step"] for entry in history]
    for axis, (kind, of_kind) in zip(axes[0], kinds.items(), strict=True):
        for spec in of_kind:
            colour = colormaps["viridis"](depths.index(spec.shape.depth) / max(1, len(depths) - 1))
            is_first = spec.reject_weight == min(s.reject_weight for s in specs)
            curve = [entry["calibrated_kl"][specs.index(spec)] for entry in history]
            label = f"depth {spec.shape.depth}" if is_first else None
            axis.plot(steps, curve, color=colour, linewidth=1, label=label)
        signals = result["signals"][of_kind[0].shape.timing]
        name, signal = min(signals.items(), key=lambda item: item[1]["calibrated_kl"])
        axis.axhline(signal["calibrated_kl"], color="black", linestyle="--", linewidth=1, label=f"{name} alone")
        axis.set(xlabel="optimiser steps", title=kind)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("calibrated KL on dev, nats")
    return figure


def _heat(axis: Axes, result: Result, *, specs: Sequence[HeadSpec], metric: str, colours: str) -> None:
    depths = list(dict.fromkeys(spec.shape.depth for spec in specs))
    weights = dict.fromkeys(spec.reject_weight for spec in specs)
    values = [[result["heads"][str(s)][metric] for s in specs if s.shape.depth == depth] for depth in depths]
    least, most = min(map(min, values)), max(map(max, values))
    image = axis.imshow(values, cmap=colours, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            lightness = (value - least) / max(1e-12, most - least)
            is_light = (1 - lightness if colours.endswith("_r") else lightness) > 0.5
            colour = "black" if is_light else "white"
            axis.text(x, y, f"{value:.4f}", ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(len(weights)), [f"{weight:g}" for weight in weights])
    axis.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axis.set(xlabel="reject weight", ylabel="depth")
    axis.figure.colorbar(image, ax=axis)


def _best_by_weight(result: Result, specs: Sequence[HeadSpec]) -> list[HeadSpec]:
    best: dict[float, HeadSpec] = {}
    for spec in specs:
        rival = best.setdefault(spec.reject_weight, spec)
        if result["heads"][str(spec)]["calibrated_kl"] < result["heads"][str(rival)]["calibrated_kl"]:
            best[spec.reject_weight] = spec
    return list(best.values())
