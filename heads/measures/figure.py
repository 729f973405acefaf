"""One style for all figures: PNG for trainings; SVG for evaluations, which takes the colours of the page around it."""

import io
import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GREY = "#98a2b3"
_LONG = 22
"""Longest label, in characters, of which two fit side by side."""
INK = "#1d2431"
"""Text colour of a PNG; an SVG takes that of the page around it."""
_BOTH_SCHEMES = (
    "<style>svg{color:#1d2430}@media(prefers-color-scheme:dark){svg{color:#e3e8f0}}text{fill:currentColor}</style>"
)
_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "legend.frameon": False,
}


class Plot(NamedTuple):
    """A drawn figure."""

    name: str
    caption: str
    svg: str

    def of(self, dataset: str) -> "Plot":
        """The same, with the name of the dataset."""
        return self._replace(name=f"{self.name}-{dataset}", caption=f"{dataset}: {self.caption}")


def figure_of(height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, whose text stays readable on a page of 420 pixels."""
    figure, (axes,) = panels_of(1, width=4.4, height=height)
    return figure, axes


def panels_of(columns: int, *, width: float, height: float, rows: Sequence[int] = (1,)) -> tuple[Figure, list[Axes]]:
    """A figure with `columns` pairs of axes in each row; `rows`: their relative heights. Sizes in inches. Rows share
    their x axis within a column, and columns their y axis within a row, if there are several rows.
    """
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        shared: Any = ("col", "row") if len(rows) > 1 else (False, False)
        grid = figure.subplots(
            len(rows), columns, sharex=shared[0], sharey=shared[1], squeeze=False, height_ratios=rows
        )
    panels = list(grid.flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, panels


def draw_bins(
    above: Axes, below: Axes, bins: Mapping[str, Mapping[str, np.ndarray]], *, lines: Sequence[str] = ()
) -> None:
    """Draw predictions against what came true, and below it how many tokens each bin has, on a logarithmic axis.

    Args:
        above: axes of the predictions.
        below: axes of the counts.
        bins: label -> `predicted` (mean), `true` (share) and `count` of each bin; empty bins are left out.
        lines: a line style for each label.
    """
    above.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    for (label, of_label), line in zip(bins.items(), lines or ["-"] * len(bins), strict=True):
        has_tokens = of_label["count"] > 0
        predicted, true, count = (of_label[name][has_tokens] for name in ("predicted", "true", "count"))
        (drawn,) = above.plot(predicted, true, line, marker="o", markersize=3, label=label)
        below.plot(predicted, count, line, marker="o", markersize=3, color=drawn.get_color())
    above.set(xlim=(0, 1), ylim=(0, 1))
    below.set(yscale="log", ylabel="tokens")
    below.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.5)


def add_legend(figure: Figure, axes: Axes) -> None:
    """A legend of the labels of these axes below the figure, which grows by it."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, labels)) > _LONG else 2
    figure.set_figheight(figure.get_figheight() + 0.19 * ceil(len(labels) / columns) + 0.1)
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        # "outside" makes room for it below the axis' own label, where it covers no data
        figure.legend(handles, labels, loc="outside lower center", fontsize=9, ncols=columns)


def plot_of(name: str, caption: str, figure: Figure, **settings: Any) -> Plot:
    """The figure as SVG, the same bytes for the same figure; with settings of its first axes, and a legend of their
    labels below unless they have one.
    """
    axes = figure.axes[0]
    axes.set(**settings)
    if axes.get_legend_handles_labels()[1] and axes.get_legend() is None:
        add_legend(figure, axes)
    buffer = io.StringIO()
    # Ids inside an SVG are random unless they are salted, and the date would differ from run to run.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    # The page embeds the drawing, so the XML prologue before <svg goes.
    text = re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(rf"{INK}|#000000", "currentColor", text).replace("<defs>", f"{_BOTH_SCHEMES}<defs>", 1)
    return Plot(name, caption, text)
