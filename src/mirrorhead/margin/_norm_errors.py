"""What rounding does to norms: the bounds that certificates need, for each norm with a solver."""

from __future__ import annotations

import math

from mirrorhead.geometry import Grouped, Norm, PNorm, Schatten
from mirrorhead.geometry._powers import snap

UNIT = 2.0**-53  # the relative rounding error of one operation
Known = PNorm | Schatten | Grouped


def lengths(norm: Norm, weights: tuple[int, ...]) -> int:
    """Return how many numbers the norm is a p-norm of: entries, singular values or groups."""
    if isinstance(norm, Schatten):
        return min(weights)
    return weights[norm.dim] // norm.size if isinstance(norm, Grouped) else math.prod(weights)


def spread(norm: Norm, weights: tuple[int, ...]) -> float:
    """Return the largest dual norm of weights whose Euclidean norm is 1."""
    assert isinstance(norm, Known)
    return lengths(norm, weights) ** max(0.0, 1 / norm.q - 0.5)


def error_of_entries(norm: Norm, weights: tuple[int, ...]) -> float:
    """Return how much the dual norm changes, relatively, if each entry is rounded.

    Norms of absolute values change in proportion. Of singular values, the dual norm of the error is
    at most k^|1/q - 1/2| times that of the weights, by way of their Euclidean norms.
    """
    return 2 * UNIT * (math.sqrt(min(weights)) if isinstance(norm, Schatten) else 1.0)


def rounding(norm: Norm, weights: tuple[int, ...]) -> float:
    """Return a bound of the relative rounding error of `norm` and `dual_norm` together.

    Singular values are as exact as those of a matrix that differs from the given one by a
    rounding error in each entry, times a constant that LAPACK's own bounds take to be about the
    number of rows and columns. `Schatten` counts those below this error as 0. In the p-norm of k
    singular values, an error of e times the largest one is one of at most k e.
    """
    assert isinstance(norm, Known)
    size, count = math.prod(weights), lengths(norm, weights)
    # `power` rounds exponents to quarters: |d log ||x||_p / dp| is at most log(size) / p^2.
    moved = sum(abs(snap(p) - p) / p for p in (norm.p, norm.q) if p < math.inf)
    bound = 2 * (count + 64) * UNIT + 2 * math.log(count + 1) * moved
    if isinstance(norm, Schatten):
        return bound + 8 * count * (sum(weights) + 64) * UNIT
    # The 2-norms of groups are rounded, too.
    return bound + (2 * (size + 64) * UNIT if isinstance(norm, Grouped) else 0.0)
