"""Exponents, powers by multiplications where that is exact, and norms that do not overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead._checks import is_number

Dims = int | tuple[int, ...] | None


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
    """q = p/(p-1), so that 1/p + 1/q = 1; inf for p = 1, and 1 for p = inf."""
    if p == 1 or p == math.inf:
        return math.inf if p == 1 else 1.0
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
    dims = all_dims(x, dims)
    if x.numel() == 0:
        return x.abs().sum(dims, keepdim=keepdim)
    magnitude = x.abs()
    if p == math.inf:
        return magnitude.amax(dims, keepdim)
    largest = magnitude.detach().amax(dims, keepdim=True)
    # A zero slice divides by 1: its norm is 0, and so is the subgradient chosen there. So does an
    # infinite one, since inf / inf is NaN.
    scale = largest.where((largest > 0) & (largest < math.inf), torch.ones_like(largest))
    total = plain_power(magnitude / scale, p).sum(dims, keepdim=True)
    is_zero = largest == 0
    root = torch.where(is_zero, torch.ones_like(total), total).pow(1 / p)
    norm = torch.where(is_zero, total, scale * root)
    return norm if keepdim else norm.reshape(norm.sum(dims).shape)


class SignedPower(torch.autograd.Function):
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


def smooth_power(x: Tensor, exponent: float) -> Tensor:
    """sign(x)|x|^e as a new tensor, with its true derivative at 0 where gradients are asked for."""
    if not torch.is_grad_enabled():  # torch.compile need not see the function
        return SignedPower.forward(x, exponent)
    return SignedPower.apply(x, exponent)  # pyright: ignore[reportReturnType]


def plain_power(a: Tensor, exponent: float) -> Tensor:
    """a**exponent for a >= 0, with its true derivative at 0."""
    return SignedPower.apply(a, exponent)  # pyright: ignore[reportReturnType]


def in_wide(f: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """f in float32 or better, the result back in the tensors' own dtype."""
    for x in tensors:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"expected a floating point tensor, got {given}")
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    wide = torch.promote_types(dtype, torch.float32)
    return f(*(x.to(wide) for x in tensors)).to(dtype)


def total(x: Tensor, dims: Dims = None) -> Tensor:
    """Return the sum over `dims`, over all dimensions if None."""
    return x.sum(all_dims(x, dims)) if x.dim() else x


def all_dims(x: Tensor, dims: Dims) -> tuple[int, ...]:
    """Return `dims` as a tuple, that of all dimensions for None."""
    if dims is None:
        return tuple(range(x.dim()))
    return (dims,) if isinstance(dims, int) else tuple(dims)


def expand(reduced: Tensor, x: Tensor, dims: Dims) -> Tensor:
    """Return what was reduced over `dims` of x with these dimensions again, each of size 1."""
    for dim in sorted(d % x.dim() for d in all_dims(x, dims)):
        reduced = reduced.unsqueeze(dim)
    return reduced
