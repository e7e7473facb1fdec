"""a**e in float32 from two polynomials, for kernels that a compiler vectorises.

torch.pow costs 3 to 5 times a pass over memory. Here log2 and exp2 are each one
polynomial on a small interval, the exponent bits of the number doing the rest:

    a = 2^n (1+f), 1+f in [sqrt(1/2), sqrt(2)):  log2(a) = n + f P(f)
    y = e log2(a) = m + r, |r| <= 1/2:           a^e     = 2^m (1 + r Q(r))

The relative error is at most (4 + 2e + |e log2 a|) 2^-23, about that of exp2(e*log2(a)).
Results below the smallest normal number are 0, above 2^127.5 inf; a = 1 gives 1 to the bit.
A root of a subnormal number is that of 2^64 a, times 2^(-64 e): it is far from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_SQRT_HALF_BITS = 0x3F3504F3  # float32 bits of sqrt(1/2)
_EXPONENT_MASK = -(2**23)
_ROUNDER, _ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
_SMALLEST_NORMAL = 2.0**-126


def fast_power(a: Tensor, exponent: float) -> Tensor:
    """a**exponent for float32 a >= 0 and exponent > 0.

    >>> fast_power(torch.tensor([0.0, 1.0, 8.0]), 1 / 3)
    tensor([0., 1., 2.])
    """
    small = a < _SMALLEST_NORMAL
    if exponent < 1:
        a = torch.where(small, a * 2.0**64, a)
    bits = a.view(torch.int32)
    n = (bits - _SQRT_HALF_BITS) & _EXPONENT_MASK  # 2^23 times the n above
    f = (bits - n).view(torch.float32) - 1.0
    y = exponent * (n.to(torch.float32) * 2.0**-23 + f * _horner(_LOG2, f))
    y = y.clamp(-127.0, 128.0)  # 2^-127 and 2^128 are written as the bits of 0 and inf
    # Adding 1.5 * 2^23 rounds to a whole number and leaves it in the lowest bits: round,
    # conversion and shift as such are five times slower in the code that torch generates.
    rounder = y + _ROUNDER
    fraction = y - (rounder - _ROUNDER)
    exponent_bits = (rounder.view(torch.int32) + (127 - _ROUNDER_BITS)) * 2**23
    result = exponent_bits.view(torch.float32) * (1.0 + fraction * _horner(_EXP2, fraction))
    if exponent < 1:
        result = torch.where(small, result * 2.0 ** (-64 * exponent), result)
    return torch.where(a < _SMALLEST_NORMAL, 0.0, result)


def _horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    total = coefficients[-1] * x + coefficients[-2]
    for c in coefficients[-3::-1]:
        total = total * x + c
    return total


def _fit(
    f: Callable[[np.ndarray], np.ndarray], low: float, high: float, degree: int
) -> tuple[float, ...]:
    """Coefficients of the Chebyshev interpolant of f, lowest power first."""
    # An even number of nodes, so that none falls on the removable singularity at 0.
    nodes = np.cos(np.pi * (np.arange(400) + 0.5) / 400) * (high - low) / 2 + (high + low) / 2
    fit = np.polynomial.chebyshev.Chebyshev.fit(nodes, f(nodes), degree, domain=[low, high])
    return tuple(float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef)


# P and Q, with relative errors of 3e-8 and 2e-8.
_LOG2 = _fit(lambda f: np.log1p(f) / (f * np.log(2)), 2**-0.5 - 1, 2**0.5 - 1, degree=8)
_EXP2 = _fit(lambda r: np.expm1(r * np.log(2)) / r, -0.5, 0.5, degree=5)
