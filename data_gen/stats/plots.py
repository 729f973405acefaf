"""The plots of `python -m data_gen stats`: SVIP's Figures 2, 3 and 4 for this pair (definitions in
`data_gen.stats.command`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_gen.stats.positions import Array, Positions, lower_bounds

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d95f02", "#777777"
_NUM_BINS = 20


def draw_all(positions: Positions, summary: dict[str, Any], *, folder: Path, split: str) -> list[Path]:
    """Write every plot as FOLDER/SPLIT-NAME.png; returns the paths."""
    figures = {
        "entropy": draw_entropy(positions, summary),
        "entropy_ratio": draw_ratio(positions, summary),
        "bounds": draw_bounds(positions, summary),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{split}-{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths


def draw_entropy(positions: Positions, summary: dict[str, Any]) -> Figure:
    """Figure 2: draft entropy against acceptance, and against accepted length: mean, quartiles and number of positions
    of each bin.
    """
    figure, axes = _figure(2, "Draft entropy against acceptance")
    for axis, values, label in (
        (axes[0], positions["acceptance_rate"], "acceptance_rate"),
        (axes[1], positions["accepted_length"], "expected accepted length, tokens"),
    ):
        bins = bins_of(positions["entropy"], values)
        axis.fill_between(bins.centres, bins.lower, bins.upper, color=_BLUE, alpha=0.2, lw=0, label="quartiles")
        axis.plot(bins.centres, bins.means, color=_BLUE, marker="o", ms=3, label="mean")
        axis.set(xlabel="H(q), nats (temperature 1)", ylabel=label, ylim=(0, None), xlim=(0, None))
        behind, shares = axis.twinx(), bins.counts / bins.counts.sum()
        behind.fill_between(bins.centres, shares, step="mid", color=_GREY, alpha=0.15, lw=0)
        highest = float(shares.max())
        # three times the height that they need: the shares stay in the lower third, clear of the curve
        behind.set(ylabel="share of positions (grey)", ylim=(0, 3 * highest), yticks=[0, round(highest, 2)])
        behind.spines["top"].set_visible(False)
    grid = np.linspace(0, positions["entropy"].max(), 200)
    axes[0].plot(
        grid,
        np.maximum(0, 1 - np.sqrt(max(summary["c"], 0) * grid)),
        color=_ORANGE,
        ls="--",
        label=f"1 - sqrt({summary['c']:.2f} H)",
    )
    axes[0].set_ylim(0, 1.02)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    return figure


def draw_ratio(positions: Positions, summary: dict[str, Any]) -> Figure:
    """Figure 3: histogram of H(q, p) / H(q), with rho and c."""
    figure, (axis,) = _figure(1, "Cross-entropy over entropy")
    has_entropy = positions["entropy"] > 0.01
    ratio = positions["cross_entropy"][has_entropy] / positions["entropy"][has_entropy]
    highest = float(np.quantile(ratio, 0.97))  # the tail is long; it is drawn as one bar
    axis.hist(np.minimum(ratio, highest), bins=np.linspace(1, max(highest, 1.01), 60).tolist(), color=_BLUE, alpha=0.7)
    rho = summary["rho_ratio_of_means"]
    axis.axvline(rho, color=_ORANGE, label=f"ratio of means {rho:.2f}, so c = {summary['c']:.2f}")
    axis.axvline(
        summary["rho_median"],
        color=_ORANGE,
        ls="--",
        label=f"median {summary['rho_median']:.2f}, so c = {(summary['rho_median'] - 1) / 2:.2f}",
    )
    axis.axvline(1.3, color=_GREY, ls=":", label="SVIP: 1.3, so c = 0.15")
    axis.set(xlabel="H(q, p) / H(q)   (positions with H(q) > 0.01; the last bar holds the top 3 %)", ylabel="positions")
    axis.legend(frameon=False)
    return figure


def draw_bounds(positions: Positions, summary: dict[str, Any]) -> Figure:
    """Figure 4: acceptance_rate against its Pinsker and Bretagnolle-Huber lower bounds; a bound holds above the
    diagonal.
    """
    figure, axes = _figure(2, "Acceptance against its lower bounds")
    rate, bounds = positions["acceptance_rate"], lower_bounds(positions["entropy"], positions["cross_entropy"])
    for axis, (name, bound) in zip(axes, bounds.items(), strict=True):
        axis.hexbin(np.maximum(bound, -0.5), rate, gridsize=50, bins="log", cmap="Blues", mincnt=1, lw=0.1)
        low = -0.5 if name == "pinsker" else 0.0
        axis.plot([low, 1], [low, 1], color=_ORANGE, lw=1)
        share = summary[f"{name}_violations"]
        axis.set(
            xlabel=f"{name.replace('_', '-').title()} bound",
            ylabel="acceptance_rate",
            xlim=(low - 0.03, 1.02),
            ylim=(-0.02, 1.02),
        )
        axis.set_title(f"{share:.2%} of positions below the bound", fontsize=9)
    note = "darker: more positions (logarithmic); Pinsker cut off at -0.5"
    if summary["sampling"] != {"temperature": 1.0, "top_k": None, "top_p": None}:
        sampling = ", ".join(f"{name} {value}" for name, value in summary["sampling"].items() if value is not None)
        note += f"\nacceptance under {sampling}, bounds under temperature 1 without truncation: no law orders the two"
    figure.supxlabel(note, fontsize=8)
    return figure


def bins_of(x: Array, y: Array) -> pd.DataFrame:
    """Mean, quartiles (lower, upper) and count of y over equal-width bins of x, with their centres; bins with under
    five points are left out.
    """
    edges = np.linspace(0, max(float(np.quantile(x, 0.999)), 1e-9), _NUM_BINS + 1)
    index = np.clip(np.digitize(x, edges) - 1, 0, _NUM_BINS - 1)
    groups = [(centre, y[index == number]) for number, centre in enumerate((edges[:-1] + edges[1:]) / 2)]
    filled = [(centre, values) for centre, values in groups if values.size >= 5] or [(float(x.mean()), y)]
    statistics = [(centre, values.mean(), *np.quantile(values, [0.25, 0.75]), values.size) for centre, values in filled]
    return pd.DataFrame(statistics, columns=["centres", "means", "lower", "upper", "counts"])


def _figure(num_axes: int, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(6 * num_axes, 4.2), layout="constrained")
    axes = [figure.add_subplot(1, num_axes, number + 1) for number in range(num_axes)]
    figure.suptitle(title)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes
