"""The potential psi(w) = (1/p) ||w||_p^p and the maps it induces."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead._checks import is_number

Dims = int | tuple[int, ...] | None


class PNorm:
    r"""The p-norm potential :math:`\psi(w) = \frac1p \sum_i |w_i|^p`, for p > 1.

    Its gradient is the mirror map u = sign(w)|w|^(p-1); the inverse map is
    w = sign(u)|u|^(1/(p-1)); q = p/(p-1) is the dual exponent, and
    ||mirror(w)||_q = ||w||_p^(p-1).

    Every method takes tensors of any floating dtype and shape. Reductions run over `dims`
    (all dimensions by default), so leading dimensions can be a batch. Half precision is
    computed in float32. Norms divide by the largest entry first, so they neither overflow nor
    underflow. Divergences are sums of non-negative terms, each computed without cancellation, so
    they stay accurate for points 1e-12 apart.

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
        self.p = check_p(p)
        self.q = dual_exponent(self.p)

    def __repr__(self) -> str:
        return f"PNorm(p={self.p:g})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PNorm) and other.p == self.p

    def __hash__(self) -> int:
        return hash((PNorm, self.p))

    def mirror(self, w: Tensor) -> Tensor:
        """Return the gradient of the potential, u = sign(w)|w|^(p-1), entry by entry."""
        return _in_wide(lambda x: _SignedPower.apply(x, self.p - 1), w)

    def inverse(self, u: Tensor) -> Tensor:
        """Return the inverse of `mirror`, w = sign(u)|u|^(1/(p-1)), entry by entry."""
        return _in_wide(lambda x: _SignedPower.apply(x, inverse_exponent(self.p)), u)

    def value(self, w: Tensor, dims: Dims = None) -> Tensor:
        """psi(w) = (1/p) sum |w|^p."""
        return _in_wide(lambda x: _sum(_power(x.abs(), self.p), dims) / self.p, w)

    def norm(self, w: Tensor, dims: Dims = None) -> Tensor:
        """||w||_p, safe for entries of any size: `PNorm(3).norm` of 1e200 is 1e200.

        >>> PNorm(3).norm(torch.full((2, 8), 1e200, dtype=torch.float64), dims=-1)
        tensor([2.0000e+200, 2.0000e+200], dtype=torch.float64)
        """
        return _in_wide(lambda x: lp_norm(x, self.p, dims), w)

    def dual_norm(self, u: Tensor, dims: Dims = None) -> Tensor:
        """||u||_q with q = p/(p-1)."""
        return _in_wide(lambda x: lp_norm(x, self.q, dims), u)

    def divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the Bregman divergence psi(w) - psi(v) - <mirror(v), w - v>, never negative.

        >>> v = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> PNorm(2).divergence(v + 1e-12, v)  # 1/2 ||w - v||^2
        tensor(1.0002e-24, dtype=torch.float64)
        """
        return _in_wide(lambda a, b: _sum(_entry_divergence(a, b, self.p), dims), w, v)

    def direction_divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the divergence of directions, D(w/||w||_p, v/||v||_p) = 1 - <mirror(v^), w^>.

        Raises ValueError if w or v is zero or not finite and so has no direction.
        """

        def divergence(w: Tensor, v: Tensor) -> Tensor:
            units = []
            for name, x in (("w", w), ("v", v)):
                norm = lp_norm(x, self.p, dims, keepdim=True)
                if not bool(((norm > 0) & (norm < math.inf)).all()):
                    raise ValueError(
                        f"{name} has a zero, infinite or NaN slice, which has no direction"
                    )
                units.append(x / norm)
            return _sum(_entry_divergence(units[0], units[1], self.p), dims)

        return _in_wide(divergence, w, v)


def check_p(p: float, name: str = "p") -> float:
    """p as a float, or a ValueError/TypeError that says what is allowed."""
    if not is_number(p):
        raise TypeError(f"{name} must be a number greater than 1, got {p!r}")
    if not (1 < p < math.inf):
        raise ValueError(f"{name} must be finite and greater than 1, got {p!r}")
    return float(p)


def check_exponent(p: float, name: str = "p") -> float:
    """p as a float from 1 to inf, for which ||.||_p is a norm, or an error as `check_p` has it."""
    if not is_number(p):
        raise TypeError(f"{name} must be a number from 1 to inf, got {p!r}")
    if not p >= 1:
        raise ValueError(f"{name} must be a number from 1 to inf, got {p!r}")
    return float(p)


def dual_exponent(p: float) -> float:
    """q = p/(p-1), so that 1/p + 1/q = 1."""
    return p / (p - 1)


def inverse_exponent(p: float) -> float:
    """1/(p-1), snapped to a quarter where p = 1.1 and the like leave it 1e-15 away."""
    return snap(1 / (p - 1))


def snap(exponent: float) -> float:
    """The nearest multiple of 1/4 where that is within rounding, else the exponent."""
    quarters = round(4 * exponent)
    return quarters / 4 if abs(4 * exponent - quarters) < 1e-12 * (1 + quarters) else exponent


class PowerOps(NamedTuple):
    """The operations that a power is made of: on tensors, or on lists of tensors."""

    mul: Callable[[Any, Any], Any] = torch.mul
    sqrt: Callable[[Any], Any] = torch.sqrt
    abs: Callable[[Any], Any] = torch.abs
    copysign: Callable[[Any, Any], Any] = torch.copysign
    pow: Callable[[Any, float], Any] = torch.pow


TORCH = PowerOps()


def power(a: Any, exponent: float, ops: PowerOps = TORCH) -> Any:
    """a**exponent for a >= 0 and exponent > 0.

    Multiples of 1/4 up to 128 take multiplications and square roots, which are several times
    faster than `ops.pow` and exact where the result is (1**e is 1 to the bit).
    """
    if not exponent > 0:
        raise ValueError(f"exponent must be greater than 0, got {exponent!r}")
    exponent = snap(exponent)
    quarters = round(4 * exponent)
    if 4 * exponent != quarters or exponent > 128:
        return ops.pow(a, exponent)
    whole, quarter = quarters // 4, quarters % 4
    factors = []
    if quarter:
        root = ops.sqrt(a)
        if quarter >= 2:
            factors.append(root)
        if quarter != 2:
            factors.append(ops.sqrt(root))
    square = a
    while whole:  # binary powers: a^10 = a^8 a^2
        if whole & 1:
            factors.append(square)
        whole >>= 1
        if whole:
            square = ops.mul(square, square)
    result = factors.pop()
    while factors:
        result = ops.mul(result, factors.pop())
    return result


def signed_power(x: Any, exponent: float, ops: PowerOps = TORCH) -> Any:
    """sign(x)|x|^exponent for exponent > 0, by multiplications where `power` can.

    >>> signed_power(torch.tensor([-2.0, 3.0]), 2)
    tensor([-4.,  9.])
    """
    exponent = snap(exponent)
    if exponent == 1:
        return x
    if exponent == round(exponent) and exponent <= 128:
        # x|x| carries the sign of x through an even power; copysign would cost more.
        if exponent % 2 == 0:
            return signed_power(ops.mul(x, ops.abs(x)), exponent / 2, ops)
        return power(x, exponent, ops)
    return ops.copysign(power(ops.abs(x), exponent, ops), x)


def lp_norm(x: Tensor, p: float, dims: Dims = None, keepdim: bool = False) -> Tensor:
    """||x||_p = m (sum (|x|/m)^p)^(1/p) with m the largest entry, a constant to autograd."""
    dims = _all_dims(x, dims)
    if x.numel() == 0:
        return x.abs().sum(dims, keepdim=keepdim)
    magnitude = x.abs()
    if p == math.inf:
        return magnitude.amax(dims, keepdim)
    largest = magnitude.detach().amax(dims, keepdim=True)
    # A zero slice divides by 1: its norm is 0, and so is the subgradient chosen there. So does an
    # infinite one, since inf / inf is NaN.
    scale = largest.where((largest > 0) & (largest < math.inf), torch.ones_like(largest))
    total = _power(magnitude / scale, p).sum(dims, keepdim=True)
    is_zero = largest == 0
    root = torch.where(is_zero, torch.ones_like(total), total).pow(1 / p)
    norm = torch.where(is_zero, total, scale * root)
    return norm if keepdim else norm.reshape(norm.sum(dims).shape)


class _SignedPower(torch.autograd.Function):
    """sign(x)|x|^e with derivative e|x|^(e-1): plain autograd gives 0 * inf at x = 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, exponent: float) -> Tensor:
        return signed_power(x, exponent) if exponent != 1 else x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        x, ctx.exponent = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * (ctx.exponent * x.abs().pow(ctx.exponent - 1)), None


def _power(a: Tensor, exponent: float) -> Tensor:
    """a**exponent for a >= 0, with its true derivative at 0."""
    return _SignedPower.apply(a, exponent)  # pyright: ignore[reportReturnType]


def _entry_divergence(a: Tensor, b: Tensor, p: float) -> Tensor:
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
    same_side = _power(c.abs(), p) * bracket.clamp_min(0)
    across = _power(size_a, p) / p + _power(size_b, p) * (1 - 1 / p)
    across = across + _power(size_b, p - 1) * size_a
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


def _in_wide(f: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """f in float32 or better, the result back in the tensors' own dtype."""
    for x in tensors:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"expected a floating point tensor, got {given}")
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    wide = torch.promote_types(dtype, torch.float32)
    return f(*(x.to(wide) for x in tensors)).to(dtype)


def _all_dims(x: Tensor, dims: Dims) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(x.dim()))
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _sum(x: Tensor, dims: Dims) -> Tensor:
    return x.sum(_all_dims(x, dims)) if x.dim() else x
