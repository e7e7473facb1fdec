"""What the figures of several experiments have in common."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def panels(columns: int, rows: int = 1, height: float = 3.4, **options: Any) -> tuple[Figure, Any]:
    """A figure of the report's width and its axes, (rows, columns), or (columns,) for one row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes[0] if rows == 1 else axes


def band(axis: Any, x: Any, values: np.ndarray, **line: Any) -> None:
    """The mean over trials, (trials, len(x)), and where the middle 80 % of them are."""
    (drawn,) = axis.plot(x, values.mean(0), **line)
    low, high = np.quantile(values, (0.1, 0.9), axis=0)
    axis.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)


def legend_below(figure: Figure, *axes: Any, columns: int) -> None:
    """The lines of these panels, explained once for all, under the panels."""
    found = [axis.get_legend_handles_labels() for axis in axes]
    lines, labels = (list(chain(*part)) for part in zip(*found, strict=True))
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, columnspacing=1.5)
