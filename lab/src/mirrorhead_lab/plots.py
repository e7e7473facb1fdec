"""How figures look: one palette, one style, and the parts that many figures share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib takes long to import, and most processes draw nothing

#: Okabe and Ito's colours, distinguishable with any colour vision; their yellow is too pale here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5C5C5C")
GREY = "#777777"
NORM = r"norm $||W|| / ||W_\mathrm{mm}||$"  # the label of an axis


def style() -> dict[Any, Any]:
    """Return the settings of matplotlib for all figures, for `matplotlib.rc_context`."""
    from cycler import cycler

    return {
        "svg.fonttype": "path",  # letters look the same on every machine
        "font.size": 10.5,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#5c6370",
        "axes.labelcolor": "#2b303b",
        "axes.titlecolor": "#2b303b",
        "xtick.color": "#5c6370",
        "ytick.color": "#5c6370",
        "xtick.labelcolor": "#2b303b",
        "ytick.labelcolor": "#2b303b",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e4de",
        "grid.linewidth": 0.8,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }


def panels(
    columns: int, rows: int = 1, height: float = 3.4, *, ylabel: str = "", **options: Any
) -> tuple[Figure, Any]:
    """Return a figure as wide as the report, and its axes: (rows, columns); one row: (columns,).

    ylabel: of the first panel in each row.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes[:, 0]:
        axis.set_ylabel(ylabel)
    return figure, axes[0] if rows == 1 else axes


def divergence_panels(
    exponents: Sequence[float], title: str = "p = {:g}", ylabel: str = "divergence to the AttSVM"
) -> tuple[Figure, Any]:
    """Return a panel for each p, to draw divergences against steps."""
    figure, axes = panels(len(exponents), sharey=True, ylabel=ylabel)
    for axis, p in zip(axes, exponents, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="step", title=title.format(p))
    return figure, axes


def mean_band(axis: Any, x: Any, values: np.ndarray, **line: Any) -> None:
    """Draw the mean over trials, (trials, len(x)), and the band of the middle 80 %."""
    _band(axis, x, values.mean(0), values, line)


def median_band(axis: Any, x: Any, values: np.ndarray, **line: Any) -> None:
    """Draw the median over trials, (trials, len(x)), and the band of the middle 80 %.

    A trial is NaN where it has no value. If x differs between trials, its median is used.
    """
    x = np.nanmedian(x, 0) if np.ndim(x) > 1 else x
    _band(axis, x, np.nanmedian(values, 0), values, line)


def legend_below(figure: Figure, *axes: Any, columns: int) -> None:
    """Draw one legend for the lines of these panels, under the panels."""
    found = [axis.get_legend_handles_labels() for axis in axes]
    lines, labels = (list(chain(*part)) for part in zip(*found, strict=True))
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, columnspacing=1.5)


def _band(axis: Any, x: Any, middle: np.ndarray, values: np.ndarray, line: dict[str, Any]) -> None:
    (drawn,) = axis.plot(x, middle, **line)
    low, high = np.nanquantile(values, (0.1, 0.9), axis=0)
    axis.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
