"""One step of one tensor, as a formula: what all three implementations compute.

With u = mirror(w), d the direction (gradient, momentum or Adam) and lr, decay numbers:

    u+ = (1 - decay) u - lr d,      w+ = inverse(u+)

The functions here are pure and written for torch.compile; the per-tensor loop runs them as
they are. What is stored between steps is a `Storage`:

- "primal": w alone. The step is taken relative to w, so that a step of nothing is nothing
  and no power has to be exact.
- "dual": u beside w. For p < 2 a float32 w near 0 cannot say where u is (at p = 1.1,
  w = u^10 underflows at |u| = 1.6e-4), so u is the truth and w is written from it.
- "wide": a float32 copy of a half-precision w. For p > 2 this is better than u, which
  underflows instead (at p = 6, |w| = 1e-8 gives u = 1e-40).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mirrorhead.optim.fast_power import fast_power
from mirrorhead.potentials import TORCH, inverse_exponent, power, signed_power

Storage = Literal["primal", "dual", "wide"]

# The numbers of a step, in one small tensor so that none of them is compiled in.
# GAIN is 1 - beta, which float32 could not take from beta without losing digits.
LR, DECAY, DITHER, GRAD_SCALE, MOMENTUM, GAIN1, BETA2, GAIN2, EPS, ROOT_BIAS = range(10)
NUMBERS = 10

_FAST = TORCH._replace(pow=fast_power)


@dataclass(frozen=True)
class Rule:
    """What is fixed while a kernel runs; one compiled kernel for each."""

    p: float
    kind: Literal["descent", "adam"]
    storage: Storage
    dtype: torch.dtype  # of the parameter
    momentum: bool = False
    nesterov: bool = False
    decay: bool = False
    scaled: bool = False  # the gradient is multiplied first (maximize, normalize)
    stochastic: bool = False  # round bf16 at random
    polynomial: bool = False  # powers by fast_power (float32 only)
    defer: bool = False  # mark weights edited from outside, rather than re-sync them here

    @property
    def wide(self) -> torch.dtype:
        """The dtype to compute in."""
        return torch.promote_types(self.dtype, torch.float32)

    def power(self, a: Tensor, exponent: float) -> Tensor:
        return power(a, exponent, _FAST if self.polynomial else TORCH)

    def signed_power(self, x: Tensor, exponent: float) -> Tensor:
        return signed_power(x, exponent, _FAST if self.polynomial else TORCH)

    def mirror(self, w: Tensor) -> Tensor:
        return self.signed_power(w, self.p - 1)

    def inverse(self, u: Tensor) -> Tensor:
        """inverse(u), with 0 where the result would be subnormal (and slow)."""
        exponent = inverse_exponent(self.p)
        return self.signed_power(torch.where(u.abs() < self.dual_floor, 0.0, u), exponent)

    @property
    def dual_floor(self) -> float:
        """|u| below which inverse(u) is subnormal."""
        return torch.finfo(self.wide).tiny ** (1 / inverse_exponent(self.p))

    def in_sync(self, held: Tensor, w: Tensor) -> Tensor:
        """Whether w is what the last step wrote, given `held`, the weight by our account."""
        slack, floor = self.tolerance
        return (held - w).abs() <= slack * held.abs() + floor

    @property
    def tolerance(self) -> tuple[float, float]:
        """What rounding can do between `held` and w, relative and absolute.

        Rounding u, the powers (see fast_power) and the parameter's own dtype come in: in
        all a few 1e-5 in float32 at p = 1.1. Smaller edits of a weight go unnoticed.
        """
        slack = (256 + 8 * inverse_exponent(self.p)) * torch.finfo(self.wide).eps
        floor = torch.finfo(self.wide).tiny
        if self.dtype != self.wide:
            slack += 1.01 * torch.finfo(self.dtype).eps
            floor += 2 * torch.finfo(self.dtype).tiny * torch.finfo(self.dtype).eps
        return slack, floor


def accumulate(
    rule: Rule, g: Tensor, m: Tensor | None, v: Tensor | None, h: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient, cleaned and scaled, and the moments after it."""
    g = clean_gradient(rule, g, h)
    if rule.kind == "adam":
        assert m is not None and v is not None
        m = m + h[GAIN1] * (g - m)
        v = h[BETA2] * v + h[GAIN2] * (g * g)
    elif rule.momentum:
        assert m is not None
        m = h[MOMENTUM] * m + g
    return g, m, v


def clean_gradient(rule: Rule, g: Tensor, h: Tensor) -> Tensor:
    """g in the dtype of computing, scaled, with 0 for inf and NaN, which must not spread."""
    g = g.to(rule.wide)
    g = torch.where(g.abs() <= torch.finfo(rule.wide).max, g, 0.0)
    return g * h[GRAD_SCALE] if rule.scaled else g


def direction(rule: Rule, g: Tensor, m: Tensor | None, v: Tensor | None, h: Tensor) -> Tensor:
    """The direction d of the step, from the moments that `accumulate` returned."""
    if rule.kind == "adam":
        assert m is not None and v is not None
        return m / (v.sqrt() * h[ROOT_BIAS] + h[EPS])
    if rule.momentum:
        assert m is not None
        return g + h[MOMENTUM] * m if rule.nesterov else m
    return g


def move(
    rule: Rule, w: Tensor, stored: Tensor | None, d: Tensor, h: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The weight and what is stored beside it, after a step along d."""
    if rule.storage == "dual":
        assert stored is not None
        wide = w.to(rule.wide)
        fresh = rule.in_sync(rule.inverse(stored), wide)
        u = stored if rule.defer else torch.where(fresh, stored, rule.mirror(wide))
        moved = _dithered(rule, u, h[LR] * d, h)
        result = torch.where(moved == u, w, rounded(rule, rule.inverse(moved), noise))
        if rule.defer:  # NaN marks what `resume` must still do; w keeps the edit
            moved = torch.where(fresh, moved, torch.nan)
            result = torch.where(fresh, result, w)
        return result, moved
    base = base_weight(rule, w, stored)
    moved = relative(rule, base, h[LR] * d, h)
    return written(rule, w, base, moved, noise), moved if rule.storage == "wide" else None


def base_weight(rule: Rule, w: Tensor, stored: Tensor | None) -> Tensor:
    """The weight that a primal step starts from: w, or the wide copy that w still matches."""
    wide = w.to(rule.wide)
    return wide if stored is None else torch.where(rule.in_sync(stored, wide), stored, wide)


def written(rule: Rule, w: Tensor, base: Tensor, moved: Tensor, noise: Tensor | None) -> Tensor:
    """`moved` in the parameter's dtype; what has not moved keeps its bits."""
    new = rounded(rule, moved, noise)
    return torch.where(moved == base, w, new) if rule.dtype != rule.wide else new


def resume(
    rule: Rule, w: Tensor, stored: Tensor, d: Tensor, h: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Finish a deferred step where `stored` is NaN, that is where w had been edited."""
    marked = stored.isnan()
    synced = torch.where(marked, rule.mirror(w.to(rule.wide)), stored)
    result, moved = move(rule, w, synced, d, h, noise)
    assert moved is not None
    return torch.where(marked, result, w), torch.where(marked, moved, stored)


def _dithered(rule: Rule, u: Tensor, step: Tensor, h: Tensor) -> Tensor:
    """u - step, rounded up or down so that over many steps nothing is lost.

    A step of 1e-6 on u = 0.1 is 134.2 units in the last place; rounded to 134 each time,
    1e5 steps are off by 0.1 %, and w = u^10 by 1 %. DITHER runs through (-1/2, 1/2) evenly
    from step to step; that part of the gap between neighbours, added before rounding,
    makes u go to the upper neighbour just as often as the step asks for. A step of 0
    leaves less than half a gap, which rounding removes: u stays.
    """
    if rule.decay:
        step = step + h[DECAY] * u
    # The gap between u and its neighbour towards 0: the product rounds to that neighbour.
    gap = u - (u - u * (0.7 * torch.finfo(rule.wide).eps))
    return u - (step - h[DITHER] * gap)


def relative(rule: Rule, w: Tensor, step: Tensor, h: Tensor) -> Tensor:
    """inverse((1 - decay) mirror(w) - step), measured by the larger of the two.

    Where |step| <= |u|, w+ = w * signed_power(1 - decay - step/u, 1/(p-1)): exact for
    step 0, and safe where u itself under- or overflows.
    """
    keep = 1 - h[DECAY] if rule.decay else 1.0
    size = rule.power(w.abs(), rule.p - 1)
    small = step.abs() <= size
    ratio = torch.where(w < 0, -step, step) / size.clamp_min(torch.finfo(rule.wide).tiny)
    argument = torch.where(small, keep - ratio, keep * torch.copysign(size, w) - step)
    grown = rule.signed_power(argument, inverse_exponent(rule.p))
    return torch.where(small, w * grown, grown)


def rounded(rule: Rule, w: Tensor, noise: Tensor | None) -> Tensor:
    """w in the parameter's dtype, to the nearest or (bf16) at random, without bias."""
    if rule.stochastic:
        assert noise is not None
        # A bf16 is the upper half of a float32: add 16 random bits, cut 16 bits off.
        bits = (w.view(torch.int32) + noise) & -65536
        w = torch.where(w.isfinite(), bits.view(torch.float32), w)
    return w.to(rule.dtype)
