"""One style for every figure under decode/."""

import io
import re
from math import ceil
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GREY = "#98a2b3"
_LONG = 22
"""Longest label, in characters, of which two fit side by side."""
INK = "#123456"
"""Placeholder for the text colour while a figure is drawn; the SVG takes the colour of the page around it."""
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


def panels_of(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with `count` pairs of axes side by side; sizes in inches."""
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, panels


def plot_of(name: str, caption: str, figure: Figure, **settings: Any) -> Plot:
    """The figure as SVG, the same bytes for the same figure; with settings of its axes, and a legend of labels
    below.
    """
    if settings:
        figure.axes[0].set(**settings)
        if labels := figure.axes[0].get_legend_handles_labels()[1]:
            columns = 1 if max(map(len, labels)) > _LONG else 2
            figure.set_figheight(figure.get_figheight() + 0.19 * ceil(len(labels) / columns) + 0.1)
            with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
                # "outside" makes room for it below the axis' own label, where it covers no data
                figure.legend(loc="outside lower center", fontsize=9, ncols=columns)
    buffer = io.StringIO()
    # Ids inside an SVG are random unless they are salted, and the date would differ from run to run.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    # The page embeds the drawing, so the XML prologue before <svg goes.
    text = re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(rf"{INK}|#000000", "currentColor", text).replace("<defs>", f"{_BOTH_SCHEMES}<defs>", 1)
    return Plot(name, caption, text)
