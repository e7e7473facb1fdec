"""Means over seeds, and when two of them are told apart.

Seeds are the sample: the test set is the same for all, so intervals say what another seed would
have changed, not what another test set would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

LEVEL = 0.95

Outcome = Literal["as claimed", "not told apart", "the other way"]


@dataclass(frozen=True)
class Difference:
    """A difference of two means, and the interval that Welch's t gives it at `LEVEL`."""

    value: float
    low: float
    high: float


def spread(values: Sequence[float]) -> float:
    """The sample's standard deviation; 0 for a single value.

    >>> spread([1.0, 2.0, 3.0])
    1.0
    """
    return stdev(values) if len(values) > 1 else 0.0


def welch(one: Sequence[float], two: Sequence[float], level: float = LEVEL) -> Difference:
    """mean(one) - mean(two) with Welch's interval: the two may spread differently.

    d +- t(df) s,  s^2 = a + b,  a = var(one)/n,  b = var(two)/m,
    df = s^4 / (a^2/(n-1) + b^2/(m-1)).

    >>> found = welch([3.0, 4.0, 5.0], [1.0, 1.0, 1.0])
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (3.0, 0.516, 5.484)
    """
    if min(len(one), len(two)) < 2:
        raise ValueError(f"an interval needs at least 2 seeds each, got {len(one)} and {len(two)}")
    from scipy.stats import t

    value = fmean(one) - fmean(two)
    a, b = spread(one) ** 2 / len(one), spread(two) ** 2 / len(two)
    if a + b == 0:
        return Difference(value, value, value)
    share = a / (a + b)  # df does not overflow for tiny variances
    freedom = 1 / (share**2 / (len(one) - 1) + (1 - share) ** 2 / (len(two) - 1))
    half = float(t.ppf((1 + level) / 2, freedom)) * math.sqrt(a + b)
    return Difference(value, value - half, value + half)


def outcome(difference: Difference, margin: float = 0.0) -> Outcome:
    """Whether a difference is above -margin, with the whole interval.

    >>> outcome(Difference(1, 0.5, 1.5)), outcome(Difference(1, -0.5, 2.5))
    ('as claimed', 'not told apart')
    """
    if difference.low > -margin:
        return "as claimed"
    return "the other way" if difference.high < -margin else "not told apart"
