"""Lines of many trials: their colours, their medians, and the numbers of a verdict in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mirrorhead.paths.descent import recorded_steps

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#777777"
NORM = r"norm $||W|| / ||W_\mathrm{mm}||$"  # the label of an axis


def median_band(axis: Any, x: Any, values: np.ndarray, **line: Any) -> None:
    """The median over trials, (trials, len(x)), and where the middle 80 % of them are.

    NaN where a trial has no value; x may differ between trials, then its median is taken.
    """
    x = np.asarray(x)
    x = np.nanmedian(x, 0) if x.ndim > 1 else x
    (drawn,) = axis.plot(x, np.nanmedian(values, 0), **line)
    low, high = np.nanquantile(values, (0.1, 0.9), axis=0)
    axis.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)


def listed(values: Iterable[float], form: str = ".2g") -> str:
    """Numbers in a row for a sentence.

    >>> listed([0.38, 0.13])
    '0.38 / 0.13'
    """
    return " / ".join(format(value, form) for value in values)


def of_each(exponents: Sequence[float], words: Iterable[str]) -> str:
    """What is said of each exponent.

    >>> of_each([1.5, 2], ["slope -1.0", "slope -2.0"])
    'p = 1.5: slope -1.0; p = 2: slope -2.0'
    """
    return "; ".join(f"p = {p:g}: {word}" for p, word in zip(exponents, words, strict=True))


def at_a_tenth(steps: int) -> int:
    """The record at a tenth of the steps, where `descend` chose what to record."""
    return int(np.searchsorted(sorted(recorded_steps(steps)), steps / 10))
