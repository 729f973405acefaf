"""One figure of three panels: SVIP's Figures 2, 3 and 4 for this pair (definitions in `data_gen.stats`)."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

Positions = dict[str, NDArray[np.float64]]

_BLUE, _ORANGE = "#1f5fa8", "#d95f02"
_NUM_BINS, _FEWEST = 20, 5


def draw(positions: Positions, summary: dict[str, Any], path: Path) -> None:
    """Write the figure as a PNG; `positions` also has the Bretagnolle-Huber `bound`."""
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    axes = [figure.add_subplot(1, 3, number) for number in (1, 2, 3)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    _draw_entropy(axes[0], positions, summary["c"])
    _draw_ratio(axes[1], positions, summary)
    _draw_bound(axes[2], positions, summary["bretagnolle_huber_violations"])
    if summary["sampling"] != {"temperature": 1.0, "top_k": None, "top_p": None}:
        sampling = ", ".join(f"{name} {value}" for name, value in summary["sampling"].items() if value is not None)
        figure.supxlabel(f"acceptance under {sampling}; entropies and bounds at temperature 1", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_entropy(axis: Axes, positions: Positions, c: float) -> None:
    """Acceptance by draft entropy: mean and quartiles of equal-width bins."""
    x, y = positions["entropy"], positions["acceptance_rate"]
    edges = np.linspace(0, max(float(np.quantile(x, 0.999)), 1e-9), _NUM_BINS + 1)
    index = np.clip(np.digitize(x, edges) - 1, 0, _NUM_BINS - 1)
    filled = [number for number in range(_NUM_BINS) if (index == number).sum() >= _FEWEST]
    centres = ((edges[:-1] + edges[1:]) / 2)[filled]
    lower, upper = (np.array([np.quantile(y[index == number], share) for number in filled]) for share in (0.25, 0.75))
    axis.fill_between(centres, lower, upper, color=_BLUE, alpha=0.2, lw=0, label="quartiles")
    axis.plot(centres, [y[index == number].mean() for number in filled], color=_BLUE, marker="o", ms=3, label="mean")
    grid = np.linspace(0, x.max(), 200)
    svip = np.maximum(0, 1 - np.sqrt(max(c, 0) * grid))
    axis.plot(grid, svip, color=_ORANGE, ls="--", label=f"1 - sqrt({c:.2f} H)")
    axis.set(title="Acceptance by draft entropy", xlabel="H(q), nats", ylabel="acceptance_rate", ylim=(0, 1.02))
    axis.legend(frameon=False)


def _draw_ratio(axis: Axes, positions: Positions, summary: dict[str, Any]) -> None:
    has_entropy = positions["entropy"] > 0.01
    ratio = positions["cross_entropy"][has_entropy] / positions["entropy"][has_entropy]
    highest = float(np.quantile(ratio, 0.97))  # the tail is long; it is drawn as one bar
    axis.hist(np.minimum(ratio, highest), bins=np.linspace(1, max(highest, 1.01), 60).tolist(), color=_BLUE, alpha=0.7)
    rho = summary["rho_ratio_of_means"]
    axis.axvline(rho, color=_ORANGE, label=f"ratio of means {rho:.2f}, so c = {summary['c']:.2f}")
    axis.axvline(1.3, color="#777777", ls=":", label="SVIP: 1.3, so c = 0.15")
    axis.set(title="Cross-entropy over entropy", xlabel="H(q, p) / H(q), where H(q) > 0.01", ylabel="positions")
    axis.legend(frameon=False)


def _draw_bound(axis: Axes, positions: Positions, share: float) -> None:
    """Acceptance against its Bretagnolle-Huber lower bound, which holds above the diagonal."""
    axis.hexbin(
        positions["bound"], positions["acceptance_rate"], gridsize=50, bins="log", cmap="Blues", mincnt=1, lw=0.1
    )
    axis.plot([0, 1], [0, 1], color=_ORANGE, lw=1)
    axis.set(
        title=f"{share:.2%} of positions below the bound", xlabel="Bretagnolle-Huber bound", ylabel="acceptance_rate"
    )
