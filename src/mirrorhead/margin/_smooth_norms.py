r"""The interior point method for `Schatten(p)` and `Grouped(p)` with 1 < p < inf.

It is that of `_interior_point.py` (docs/margin.md): the barrier and the exponent move together,
from p = 2 on. The mirror map and its derivative are those of the lengths of groups or of singular
values (`_shapes.py`), so the derivative is no diagonal matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead.geometry import Grouped, Schatten
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._linear_systems import RefinedSystem, refuse_large
from mirrorhead.margin._newton_step import Schedule
from mirrorhead.margin._shapes import Pair, Shape, shape_of

BUDGET = 1 << 20  # entries of the matrices of the problems that are solved at a time
_SCHEDULES = (
    Schedule(1.5, 0.5, 0.1, 50, 0),
    Schedule(1.25, 0.2, 0.1, 80, 0),
    Schedule(1.15, 0.1, 0.3, 150, 0),
)


class _Point(NamedTuple):
    """Normalised to ||w|| = 1 and <w, s> = 1, with s = A' lam."""

    w: Tensor  # (B, N)
    aw: Tensor  # (B, m)
    u: Tensor  # (B, m), the slack
    s: Tensor  # (B, N)
    lam: Tensor  # (B, m)
    p: Tensor  # (B, 1), the current exponent
    dual_norm: Tensor  # (B, 1), ||s||_*


def solve_smooth(
    A: ConstraintMatrix, b: Tensor, norm: Schatten | Grouped, weights: tuple[int, ...], tol: float
) -> SolverResult:
    """Minimise the norm subject to A w >= b for a batch of problems.

    The problem with p = 2 gives the Farkas certificate where there is no solution.
    """
    if norm.p == 2:
        return solve(A, b, 2.0, tol)
    refuse_large(A, norm)
    result = solve(A, b, 2.0, 1e-2)
    shape = shape_of(norm, A, weights)
    left = result.gap.isfinite().nonzero().squeeze(-1)
    result.gap[left] = math.inf
    for schedule in _SCHEDULES:
        for index in left.split(max(1, BUDGET // A.rows**2)) if len(left) else ():
            run = _Run(A.take(index), b[index], shape, norm.p, schedule)
            w, lam, gap, steps = run.iterate(tol)
            better = gap < result.gap[index]
            at = index[better]
            result.w[at], result.lam[at] = w[better], lam[better]
            result.gap[at] = gap[better]
            result.iterations[index] += steps
        left = left[result.gap[left] > tol]
    return result


@dataclass(frozen=True, eq=False)
class _Run:
    A: ConstraintMatrix
    b: Tensor  # (B, m)
    shape: Shape
    goal: float  # the exponent
    schedule: Schedule

    def iterate(self, tol: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the best weights and multipliers of each problem, their gaps, counts of steps."""
        run, x = self, self.start()
        index = torch.arange(len(x.w))
        w, lam = x.w.clone(), x.lam.clone()
        best, counts = x.w.new_full((len(w),), math.inf), torch.zeros(len(w), dtype=torch.long)
        for _ in range(self.schedule.iterations):
            gap = run.gap(x)
            better = (x.p == self.goal).squeeze(-1) & (gap.squeeze(-1) < best[index])
            at = index[better]
            w[at], lam[at], best[at] = x.w[better], x.lam[better], gap[better].squeeze(-1)
            going = (best[index] > tol) & x.w.isfinite().all(-1) & x.lam.isfinite().all(-1)
            keep = going.nonzero().squeeze(-1)
            if len(keep) < len(index):
                run = _Run(run.A.take(keep), run.b[keep], self.shape, self.goal, self.schedule)
                x, gap, index = _Point(*(y[keep] for y in x)), gap[keep], index[keep]
            if not len(index):
                break
            x = run.step(x, gap)
            counts[index] += 1
        return w, lam, best, counts

    def start(self) -> _Point:
        b = self.b
        share = b.clamp_min(0) / b.clamp_min(0).square().sum(-1, keepdim=True)
        share = share.where(b > 0, 0.01 / b.shape[-1])
        exponent = self.towards(b.new_full((len(b), 1), 2.0))
        s = self.A.adjoint(share)
        w = self.power(s, 1 / (exponent - 1))[0]
        x = self.normalised(w, s, share, self.A.apply(w), exponent)
        beta = 0.5 / _dot(b, x.lam)
        return x._replace(u=torch.maximum(x.aw - beta * b, 0.05 / (b.shape[-1] * x.lam)))

    def towards(self, current: Tensor) -> Tensor:
        factor = self.schedule.factor
        if self.goal < 2:
            return ((current - 1) / factor + 1).clamp_min(self.goal)
        return ((current - 1) * factor + 1).clamp_max(self.goal)

    def power(self, x: Tensor, exponent: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Return x with powers of its lengths, its frame and lengths; the largest length is 1."""
        lengths, frame = self.shape.split(x)
        lengths = lengths / lengths.amax(-1, keepdim=True).clamp_min(1e-300)
        return self.shape.join(frame, lengths**exponent), frame, lengths

    def normalised(self, w: Tensor, s: Tensor, lam: Tensor, u: Tensor, p: Tensor) -> _Point:
        size = _norm(self.shape.split(w)[0], p)
        w, u = w / size, u / size
        pairing = _dot(w, s)
        pairing = torch.where(pairing > 0, pairing, 1.0)
        s, lam = s / pairing, lam / pairing
        dual = _norm(self.shape.split(s)[0], p / (p - 1))
        return _Point(w, self.A.apply(w), u, s, lam, p, dual)

    def gap(self, x: _Point) -> Tensor:
        margin = torch.where(self.b > 0, x.aw / self.b, math.inf).amin(-1, keepdim=True)
        lower = _dot(self.b.clamp_min(0), x.lam)
        return (x.dual_norm / (lower * margin.clamp_min(0)) - 1).nan_to_num(math.inf)

    def step(self, x: _Point, gap: Tensor) -> _Point:
        """Take one predictor-corrector step, as `newton_step` in `_newton_step.py` does."""
        b = self.b
        moving = x.p != self.goal
        if bool(moving.any()):
            p = torch.where(moving & (gap < self.schedule.threshold), self.towards(x.p), x.p)
            x = self.normalised(x.w, x.s, x.lam, x.u, p)
        q = x.p / (x.p - 1)
        product = x.lam * x.u
        complementarity = product.sum(-1, keepdim=True)
        target = (1 - complementarity).clamp_min(0.1) / _dot(b, x.lam) * b
        fenchel = (x.dual_norm**q - 1) / q
        derivative, rho, f = self.linearised(x, gap)
        system = RefinedSystem(self.shape.gram(self.A, *derivative), x.u / x.lam)
        residual = target - x.aw - self.A.apply(rho)

        r = system.solve(residual) / x.lam
        dual, primal = _longest(r.amin(-1, True)), _longest(-1 - r.amax(-1, True))
        after = (product * (1 + dual * r) * (1 - primal - primal * r)).sum(-1, keepdim=True)
        sigma = (after / complementarity).clamp(0, 1) ** 4
        sigma = torch.where(moving, sigma.clamp_min(self.schedule.floor), sigma)
        mu = sigma * (complementarity + fenchel) / b.shape[-1]

        push = mu / x.lam + dual * x.u * r * (1 + r)
        dlam = system.solve(residual + push)
        r = dlam / x.lam
        du = push - x.u * (1 + r)
        ds = self.A.adjoint(dlam)
        dw = rho + self.shape.multiply(*derivative, ds)
        fraction = (1 - gap).clamp_min(0.99).clamp_max(1 - 1e-8)
        dual = fraction * _longest(r.amin(-1, True))
        primal = fraction * _longest((du / x.u).amin(-1, True))
        if self.goal < 2:
            linear = _dot(target, dlam)

            def slope(a: Tensor) -> Tensor:
                value = self.mapped(x.s + a * ds, q - 1)
                return _dot(value, ds) - linear - mu * (r / (1 + a * r)).sum(-1, keepdim=True)

            at_0 = _dot(f, ds) - linear - mu * r.sum(-1, keepdim=True)
            shrink = _backtrack(slope, at_0, dual, gap > 1e-4)
            primal, dual = primal * shrink, dual * shrink
        else:
            new_s, new_lam = x.s + ds, x.lam + dlam

            def slope(a: Tensor) -> Tensor:
                value = self.mapped(x.w + a * dw, x.p - 1)
                return _dot(value - new_s, dw) + _dot(new_lam - mu / (x.u + a * du), du)

            at_0 = _dot(f - new_s, dw) + _dot(new_lam - mu / x.u, du)
            primal = primal * _backtrack(slope, at_0, primal, gap > 0)
        lam = x.lam + dual * dlam
        s = self.A.adjoint(lam)
        w = x.w + primal * dw
        astray = _dot(w, s) <= 0
        if bool(astray.any()):
            w = torch.where(astray, self.power(s, 1 / (x.p - 1))[0], w)
        return self.normalised(w, s, lam, x.u + primal * du, x.p)

    def mapped(self, x: Tensor, exponent: Tensor) -> Tensor:
        lengths, frame = self.shape.split(x)
        return self.shape.join(frame, lengths**exponent)

    def linearised(self, x: _Point, gap: Tensor) -> tuple[tuple[Any, Pair], Tensor, Tensor]:
        """Return H, rho and f of the model dw = H ds + rho; `_newton_step.py` explains."""
        shape = self.shape
        if self.goal < 2:
            exponent = 1 / (x.p - 1)
            lengths, frame = shape.split(x.s)
            f = shape.join(frame, lengths**exponent)
            slopes = shape.slopes(lengths, exponent)
        else:
            exponent = x.p - 1
            lengths, frame = shape.split(x.w)
            f = shape.join(frame, lengths**exponent)
            least = (1e-2 * gap.clamp_max(1).clamp_min(1e-16)) ** (1 / exponent)
            floored = torch.maximum(lengths, least * lengths.amax(-1, keepdim=True))
            one, two = shape.slopes(floored, exponent)
            slopes = 1 / one, 1 / two

        rho = f - x.w if self.goal < 2 else shape.multiply(frame, slopes, x.s - f)
        return (frame, slopes), rho, f


def _backtrack(
    slope: Callable[[Tensor], Tensor], at_0: Tensor, step: Tensor, where: Tensor
) -> Tensor:
    shrink = torch.ones_like(step)
    for _ in range(8):
        steep = where & (slope(step * shrink) > 0.9 * at_0.abs())
        if not bool(steep.any()):
            break
        shrink = torch.where(steep, 0.5 * shrink, shrink)
    return shrink


def _longest(lowest: Tensor) -> Tensor:
    return 1 / (-lowest).clamp_min(1)


def _norm(lengths: Tensor, p: Tensor) -> Tensor:
    top = lengths.amax(-1, keepdim=True).clamp_min(1e-300)
    return ((lengths / top) ** p).sum(-1, keepdim=True) ** (1 / p) * top


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)
