r"""One predictor-corrector step of the interior point method, for a batch of problems.

Vectors are (B, N) or (B, m), scalars (B, 1). native/margin.c takes the same steps in C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._linear_systems import Solver, System

Start = tuple[Tensor, Tensor] | None  # w and lam of a similar problem
# Entries below this count as zero: the logarithm stays finite, and every power of them is 0.
_TINY = 1e-290


@dataclass(frozen=True)
class Schedule:
    """How fast the exponent moves from 2 to p while the barrier parameter falls."""

    factor: float  # p - 1 changes by at most this factor per step,
    threshold: float  # only while the gap is below this,
    floor: float  # and the barrier falls by at most this factor meanwhile
    iterations: int  # at most this many steps
    dense_limit: int  # the linear systems are factored up to this size
    shortcuts: bool = False  # use float32 and fewer rows where that seems to be enough


class Iterate(NamedTuple):
    """A point, normalised to ||w||_p = 1 and <w, s> = 1, with s = A' lam and aw = A w."""

    w: Tensor  # (B, N)
    aw: Tensor  # (B, m)
    u: Tensor  # (B, m), slack: A w - u = beta b with a free scale beta
    s: Tensor  # (B, N)
    lam: Tensor  # (B, m)
    p: Tensor  # (B, 1), the current exponent
    log_w: Tensor  # (B, N), log |w|; w itself where nobody asks for it, as at p = 2
    log_s: Tensor  # (B, N), log |s|, the same
    log_dual_norm: Tensor  # (B, 1), log ||s||_q, which is >= 0

    def take(self, keep: Tensor) -> Iterate:
        return Iterate(*(x[keep] for x in self))


class Link(NamedTuple):
    """The first-order model dw = H ds + rho of the mirror map at a point."""

    slope: Any  # H
    rho: Tensor
    f: Tensor  # the side of the link that is linearised
    multiply: Callable[[Tensor], Tensor]  # H times
    power: Callable[[Tensor, Tensor], Tensor]  # x, e -> sign(x)|x|^e


@dataclass(frozen=True, eq=False)
class Rows:
    """The constraints A w >= b of a run: all of a problem's, or those that were not dropped."""

    A: ConstraintMatrix
    b: Tensor  # (B, m)
    place: Tensor  # (B, m), the index of each row among all of the problem's

    @cached_property
    def _quotient(self) -> tuple[Tensor, Tensor]:
        """inf on padding, else 0; and 1 / b: what makes (A w)_k / b_k of A w."""
        return torch.zeros_like(self.b).masked_fill_(self.b < 0, math.inf), 1 / self.b

    def take(self, keep: Tensor) -> Rows:
        return Rows(self.A.take(keep), self.b[keep], self.place[keep])

    def margin(self, aw: Tensor) -> Tensor:
        """The smallest (A w)_k / b_k, (B, 1)."""
        padding, inverse = self._quotient
        return torch.addcmul(padding, aw, inverse).amin(-1, keepdim=True)

    def gap(self, x: Iterate, margin: Tensor | None = None) -> Tensor:
        """The gap of x at its exponent, (B, 1): ||s||_q / <b, lam> bounds any margin at norm 1."""
        margin = self.margin(x.aw) if margin is None else margin
        return torch.expm1(x.log_dual_norm - torch.log(dot(self.b, x.lam) * margin.clamp_min(0)))


def starting_point(rows: Rows, p: float, schedule: Schedule, start: Start) -> Iterate:
    """Return a centred point: from the data alone at an exponent near 2, or near a solution."""
    A, b = rows.A, rows.b
    share = first_multipliers(b)
    if start is None:
        slack, lam = 0.5, share
        exponent = towards(p, b.new_full((A.batch, 1), 2.0), schedule)
        if p < 2:  # where a longer first move does no harm
            exponent = towards(p, exponent, schedule)
    else:
        slack = 0.05
        lam = (1 - slack) * start[1] / dot(b, start[1]) + slack * share
        exponent = b.new_full((A.batch, 1), p)
    s = A.adjoint(lam)
    w = _inverse_mirror(s, exponent) if start is None else start[0]
    aw = A.apply(w)
    x = _normalised(w, aw, aw, s, lam, exponent, p)
    beta = (1 - slack) / dot(b, x.lam)
    least = 0.1 * slack / (b.shape[-1] * x.lam)
    return x._replace(u=torch.maximum(x.aw - beta * b, least))


def first_multipliers(b: Tensor) -> Tensor:
    """Return lam in proportion to b with <b, lam> = 1; padding starts near its final value, 0."""
    share = b.clamp_min(0) / b.clamp_min(0).square().sum(-1, keepdim=True)
    return share.where(b > 0, 0.01 / b.shape[-1])


def newton_step(
    x: Iterate, rows: Rows, system: System, p: float, schedule: Schedule, gap: Tensor
) -> Iterate:
    """Move the exponents that may move, then take one predictor-corrector step."""
    A = rows.A
    moving = x.p != p
    if bool(moving.any()):
        ready = moving & (gap < schedule.threshold)
        x = _at_exponent(x, torch.where(ready, towards(p, x.p, schedule), x.p))
    link = _linearised_mirror_map(x, gap, p)
    accuracy = min(max(0.1 * float(gap.min()), 1e-8), 1e-2)
    solve = system.factor(link.slope, x.u / x.lam, accuracy)
    w, u, lam = moved(x, rows, link, solve, accuracy, (p, schedule, moving), gap)
    # Not s + dual ds: lam can change by ten decades, and s would keep its rounding errors.
    s = A.adjoint(lam)
    astray = dot(w, s) <= 0
    if bool(astray.any()):  # as happens when there is no solution: restart w from s
        w = torch.where(astray, _inverse_mirror(s, x.p), w)
    return _normalised(w, A.apply(w), u, s, lam, x.p, p)


def moved(
    x: Iterate,
    rows: Rows,
    link: Link,
    solve: Solver,
    accuracy: float,
    course: tuple[float, Schedule, Tensor],
    gap: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return w, u and lam after a predictor and a corrector; course: p, schedule and what moves."""
    A, b = rows.A, rows.b
    p, schedule, moving = course
    q = x.p / (x.p - 1)
    product = x.lam * x.u
    complementarity = _sum(product)
    # On the central path <lam, A w - u> = beta <lam, b>, and <lam, A w> = <s, w> = 1.
    target = (1 - complementarity).clamp_min(0.1) / dot(b, x.lam) * b
    # sum |w|^p/p + |s|^q/q - w s, the Fenchel gap of w = psi(s), in the current normalisation.
    fenchel = torch.expm1(q * x.log_dual_norm) / q
    residual = target - x.aw - A.apply(link.rho)

    # Predictor: straight at the solution. With r = dlam/lam, complementarity asks for
    # du/u = -(1 + r). The length of this step decides how much to centre.
    dlam = solve(residual, None, 1e-2)
    r = dlam / x.lam
    dual, primal = longest_step(r.amin(-1, True)), longest_step(-1 - r.amax(-1, True))
    after = _sum(product * (1 + dual * r) * (1 - primal - primal * r))
    sigma = (after / complementarity).clamp_max(1) ** 4
    sigma = torch.where(moving, sigma.clamp_min(schedule.floor), sigma)
    # Without the Fenchel gap, complementarity would fall faster than the error of w = psi(s).
    mu = sigma * (complementarity + fenchel) / b.shape[-1]

    # Corrector. The second-order term is scaled by the length of the predictor: in full it can
    # turn the step uphill where the predictor was short.
    push = torch.addcmul(mu / x.lam, dual * x.u, r * (1 + r))
    dlam = solve(residual + push, dlam, accuracy)
    r = dlam / x.lam
    du = push - x.u * (1 + r)
    ds = A.adjoint(dlam)
    dw = link.rho + link.multiply(ds)

    # Nearly to the boundary, primal and dual separately; closer to it as the gap closes.
    fraction = (1 - gap).clamp_min(0.99).clamp_max(1 - 1e-8)
    dual = fraction * longest_step(r.amin(-1, True))
    primal = fraction * longest_step((du / x.u).amin(-1, True))
    if p < 2 and float(gap.max()) > 1e-4:
        linear = dot(target, dlam)

        def slope(a: Tensor) -> Tensor:
            power = link.power(torch.addcmul(x.s, a, ds), q - 1)
            return dot(power, ds) - linear - mu * _sum(r / (1 + a * r))

        shrink = backtrack(slope, dot(link.f, ds) - linear - mu * _sum(r), dual, gap > 1e-4)
        primal, dual = primal * shrink, dual * shrink
    elif p > 2:
        # With the new multipliers, dw and du descend whether or not A w - u = target holds yet.
        new_s, new_lam = x.s + ds, x.lam + dlam

        def slope(a: Tensor) -> Tensor:
            power = link.power(torch.addcmul(x.w, a, dw), x.p - 1)
            return dot(power - new_s, dw) + dot(new_lam - mu / torch.addcmul(x.u, a, du), du)

        slope_at_0 = dot(link.f - new_s, dw) + dot(new_lam - mu / x.u, du)
        primal = primal * backtrack(slope, slope_at_0, primal, gap > 0)
    w = torch.addcmul(x.w, primal, dw)
    lam = torch.addcmul(x.lam, dual, dlam)
    u = torch.addcmul(x.u, primal, du)
    return w, u, lam


def drop_rows(x: Iterate, rows: Rows, index: Tensor, p: float) -> tuple[Iterate, Rows]:
    """The point and the rows named by index (B, n, fewer), which counts within each block."""
    B, n, R, _ = rows.A.left.shape
    flat = (index + torch.arange(0, n * R, R, device=index.device).view(n, 1)).view(B, -1)
    lam, aw, u, b, place = (y.gather(1, flat) for y in (x.lam, x.aw, x.u, rows.b, rows.place))
    rows = Rows(rows.A.keep_rows(index), b, place)
    return _normalised(x.w, aw, u, rows.A.adjoint(lam), lam, x.p, p), rows


def _normalised(
    w: Tensor, aw: Tensor, u: Tensor, s: Tensor, lam: Tensor, exponent: Tensor, p: float
) -> Iterate:
    """Scale w and lam, which keeps their directions, and take the logarithms."""
    log_w, size = _sizes(w, exponent, p)
    log_s, dual_size = _sizes(s, exponent / (exponent - 1), p)
    shrink = torch.exp(-size)
    w = w * shrink
    pairing = dot(w, s)
    pairing = torch.where(pairing > 0, pairing, 1.0)  # s = 0: lam is a Farkas certificate
    log_pairing = torch.log(pairing)
    if p != 2:
        log_w, log_s = log_w - size, log_s - log_pairing
    primal, dual = (w, aw * shrink, u * shrink), (s / pairing, lam / pairing)
    return Iterate(*primal, *dual, exponent, log_w, log_s, dual_size - log_pairing)


def _linearised_mirror_map(x: Iterate, gap: Tensor, goal: float) -> Link:
    r"""Return the model of the mirror map at x, in which H is a diagonal h.

    The optimality condition s = phi(w), phi(w) = sign(w)|w|^(p-1), also reads w = psi(s),
    psi(s) = sign(s)|s|^(q-1). Only one of the two has a bounded slope at zero, and that is
    the one to linearise:

        p <= 2:  f = psi(s),  h = (q-1)|s|^(q-2),              rho = f - w
        p >  2:  f = phi(w),  h = (q-1) max(|f|, floor)^(q-2),  rho = h (s - f)

    w is an iterate of its own in both cases. For p > 2, resetting it to psi(s) would undo what
    the linearisation gains, and h grows without bound at w = 0: the floor, 1e-2 gap times the
    largest |phi(w)|, bounds it. All exponents lie between 2 and `goal`.
    """
    r = 1 / (x.p - 1)  # q - 1
    if goal == 2:
        h, rho, f = torch.ones_like(x.s), x.s - x.w, x.s
    elif goal < 2:
        slope = torch.exp((r - 1) * x.log_s)
        f = slope * x.s
        h, rho = r * slope, f - x.w
    else:
        log_f = (x.p - 1) * x.log_w
        f = torch.copysign(torch.exp(log_f), x.w)
        lowest = log_f.amax(-1, True) + torch.log(1e-2 * gap.clamp_max(1).clamp_min(1e-16))
        h = r * torch.exp((r - 1) * torch.maximum(log_f, lowest))
        rho = h * (x.s - f)
    return Link(h, rho, f, h.mul, _signed_power)


def backtrack(
    slope: Callable[[Tensor], Tensor], slope_at_0: Tensor, step: Tensor, where: Tensor
) -> Tensor:
    """Halve the step until the barrier function no longer rises steeply; return the factor."""
    shrink = torch.ones_like(step)
    limit = 0.9 * slope_at_0.abs()
    for _ in range(8):
        steep = where & (slope(step * shrink) > limit)
        if not bool(steep.any()):
            break
        shrink = torch.where(steep, 0.5 * shrink, shrink)
    return shrink


def _sizes(x: Tensor, exponent: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return log|x| and log ||x||; p = 2 does not need the former and gets x in its place."""
    if p == 2:
        return x, 0.5 * torch.log(dot(x, x).clamp_min(1e-300))
    log_x = _log_abs(x)
    return log_x, _log_norm(log_x, exponent)


def _at_exponent(x: Iterate, p: Tensor) -> Iterate:
    """The same point normalised for another exponent, which needs no new logarithms."""
    size = _log_norm(x.log_w, p)
    grow = torch.exp(size)
    log_s = x.log_s + size
    primal, dual = (x.w / grow, x.aw / grow, x.u / grow), (x.s * grow, x.lam * grow)
    return Iterate(*primal, *dual, p, x.log_w - size, log_s, _log_norm(log_s, p / (p - 1)))


def _inverse_mirror(s: Tensor, p: Tensor) -> Tensor:
    """psi(s) = sign(s)|s|^(q-1), scaled to maximum 1."""
    log_s = _log_abs(s)
    return torch.exp((log_s - log_s.amax(-1, True)) / (p - 1)) * torch.sign(s)


def towards(p: float, current: Tensor, schedule: Schedule) -> Tensor:
    """The exponent one move nearer to p."""
    if p < 2:
        return ((current - 1) / schedule.factor + 1).clamp_min(p)
    return ((current - 1) * schedule.factor + 1).clamp_max(p)


def longest_step(lowest: Tensor) -> Tensor:
    """The longest step up to 1 that keeps x + a dx >= 0, from the lowest dx/x."""
    return 1 / (-lowest).clamp_min(1)


def _log_abs(x: Tensor) -> Tensor:
    """log|x|, finite at zero."""
    return torch.log(x.abs().clamp_min(_TINY))


def _log_norm(log_x: Tensor, p: Tensor) -> Tensor:
    """log ||x||_p from log|x|, without overflow or underflow."""
    top = log_x.amax(-1, True)
    return torch.log(_sum(torch.exp(p * (log_x - top)))) / p + top


def _signed_power(x: Tensor, exponent: Tensor) -> Tensor:
    """sign(x)|x|^exponent; exp(e log x) is four times faster than pow and accurate enough."""
    return torch.copysign(torch.exp(exponent * _log_abs(x)), x)


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)
