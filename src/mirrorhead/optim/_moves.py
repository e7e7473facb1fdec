"""Steps in a geometry, in plain torch: eager, for many tensors laid end to end, or compiled.

With d the direction and lr, decay numbers, mirror descent is

    u+ = (1 - decay) u - lr d,      w+ = inverse(u+).

A weight that is not, to the bit, inverse(u) was edited from outside, and u starts from it again.
With a knee K, mirror(w) = U mirror_1(w / K) and inverse(u) = K inverse_1(u / U), where the knee of
mirror_1 is at 1 and U = K^(p-1). Around a center w0, with S = max(reach, max |u|),

    mirror(w) = S mirror_1((w - w0) / S),      inverse(u) = w0 + S inverse_1(u / S):

no number above 1 is raised to a high power, so no change can explode: |w - w0| <= S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirrorhead.geometry._powers import inverse_exponent, power, signed_power
from mirrorhead.geometry.pnorm import PNorm
from mirrorhead.optim._rule import Hyper, Rule, Storage
from mirrorhead.optim._sharded import local
from mirrorhead.optim.directions import gathered


def mirror(rule: Rule, w: Tensor, center: Tensor | None, h: Hyper) -> Tensor:
    """Return u of weights in the wide dtype."""
    if center is not None:
        return h.scale * _lift(rule, (w - center) / h.scale)
    return h.dual_knee * _lift(rule, w / h.knee) if rule.knee else _lift(rule, w)


def inverse(rule: Rule, u: Tensor, center: Tensor | None, h: Hyper) -> Tensor:
    """Return the weights of u in the wide dtype, with 0 for changes that would be subnormal."""
    unit = h.scale if center is not None else h.dual_knee if rule.knee else None
    x = u if unit is None else u / unit
    if type(rule.psi) is PNorm:
        x = signed_power(x, inverse_exponent(rule.psi.p))
    else:
        x = rule.psi.inverse(x)
    x = torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, x)
    if center is None:
        return h.knee * x if rule.knee else x
    w = (center + h.scale * x).to(rule.dtype)
    return torch.where(w == center, center, w)  # -0, too, has the bits of the center


def _lift(rule: Rule, w: Tensor) -> Tensor:
    return signed_power(w, rule.psi.p - 1) if type(rule.psi) is PNorm else rule.psi.lift(w)


def move(
    rule: Rule,
    w: Tensor,
    stored: Tensor | None,
    d: Tensor,
    center: Tensor | None,
    h: Hyper,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the weight, and what is stored beside it, after a step along d, entry by entry."""
    if rule.storage is Storage.DUAL:
        assert stored is not None
        u = follow_edits(rule, w, stored, center, h)
        moved = dithered(rule, u, h.lr * d, h)
        new = rounded(rule, inverse(rule, moved, center, h), noise)
        return torch.where(moved == u, w, new), moved
    base = w.to(rule.wide)
    if stored is not None:
        base = torch.where(unedited(rule, stored, w), stored, base)
    assert isinstance(rule.psi, PNorm) or rule.knee
    if rule.knee:  # p < 2, where u does not underflow
        u = mirror(rule, base, center, h)
        moved = u - (h.lr * d + h.decay * u)
        moved = torch.where(moved == u, base, inverse(rule, moved, center, h))
    else:
        moved = relative(rule, base, h.lr * d, h)
    new = rounded(rule, moved, noise)
    if rule.dtype != rule.wide:  # a weight that has not moved keeps its bits
        new = torch.where(moved == base, w, new)
    return new, moved if stored is not None else None


def follow_edits(rule: Rule, w: Tensor, u: Tensor, center: Tensor | None, h: Hyper) -> Tensor:
    """Return u, and mirror(w) where w is not inverse(u)."""
    held = inverse(rule, u, center, h)
    return torch.where(unedited(rule, held, w), u, mirror(rule, w.to(rule.wide), center, h))


def unedited(rule: Rule, held: Tensor, w: Tensor) -> Tensor:
    """Where w is what the last step wrote, to the bit; `held` is the weight in the wide dtype.

    After stochastic rounding either neighbour of `held` may have been written.
    """
    if not rule.stochastic and rule.dtype == held.dtype:
        return held == w
    if not rule.stochastic:
        # As bits: torch.compile would leave out a rounding whose result it widens again.
        return held.to(rule.dtype).view(torch.int16) == w.view(torch.int16)
    eps, tiny = torch.finfo(rule.dtype).eps, torch.finfo(rule.dtype).tiny
    apart = (held - w.to(rule.wide)).abs()
    return apart <= 1.01 * eps * held.abs() + 2 * eps * tiny


def dithered(rule: Rule, u: Tensor, step: Any, h: Hyper) -> Tensor:
    """Return u - step, rounded up or down so that over many steps nothing is lost.

    A step of 1e-6 on u = 0.1 is 134.2 units in the last place; rounded to 134 each time,
    1e5 steps are off by 0.1 %, and w = u^10 by 1 %. `dither` runs evenly through (-1/2, 1/2)
    from step to step. That part of the gap between neighbours is added before rounding, so
    that u moves to the upper neighbour as often as the step asks for. A step of 0 leaves less
    than half a gap, which rounding removes: u stays.
    """
    # The gap between u and its neighbour towards 0: the product rounds to that neighbour.
    gap = u - (u - u * (0.7 * torch.finfo(rule.wide).eps))
    return u - (step + h.decay * u - h.dither * gap)


def relative(rule: Rule, w: Tensor, step: Tensor, h: Hyper) -> Tensor:
    """Return inverse((1 - decay) mirror(w) - step) in a p-norm, measured by the larger of the two.

    Where |step| <= |u|, w+ = w * signed_power(1 - decay - step/u, 1/(p-1)): exact for
    step 0, and safe where u itself under- or overflows.
    """
    assert isinstance(rule.psi, PNorm)
    keep, p = 1 - h.decay, rule.psi.p
    if p == 2:
        return keep * w - step
    size = power(w.abs(), p - 1)
    small = step.abs() <= size
    ratio = torch.where(w < 0, -step, step) / size.clamp_min(torch.finfo(rule.wide).tiny)
    argument = torch.where(small, keep - ratio, keep * torch.copysign(size, w) - step)
    grown = signed_power(argument, inverse_exponent(p))
    return torch.where(small, w * grown, grown)


def rounded(rule: Rule, w: Tensor, noise: Tensor | None) -> Tensor:
    """Return w in the parameter's dtype, rounded to the nearest or (bf16) at random."""
    if rule.stochastic:
        assert noise is not None
        # A bf16 is the upper half of a float32: add 16 random bits, cut 16 bits off.
        bits = (w.view(torch.int32) + noise) & -65536
        w = torch.where(w.isfinite(), bits.view(torch.float32), w)
    return w.to(rule.dtype)


def move_whole(rule: Rule, param: Tensor, u: Tensor, d: Tensor, before: Any, h: Hyper) -> None:
    """Move w and u where all entries count, such as singular values: matrices are gathered.

    before: the potential of the last step. u survives a change of options of a potential whose u
    says more than the weights do, such as the k of k-support.
    """
    psi = rule.psi
    gather, part = gathered(param)
    w, start, d = (gather(x) for x in (local(param), u, d))
    wide = start.dtype
    edited = (psi if before is None else before).inverse(start).to(w.dtype) != w
    changed = before is not None and before != psi
    if changed and not (psi.dense_dual and type(psi) is type(before)):
        edited = torch.ones_like(edited)  # u was that of another potential
    edited = edited if psi.dense_dual else edited.any()
    start = torch.where(edited, psi.lift(w.to(wide)), start)
    new = dithered(rule, start, h.lr * d, h)
    moved = (new != start).any() | changed
    local(param).copy_(part(torch.where(moved, psi.inverse(new).to(w.dtype), w)))
    u.copy_(part(new))
