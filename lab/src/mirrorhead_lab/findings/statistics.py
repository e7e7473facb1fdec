"""Differences of means over seeds, and when two means are distinguishable.

Seeds are the sample. The test set is the same for all runs, so an interval says how much other
seeds would have changed, not how much another test set would have.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

LEVEL = 0.95
NOT_DECIDED = (
    "These runs do not decide it: the intervals that are not as claimed contain both answers."
)

Outcome = Literal[
    "as claimed", "not distinguishable", "worse, perhaps by less than allowed", "the other way"
]


@dataclass(frozen=True)
class Difference:
    """A difference of two means, and its interval by Welch's t at `LEVEL`."""

    value: float
    low: float
    high: float


def welch(one: Sequence[float], two: Sequence[float], level: float = LEVEL) -> Difference:
    """Return mean(one) - mean(two) with Welch's interval, for samples of unequal variances.

    >>> found = welch([3.0, 4.0, 5.0], [1.0, 1.0, 1.0])
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (3.0, 0.516, 5.484)
    """
    if min(len(one), len(two)) < 2:
        raise ValueError(f"an interval needs at least 2 seeds each, got {len(one)} and {len(two)}")
    from scipy.stats import ttest_ind

    value = fmean(one) - fmean(two)
    if len(set(one)) == len(set(two)) == 1:  # no variance: t is 0/0
        return Difference(value, value, value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)  # nearly equal values
        interval = ttest_ind(one, two, equal_var=False).confidence_interval(level)
    return Difference(value, float(interval.low), float(interval.high))


def paired(one: Sequence[float], two: Sequence[float], level: float = LEVEL) -> Difference:
    """Return mean(one) - mean(two) with Student's interval, for two values of the same runs.

    >>> found = paired([1.1, 2.1, 3.4], [1.0, 2.0, 3.0])
    >>> round(found.value, 3), round(found.low, 3), round(found.high, 3)
    (0.2, -0.23, 0.63)
    """
    if len(one) < 2:
        raise ValueError(f"an interval needs at least 2 seeds, got {len(one)}")
    from scipy.stats import ttest_1samp

    differences = [a - b for a, b in zip(one, two, strict=True)]
    value = fmean(differences)
    if len(set(differences)) == 1:  # no variance: t is 0/0
        return Difference(value, value, value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)  # nearly equal values
        interval = ttest_1samp(differences, 0.0).confidence_interval(level)
    return Difference(value, float(interval.low), float(interval.high))


def outcome(difference: Difference, margin: float = 0.0) -> Outcome:
    """Say whether a difference is above -margin, with the whole interval.

    >>> outcome(Difference(1, 0.5, 1.5)), outcome(Difference(1, -0.5, 2.5))
    ('as claimed', 'not distinguishable')
    >>> outcome(Difference(-1, -1.5, -0.5), margin=1.2)
    'worse, perhaps by less than allowed'
    """
    if difference.low > -margin:
        return "as claimed"
    if difference.high < -margin:
        return "the other way"
    return "worse, perhaps by less than allowed" if difference.high < 0 else "not distinguishable"
