"""The p-norm and its potential psi(w) = (1/p) ||w||_p^p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mirrorhead.geometry._base import Norm, Separable
from mirrorhead.geometry._powers import (
    Dims,
    all_dims,
    check_exponent,
    dual_exponent,
    in_wide,
    inverse_exponent,
    lp_norm,
    plain_power,
    smooth_power,
)


class PNorm(Norm, Separable):
    r"""The p-norm, and for 1 < p < inf its potential :math:`\psi(w) = \frac1p \sum_i |w_i|^p`.

    The gradient of psi is the mirror map u = sign(w)|w|^(p-1); the inverse map is
    w = sign(u)|u|^(1/(p-1)); q = p/(p-1) is the dual exponent, and
    ||mirror(w)||_q = ||w||_p^(p-1).

    Every method takes tensors of any floating dtype and shape. Reductions run over `dims`
    (all dimensions by default), so leading dimensions can be a batch. Half precision is
    computed in float32. Norms divide by the largest entry first, so they neither overflow nor
    underflow. Divergences are sums of non-negative terms, each computed without cancellation, so
    they stay accurate for points 1e-12 apart.

    Args:
        p: from 1 to inf. At 1 and inf it is a norm only.

    >>> psi = PNorm(3)
    >>> w = torch.tensor([1.0, -2.0])
    >>> psi.mirror(w)
    tensor([ 1., -4.])
    >>> psi.inverse(psi.mirror(w))
    tensor([ 1., -2.])
    >>> psi.q, psi.value(w)
    (1.5, tensor(3.))
    """

    def __init__(self, p: float) -> None:
        self.p = check_exponent(p)
        self.q = dual_exponent(self.p)

    def __repr__(self) -> str:
        return f"PNorm({self.p:g})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PNorm) and other.p == self.p

    def __hash__(self) -> int:
        return hash((PNorm, self.p))

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    @property
    def dual(self) -> PNorm:
        return PNorm(self.q)

    def norm(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return ||w||_p, safe for entries of any size: `PNorm(3).norm` of 1e200 is 1e200.

        >>> PNorm(3).norm(torch.full((2, 8), 1e200, dtype=torch.float64), dims=-1)
        tensor([2.0000e+200, 2.0000e+200], dtype=torch.float64)
        """
        return in_wide(lambda x: lp_norm(x, self.p, dims), w)

    def dual_norm(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return ||u||_q with q = p/(p-1)."""
        return in_wide(lambda x: lp_norm(x, self.q, dims), u)

    def steepest(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return sign(u) (|u| / ||u||_q)^(q-1); at p = 1 one largest entry, at p = inf the signs.

        >>> PNorm(1).steepest(torch.tensor([1.0, -3.0, 2.0]))
        tensor([ 0., -1.,  0.])
        """
        if self.p == math.inf:
            return u.sign()
        if self.p == 1:
            return in_wide(lambda x: _largest_alone(x, all_dims(x, dims)), u)

        def direction(x: Tensor) -> Tensor:
            size = lp_norm(x, self.q, dims, keepdim=True)
            safe = torch.where(size > 0, size, torch.ones_like(size))
            return smooth_power(x / safe, inverse_exponent(self.p))  # pyright: ignore

        return in_wide(direction, u)

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the gradient of the potential, u = sign(w)|w|^(p-1), entry by entry."""
        self._check_potential()
        return in_wide(lambda x: smooth_power(x, self.p - 1), w)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the inverse of `mirror`, w = sign(u)|u|^(1/(p-1)), entry by entry."""
        self._check_potential()
        return in_wide(lambda x: smooth_power(x, inverse_exponent(self.p)), u)

    def curvature(self, w: Tensor) -> Tensor:
        """Return (p-1) |w|^(p-2), entry by entry."""
        self._check_potential()
        return in_wide(lambda x: (self.p - 1) * x.abs().pow(self.p - 2), w)

    def entry_value(self, w: Tensor) -> Tensor:
        """Return |w|^p / p, entry by entry."""
        self._check_potential()
        return plain_power(w.abs(), self.p) / self.p

    def entry_divergence(self, w: Tensor, v: Tensor) -> Tensor:
        """Return what each entry adds to the divergence.

        >>> v = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> PNorm(2).divergence(v + 1e-12, v)  # 1/2 ||w - v||^2
        tensor(1.0002e-24, dtype=torch.float64)
        """
        self._check_potential()
        return entry_divergence(w, v, self.p)

    def _check_potential(self) -> None:
        if self.p in (1, math.inf):
            raise ValueError(
                f"{self!r} is a norm, not a potential: p must be finite and greater than 1."
                " Steepest descent takes any norm"
            )


def _largest_alone(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the sign of the first largest entry over `dims`, and 0 elsewhere."""
    last = x.movedim(dims, tuple(range(-len(dims), 0)))
    flat = last.flatten(-len(dims)) if dims else last.unsqueeze(-1)
    place = flat.abs().argmax(-1, keepdim=True)
    alone = torch.zeros_like(flat).scatter(-1, place, flat.gather(-1, place).sign())
    return alone.reshape(last.shape).movedim(tuple(range(-len(dims), 0)), dims)


def entry_divergence(a: Tensor, b: Tensor, p: float) -> Tensor:
    """d(a, b) = |a|^p/p - |b|^p/p - sign(b)|b|^(p-1) (a - b), entry by entry.

    Everything is measured by the larger of |a| and |b|, called c, and by the relative
    distance e in [-1, 0] from it to the other one:

        |b| >= |a|, a = b(1+e):  d = |b|^p [ (1+e)E - (p-1)e ] / p,   E = (1+e)^(p-1) - 1
        |a| >  |b|, b = a(1+e):  d = |a|^p [ (p-1)/p F - E ],         F = (1+e)^p - 1

    Both brackets lose digits as e -> 0, where their power series take over. Entries of
    opposite sign give a sum of three positive terms.
    """
    size_a, size_b = a.abs(), b.abs()
    b_larger = size_b >= size_a
    c = torch.where(b_larger, b, a)
    opposite = a.sign() * b.sign() < 0
    apart = opposite | (c == 0)
    safe = torch.where(apart, torch.ones_like(c), c)
    e = torch.where(apart, torch.zeros_like(c), torch.where(b_larger, a - b, b - a)) / safe

    near = e.abs() * (p + 1) < 0.1
    small = torch.where(near, e, torch.zeros_like(e))
    # a at distance 0 from c has been kept out of `far` so that log1p and its slope are finite.
    far = torch.where(near, torch.full_like(e, -0.5), e)
    log = torch.log1p(far.clamp_min(-1 + torch.finfo(e.dtype).eps / 2))
    gain = torch.where(far <= -1, -torch.ones_like(far), torch.expm1((p - 1) * log))
    gain_p = torch.where(far <= -1, -torch.ones_like(far), torch.expm1(p * log))
    bracket = torch.where(
        b_larger,
        torch.where(near, _series(small, p - 1, 1), ((1 + far) * gain - (p - 1) * far) / p),
        torch.where(near, (p - 1) * _series(small, p - 2, 0), (p - 1) / p * gain_p - gain),
    )
    same_side = plain_power(c.abs(), p) * bracket.clamp_min(0)
    across = plain_power(size_a, p) / p + plain_power(size_b, p) * (1 - 1 / p)
    across = across + plain_power(size_b, p - 1) * size_a
    return torch.where(apart, across, same_side)


def _series(e: Tensor, n: float, first: int) -> Tensor:
    """sum over j >= first of C(n, j) e^(j + 2 - first) / (j + 2 - first), for |e| n < 0.1.

    With n = p-1, first = 1 it is the integral of (1+s)^(p-1) - 1; with n = p-2, first = 0 that of
    s (1+s)^(p-2), both from 0 to e.
    """
    coefficients, binomial = [], 1.0
    for j in range(14 + first):
        if j >= first:
            coefficients.append(binomial / (j + 2 - first))
        binomial *= (n - j) / (j + 1)
    total = torch.full_like(e, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * e + coefficient
    return total * e * e
