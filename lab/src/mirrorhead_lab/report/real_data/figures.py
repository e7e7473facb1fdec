"""The figures of a study, one function each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mirrorhead_lab.evaluation.large_weights import threshold
from mirrorhead_lab.evaluation.results import KINDS, SHARES, ComparisonResults, Histogram
from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, mean_band, panels

CAPTIONS = {
    "accuracy": "Test accuracy of all final runs: a dot for each seed, a line at the mean.",
    "pruned": "Test accuracy against the share of weights set to 0, without retraining: mean, and"
    " where the middle 80 % of the seeds are.",
    "weights": "Sizes of the weights of W_K, W_Q and W_V, with the first seed, and a dot at the"
    " largest (Figure 8); to the right of the dotted line they count as large.",
    "equal-training": "Test accuracy along training, against training accuracy, interpolated"
    " between epochs: mean over the seeds that came so far, and where the middle 80 % of them are.",
    "selection": "How well the tokens that people point at are found (AUPRC): a dot for each seed,"
    " full for attention, hollow for gradient × input; the dashed line is random.",
}
#: Whose weights are drawn: more lines hide each other.
SHOWN = ("MD p=1.1", "MD p=2", "MirrorAdam p=1.1", "AdamW")


def drawings(study: ComparisonResults) -> tuple[PartFigure, ...]:
    """All figures of a study."""
    left_out = {"equal-training": not study.to_the_end, "selection": not study.random_eraser}
    return tuple(
        PartFigure(f"{study.name}-{name}-figure", caption, partial(DRAW[name], study))
        for name, caption in CAPTIONS.items()
        if not left_out.get(name)
    )


def accuracy(study: ComparisonResults) -> Figure:
    """Every final run as a dot."""
    optimizers = study.trained[::-1]
    figure, (axis,) = panels(1, height=1.1 + 0.36 * len(optimizers))
    for k, optimizer in enumerate(optimizers):
        _dots(axis, 100 * np.array(optimizer.values(lambda run: run.test_accuracy)), k, COLOURS[0])
    _rows(axis, [optimizer.name for optimizer in optimizers])
    axis.set(xlabel="test accuracy, %")
    return figure


def equal_training(study: ComparisonResults) -> Figure:
    """Test accuracy against training accuracy, at the milestones."""
    figure, (axis,) = panels(1, height=4.2)
    for k, optimizer in enumerate(study.trained):
        measures = [run.measures for run in optimizer.runs]
        levels = sorted({level for one in measures for level in one.milestones if level})
        found = [[one.test_accuracy_at(level) for one in measures] for level in levels]
        values = [[100 * value for value in some if value is not None] for some in found]
        x = [100 * level for level in levels]
        low, high = ([np.quantile(some, q) for some in values] for q in (0.1, 0.9))
        colour = COLOURS[k % len(COLOURS)]
        axis.plot(x, [np.mean(some) for some in values], "o-", color=colour, label=optimizer.name)
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="training accuracy, %", ylabel="test accuracy, %")
    legend_below(figure, axis, columns=4)
    return figure


def pruning(study: ComparisonResults) -> Figure:
    """Accuracy against the share of weights that are set to 0."""
    figure, (axis,) = panels(1, height=4.2)
    for k, optimizer in enumerate(study.trained):
        rows = [[r.test_accuracy, *(r.measures.pruned[s] for s in SHARES)] for r in optimizer.runs]
        line = {"color": COLOURS[k % len(COLOURS)], "linestyle": ("-", "--")[k // len(COLOURS)]}
        # Equal distances: 90 and 95 % are what one wants to tell apart.
        mean_band(axis, range(5), 100 * np.array(rows), label=optimizer.name, marker="o", **line)
    axis.set(xlabel="weights set to 0, %", ylabel="test accuracy, %")
    axis.set_xticks(range(5), ["0", *(f"{100 * share:g}" for share in SHARES)])
    legend_below(figure, axis, columns=3)
    return figure


def weights(study: ComparisonResults) -> Figure:
    """Histograms of the sizes of attention's weights."""
    figure, axes = panels(3, height=3.6, sharey=True)
    optimizers = [one for one in study.trained if one.name in SHOWN] or study.trained[:4]
    for axis, kind in zip(axes, KINDS, strict=True):
        for k, optimizer in enumerate(optimizers):
            edges, density = sizes(optimizer.runs[0].measures.weights[kind].histogram)
            line = {"color": COLOURS[k % len(COLOURS)], "label": optimizer.name}
            seen = np.where(density > 0, density, np.nan)  # 0 has no place on a log axis
            axis.stairs(seen, edges, baseline=None, linewidth=1.5, **line)
            axis.plot(edges[-1], density[-1], "o", color=line["color"], markersize=4, clip_on=False)
        axis.axvline(threshold(study), color="#5c6370", linestyle=":", linewidth=1)
        axis.set(yscale="log", xlabel="size of a weight", title=f"W_{kind[0].upper()}")
    axes[0].set_ylabel("share of weights\nper unit of size")
    legend_below(figure, axes[0], columns=4)
    return figure


def sizes(histogram: Histogram) -> tuple[np.ndarray, np.ndarray]:
    """Return the histogram of |w| from that of w, as a density: edges from 0, one value per bin.

    >>> histogram = Histogram((-2.0, -1.0, 0.0, 1.0, 2.0), (1, 2, 4, 1))
    >>> sizes(histogram)
    (array([0., 1., 2.]), array([0.75, 0.25]))
    """
    edges, counts = np.array(histogram.edges), np.array(histogram.counts, dtype=float)
    half = len(counts) // 2
    both = counts[half:] + counts[:half][::-1]
    edges = edges[half:]
    return edges, both / max(both.sum(), 1) / np.diff(edges)


def selection(study: ComparisonResults) -> Figure:
    """AUPRC of attention and of gradient x input beside random, on the three sets."""
    sets = {
        "ERASER val": ("eraser", "val"),
        "ERASER test": ("eraser", "test"),
        "edits, test": ("cad", "test"),
    }
    optimizers = study.trained[::-1]
    figure, axes = panels(3, height=1.3 + 0.36 * len(optimizers), sharey=True)
    for axis, (title, (part, split)) in zip(axes, sets.items(), strict=True):
        for k, optimizer in enumerate(optimizers):
            found = [getattr(run.measures, part)[split] for run in optimizer.runs]
            for scorer, colour in (("gradient", COLOURS[1]), ("attention", COLOURS[0])):
                scores = np.array([scores[scorer].auprc for scores in found])
                _dots(axis, scores, k, colour, hollow=scorer == "gradient")
        chance = getattr(study.baselines["random"], part)[split].auprc
        axis.axvline(chance, color="#5c6370", linestyle="--", linewidth=1.2)
        axis.set(title=title, xlabel="AUPRC")
    _rows(axes[0], [optimizer.name for optimizer in optimizers])
    return figure


def _dots(axis: Any, values: np.ndarray, row: int, colour: str, *, hollow: bool = False) -> None:
    """A dot for each value, and a line at their mean."""
    face = "none" if hollow else colour
    axis.plot(values, np.full(len(values), row), "o", color=colour, markerfacecolor=face, alpha=0.8)
    axis.plot([values.mean()] * 2, [row - 0.32, row + 0.32], color=colour, linewidth=2)


def _rows(axis: Any, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.6, len(names) - 0.4)


DRAW: dict[str, Callable[[ComparisonResults], Figure]] = {
    "accuracy": accuracy,
    "pruned": pruning,
    "weights": weights,
    "equal-training": equal_training,
    "selection": selection,
}
