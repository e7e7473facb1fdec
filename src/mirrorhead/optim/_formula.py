"""The update of one tensor, as a formula: every implementation computes this.

With u = mirror(w), d the direction (gradient, momentum or Adam) and lr, decay numbers:

    u+ = (1 - decay) u - lr d,      w+ = inverse(u+)

The mirror map is that of |w|^p/p. With a knee K the potential is quadratic beyond |w| = K
(same value and slope at K), so that a large weight moves at a constant speed:

    mirror(w)  = sign(c)|c|^(p-1) + (w - c)/T,       c = clamp(w, -K, K)
    inverse(u) = sign(c)|c|^(1/(p-1)) + (u - c) T,   c = clamp(u, -U, U)
    U = K^(p-1),   T = K^(2-p)/(p-1)

The functions here are pure and written for torch.compile; the plain loop runs them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead.geometry._powers import TORCH, inverse_exponent, power, signed_power
from mirrorhead.optim._fast_power import fast_power

_FAST = TORCH._replace(pow=fast_power)


class Storage(Enum):
    """What is kept beside a weight between steps; the values are the names in the state."""

    #: Nothing. The step is taken relative to w: a zero step changes no bit.
    PRIMAL = None
    #: u. For p < 2 a float32 w near 0 cannot hold u (at p = 1.1, w = u^10 underflows at
    #: |u| = 1.6e-4), so the step moves u and writes w from it.
    DUAL = "dual"
    #: A float32 copy of a half-precision w. For p > 2 it is better than u, which underflows
    #: there (at p = 6, |w| = 1e-8 gives u = 1e-40).
    WIDE = "wide"


class Method(Enum):
    """How the direction d follows from the gradients."""

    DESCENT = "descent"
    ADAM = "adam"


class Hyper(NamedTuple):
    """The numbers of one step of one tensor. Compiled kernels take them as one small tensor."""

    lr: float  # of u: for Adam it includes the tensor's scale and the bias correction of m
    decay: float = 0.0
    dither: float = 0.0  # from -1/2 to 1/2; see `dithered`
    grad_scale: float | Tensor = 1.0  # a tensor where it stays on a device
    momentum: float = 0.0
    gain1: float = 0.0  # 1 - beta1; float32 could not take it from beta1 without losing digits
    beta2: float = 0.0
    gain2: float = 0.0  # 1 - beta2
    eps: float = 0.0
    root_bias: float = 1.0  # (1 - beta2^t)^(-1/2)
    knee: float = 0.0  # K
    dual_knee: float = 0.0  # U
    slope: float = 0.0  # T


@dataclass(frozen=True)
class UpdateRule:
    """What is fixed while a kernel runs; one compiled kernel for each."""

    p: float
    method: Method
    storage: Storage
    dtype: torch.dtype  # of the parameter
    momentum: bool = False
    nesterov: bool = False
    decay: bool = False
    scaled: bool = False  # the gradient is multiplied first (maximize, normalize)
    knee: bool = False  # the potential is quadratic for large weights
    stochastic: bool = False  # round bf16 at random
    polynomial: bool = False  # powers by fast_power (float32 only)
    defer: bool = False  # mark weights edited from outside instead of handling them here

    @property
    def wide(self) -> torch.dtype:
        """The dtype to compute in."""
        return torch.promote_types(self.dtype, torch.float32)

    def signed_power(self, x: Tensor, exponent: float) -> Tensor:
        return signed_power(x, exponent, _FAST if self.polynomial else TORCH)

    def mirror(self, w: Tensor, h: Hyper) -> Tensor:
        if not self.knee:
            return self.signed_power(w, self.p - 1)
        c = torch.clamp(w, -h.knee, h.knee)
        return self.signed_power(c, self.p - 1) + (w - c) / h.slope

    def inverse(self, u: Tensor, h: Hyper) -> Tensor:
        """inverse(u), with 0 where the result would be subnormal (and slow)."""
        c = torch.where(u.abs() < self.dual_floor, 0.0, u)
        if not self.knee:
            return self.signed_power(c, inverse_exponent(self.p))
        c = torch.clamp(c, -h.dual_knee, h.dual_knee)
        linear = (u - c) * h.slope
        power = self.signed_power(c, inverse_exponent(self.p))
        return torch.where(u.abs() > h.dual_knee, power + linear, power)

    @property
    def dual_floor(self) -> float:
        """|u| below which inverse(u) is subnormal."""
        return torch.finfo(self.wide).tiny ** (1 / inverse_exponent(self.p))

    def unedited(self, held: Tensor, w: Tensor) -> Tensor:
        """Where w is what the last step wrote, to the bit; `held` is the weight in the wide dtype.

        After stochastic rounding either neighbour of `held` may have been written.
        """
        if not self.stochastic and self.dtype == self.wide:
            return held == w
        if not self.stochastic:
            # As bits: torch.compile would leave out a rounding whose result it widens again.
            return held.to(self.dtype).view(torch.int16) == w.view(torch.int16)
        eps, tiny = torch.finfo(self.dtype).eps, torch.finfo(self.dtype).tiny
        apart = (held - w.to(self.wide)).abs()
        return apart <= 1.01 * eps * held.abs() + 2 * eps * tiny


def accumulate(
    rule: UpdateRule, g: Tensor, m: Tensor | None, v: Tensor | None, h: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the direction d of the step, and the moments after the gradient g."""
    g = clean_gradient(rule, g, h)
    if rule.method is Method.ADAM:
        assert m is not None and v is not None
        m = m + h.gain1 * (g - m)
        v = h.beta2 * v + h.gain2 * (g * g)
    elif rule.momentum:
        assert m is not None
        m = h.momentum * m + g
    return direction(rule, g, m, v, h), m, v


def clean_gradient(rule: UpdateRule, g: Tensor, h: Hyper) -> Tensor:
    """Return g in the dtype of computing, scaled, with 0 for inf and NaN."""
    g = g.to(rule.wide)
    g = torch.where(g.abs() <= torch.finfo(rule.wide).max, g, 0.0)
    return g * h.grad_scale if rule.scaled else g


def direction(rule: UpdateRule, g: Tensor, m: Tensor | None, v: Tensor | None, h: Hyper) -> Tensor:
    """Return d from a clean gradient and the moments after it."""
    if rule.method is Method.ADAM:
        assert m is not None and v is not None
        return m / (v.sqrt() * h.root_bias + h.eps)
    if rule.momentum:
        assert m is not None
        return g + h.momentum * m if rule.nesterov else m
    return g


def move(
    rule: UpdateRule, w: Tensor, stored: Tensor | None, d: Tensor, h: Hyper, noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the weight and what is stored beside it, after a step along d."""
    if rule.storage is Storage.DUAL:
        assert stored is not None
        unedited = rule.unedited(rule.inverse(stored, h), w)
        mirrored = stored if rule.defer else rule.mirror(w.to(rule.wide), h)
        u = torch.where(unedited, stored, mirrored)
        result, moved = move_dual(rule, w, u, d, h, noise)
        if rule.defer:  # NaN marks what the caller must still do; w keeps the edit
            moved = torch.where(unedited, moved, torch.nan)
            result = torch.where(unedited, result, w)
        return result, moved
    base = base_weight(rule, w, stored)
    if rule.knee:  # p < 2, where u does not underflow
        u = rule.mirror(base, h)
        moved_u = u - (h.lr * d + (h.decay * u if rule.decay else 0.0))
        moved = torch.where(moved_u == u, base, rule.inverse(moved_u, h))
    else:
        moved = relative(rule, base, h.lr * d, h)
    return written(rule, w, base, moved, noise), moved if rule.storage is Storage.WIDE else None


def move_dual(
    rule: UpdateRule, w: Tensor, u: Tensor, d: Tensor, h: Hyper, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return w and u after a step of u; a weight whose u has not moved keeps its bits."""
    moved = dithered(rule, u, h.lr * d, h)
    return torch.where(moved == u, w, rounded(rule, rule.inverse(moved, h), noise)), moved


def base_weight(rule: UpdateRule, w: Tensor, stored: Tensor | None) -> Tensor:
    """Return the weight a primal step starts from: the wide copy if w still matches it, or w."""
    wide = w.to(rule.wide)
    return wide if stored is None else torch.where(rule.unedited(stored, w), stored, wide)


def written(
    rule: UpdateRule, w: Tensor, base: Tensor, moved: Tensor, noise: Tensor | None
) -> Tensor:
    """Return `moved` in the parameter's dtype; a weight that has not moved keeps its bits."""
    new = rounded(rule, moved, noise)
    return torch.where(moved == base, w, new) if rule.dtype != rule.wide else new


def dithered(rule: UpdateRule, u: Tensor, step: Any, h: Hyper) -> Tensor:
    """Return u - step, rounded up or down so that over many steps nothing is lost.

    A step of 1e-6 on u = 0.1 is 134.2 units in the last place; rounded to 134 each time,
    1e5 steps are off by 0.1 %, and w = u^10 by 1 %. `dither` runs evenly through (-1/2, 1/2)
    from step to step. That part of the gap between neighbours is added before rounding, so
    that u moves to the upper neighbour as often as the step asks for. A step of 0 leaves less
    than half a gap, which rounding removes: u stays.
    """
    if rule.decay:
        step = step + h.decay * u
    # The gap between u and its neighbour towards 0: the product rounds to that neighbour.
    gap = u - (u - u * (0.7 * torch.finfo(rule.wide).eps))
    return u - (step - h.dither * gap)


def relative(rule: UpdateRule, w: Tensor, step: Tensor, h: Hyper) -> Tensor:
    """Return inverse((1 - decay) mirror(w) - step), measured by the larger of the two.

    Where |step| <= |u|, w+ = w * signed_power(1 - decay - step/u, 1/(p-1)): exact for
    step 0, and safe where u itself under- or overflows.
    """
    keep = 1 - h.decay if rule.decay else 1.0
    size = power(w.abs(), rule.p - 1, _FAST if rule.polynomial else TORCH)
    small = step.abs() <= size
    ratio = torch.where(w < 0, -step, step) / size.clamp_min(torch.finfo(rule.wide).tiny)
    argument = torch.where(small, keep - ratio, keep * torch.copysign(size, w) - step)
    grown = rule.signed_power(argument, inverse_exponent(rule.p))
    return torch.where(small, w * grown, grown)


def rounded(rule: UpdateRule, w: Tensor, noise: Tensor | None) -> Tensor:
    """Return w in the parameter's dtype, rounded to the nearest or (bf16) at random."""
    if rule.stochastic:
        assert noise is not None
        # A bf16 is the upper half of a float32: add 16 random bits, cut 16 bits off.
        bits = (w.view(torch.int32) + noise) & -65536
        w = torch.where(w.isfinite(), bits.view(torch.float32), w)
    return w.to(rule.dtype)
