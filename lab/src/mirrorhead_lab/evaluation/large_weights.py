"""Figure 8's count of large weights, from a threshold that fits the width of the model."""

from __future__ import annotations

from collections.abc import Callable

from mirrorhead_lab.evaluation.results import ComparisonResults, RunResults
from mirrorhead_lab.evaluation.sparsity import LARGE, WIDTH, large_from
from mirrorhead_lab.training.presets import PRESETS


def threshold(study: ComparisonResults) -> float:
    """Return the size from which weights count as large: for texts, that of the model's width.

    Figure 8 is about the text models. Images keep the paper's 0.06, at which results are exact.
    """
    if study.data != "imdb" or study.preset not in PRESETS:
        return LARGE
    return large_from(PRESETS[study.preset].model.dim)


def counted(study: ComparisonResults, kind: str) -> Callable[[RunResults], float]:
    """Return the count of large weights of a kind: exact at 0.06, else from the histogram."""
    size = threshold(study)
    if size == LARGE:
        return lambda run: run.measures.weights[kind].large
    return lambda run: run.measures.weights[kind].histogram.count_from(size)


def explained(study: ComparisonResults) -> str:
    """Say which weights are counted, and how exactly."""
    size = threshold(study)
    if size == LARGE:
        return f"how many are {LARGE} and above in size (Figure 8)"
    return (
        f"how many are {size:.3f} and above in size (Figure 8's {LARGE} in models {WIDTH} wide,"
        " scaled to this width as initial weights are; interpolated in histograms of 60 bins)"
    )
