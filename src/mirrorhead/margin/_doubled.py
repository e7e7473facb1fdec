r"""A w and A' lam in about twice the precision of float64, for what float64 would cancel away.

A number is a pair (high, low) that stands for high + low. Matrices are multiplied in slices: the
rows of x and the columns of y are cut into parts of so few bits that the products of two parts
are exact in float64, whatever the order of summation; then the parts are summed as pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mirrorhead.margin._constraints import Constraints

Pair = tuple[Tensor, Tensor]
SLICES = 4


def values(problem: Constraints, index: Tensor, w: Tensor) -> tuple[Tensor, float]:
    """A w of the problems `index`, and a factor of ||row||_2 ||w||_2 that bounds its error.

    w: (K, N) for K problems. Returns (K, m), rounded to float64, which is not in the bound.
    """
    left, right, rows, queries = _normalised(problem, index)
    K, n, _, a = left[0].shape
    size = _exponent(w, -1)
    W = _shift(w, -size).view(K, a, -1)
    image = _product((right, torch.zeros_like(right)), (W.mT, torch.zeros_like(W.mT)))
    image = (image[0].view(K, n, a, 1), image[1].view(K, n, a, 1))  # W right_i
    high, low = _product(left, image)
    found = (high + low).squeeze(-1)
    exponent = rows + queries.unsqueeze(-1) + size.unsqueeze(-1)
    return _shift(found, exponent).flatten(1), _error(a) + _error(right.shape[-1])


def pulled(problem: Constraints, index: Tensor, lam: Tensor) -> tuple[Tensor, float]:
    """A' lam of the problems `index`, and a factor of sum lam ||row||_2 that bounds its error.

    lam: (K, m). Returns (K, a, c), rounded to float64, which is not in the bound; the bound is
    one of the Euclidean norm.
    """
    left, right, rows, queries = _normalised(problem, index)
    K, n, R, a = left[0].shape
    exponent = rows + queries.unsqueeze(-1)
    # Multipliers times row norms: these, unlike multipliers, are comparable within a problem.
    size = (_exponent(lam, -1).unsqueeze(-1) + exponent).amax((-2, -1), keepdim=True)
    weights = _shift(lam.view(K, n, R), exponent - size).unsqueeze(-2)
    high, low = _product((weights, torch.zeros_like(weights)), left)
    pulled = (high.view(K, n, a).mT, low.view(K, n, a).mT)
    high, low = _product(pulled, (right, torch.zeros_like(right)))
    c = right.shape[-1]
    return _shift(high + low, size), math.sqrt(a * c) * 4 * (_error(R) + _error(n))


def _normalised(problem: Constraints, index: Tensor) -> tuple[Pair, Tensor, Tensor, Tensor]:
    """The exact factors of A with entries up to 1, and the exponents of 2 taken out of them."""
    left, right = problem.A.left[index], problem.A.right[index]
    rest = torch.zeros_like(left) if problem.rest is None else problem.rest(index)
    rows, queries = _exponent(left, -1), _exponent(right, -1)
    pair = _shift(left, -rows), _shift(rest, -rows)
    return pair, _shift(right, -queries), rows.squeeze(-1), queries.squeeze(-1)


def _product(x: Pair, y: Pair) -> Pair:
    """x @ y; an entry is wrong by at most `_error` times the largest |x| and |y| of its sum."""
    bits = _bits(x[0].shape[-1])
    left, right = _slices(x, -1, bits), _slices(y, -2, bits)
    high = low = torch.zeros(())
    for order in reversed(range(SLICES)):  # the smallest first; those beyond do not matter
        for k in range(order + 1):
            high, error = two_sum(high, left[k] @ right[order - k])
            low = low + error
    return two_sum(high, low)


def _error(terms: int) -> float:
    """The relative error of a product in slices, for sums of this number of terms."""
    return 4 * (SLICES + 3) * terms * 2.0 ** (-SLICES * _bits(terms))


def _bits(terms: int) -> int:
    """How many bits two factors may have so that a sum of products is exact."""
    return (53 - math.ceil(math.log2(terms))) // 2


def _slices(x: Pair, dim: int, bits: int) -> list[Tensor]:
    """Parts of x with few bits: multiples of 2^(e - bits), 2^(e - 2 bits), ... for |x| < 2^e."""
    high, low = x
    place = _exponent(high, dim) - bits
    parts = []
    for _ in range(SLICES):
        shift = _shift(torch.full_like(high.select(dim, 0).unsqueeze(dim), 1.5), place + 52)
        part = (high + shift) - shift
        parts.append(part)
        high, low = two_sum(high - part, low)
        place = place - bits
    return parts


def two_sum(x: Tensor, y: Tensor) -> Pair:
    """x + y as a pair, exactly."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _exponent(x: Tensor, dim: int) -> Tensor:
    """The least e with |x| < 2^e along a dimension, which stays with size 1; 0 where x = 0."""
    return torch.frexp(x.abs().amax(dim, keepdim=True)).exponent


def _shift(x: Tensor, exponent: Tensor) -> Tensor:
    """x 2^exponent, in two factors: one alone may be out of range where the result is not."""
    half = torch.div(exponent, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(x, half), exponent - half)
