r"""The interior point method for `Schatten(p)` and `Grouped(p)` with 1 < p < inf.

It is that of `_interior_point.py` (docs/margin.md): the barrier and the exponent move together,
from p = 2 on. The mirror map and its derivative are those of the lengths of groups or of singular
values (`_shapes.py`), so the derivative is no diagonal matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mirrorhead.geometry import Grouped, Schatten
from mirrorhead.margin import _newton_step as steps
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._linear_systems import RefinedSystem, refuse_large
from mirrorhead.margin._newton_step import Iterate, Rows, Schedule
from mirrorhead.margin._shapes import Shape, shape_of

BUDGET = 1 << 20  # entries of the matrices of the problems that are solved at a time
_SCHEDULES = (
    Schedule(1.5, 0.5, 0.1, 50, 0),
    Schedule(1.25, 0.2, 0.1, 80, 0),
    Schedule(1.15, 0.1, 0.3, 150, 0),
)


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
    shape, every = shape_of(norm, A, weights), Rows(A, b, b)
    left = result.gap.isfinite().nonzero().squeeze(-1)
    result.gap[left] = math.inf
    for schedule in _SCHEDULES:
        for index in left.split(max(1, BUDGET // A.rows**2)) if len(left) else ():
            run = _Run(every.take(index), shape, norm.p, schedule)
            w, lam, gap, counts = run.iterate(tol)
            better = gap < result.gap[index]
            at = index[better]
            result.w[at], result.lam[at] = w[better], lam[better]
            result.gap[at] = gap[better]
            result.iterations[index] += counts
        left = left[result.gap[left] > tol]
    return result


@dataclass(frozen=True, eq=False)
class _Run:
    rows: Rows
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
            gap = run.rows.gap(x)
            better = (x.p == self.goal).squeeze(-1) & (gap.squeeze(-1) < best[index])
            at = index[better]
            w[at], lam[at], best[at] = x.w[better], x.lam[better], gap[better].squeeze(-1)
            going = (best[index] > tol) & x.w.isfinite().all(-1) & x.lam.isfinite().all(-1)
            keep = going.nonzero().squeeze(-1)
            if len(keep) < len(index):
                run = replace(run, rows=run.rows.take(keep))
                x, gap, index = x.take(keep), gap[keep], index[keep]
            if not len(index):
                break
            x = run.step(x, gap)
            counts[index] += 1
        return w, lam, best, counts

    def start(self) -> Iterate:
        A, b = self.rows.A, self.rows.b
        share = steps.first_multipliers(b)
        exponent = steps.towards(self.goal, b.new_full((len(b), 1), 2.0), self.schedule)
        s = A.adjoint(share)
        w = self.power(s, 1 / (exponent - 1))
        x = self.normalised(w, s, share, A.apply(w), exponent)
        beta = 0.5 / steps.dot(b, x.lam)
        return x._replace(u=torch.maximum(x.aw - beta * b, 0.05 / (b.shape[-1] * x.lam)))

    def power(self, x: Tensor, exponent: Tensor) -> Tensor:
        """Return x with powers of its lengths, the largest of which is 1."""
        lengths, frame = self.shape.split(x)
        lengths = lengths / lengths.amax(-1, keepdim=True).clamp_min(1e-300)
        return self.shape.join(frame, lengths**exponent)

    def normalised(self, w: Tensor, s: Tensor, lam: Tensor, u: Tensor, p: Tensor) -> Iterate:
        size = _norm(self.shape.split(w)[0], p)
        w, u = w / size, u / size
        pairing = steps.dot(w, s)
        pairing = torch.where(pairing > 0, pairing, 1.0)
        s, lam = s / pairing, lam / pairing
        dual = _norm(self.shape.split(s)[0], p / (p - 1)).log()
        return Iterate(w, self.rows.A.apply(w), u, s, lam, p, w, s, dual)

    def step(self, x: Iterate, gap: Tensor) -> Iterate:
        """Take one predictor-corrector step, as `newton_step` in `_newton_step.py` does."""
        moving = x.p != self.goal
        if bool(moving.any()):
            further = steps.towards(self.goal, x.p, self.schedule)
            p = torch.where(moving & (gap < self.schedule.threshold), further, x.p)
            x = self.normalised(x.w, x.s, x.lam, x.u, p)
        link = self.linearised(x, gap)
        system = RefinedSystem(self.shape.gram(self.rows.A, *link.slope), x.u / x.lam)
        course = self.goal, self.schedule, moving

        def solve(r: Tensor, guess: Tensor | None, tol: float) -> Tensor:
            return system.solve(r)

        w, u, lam = steps.moved(x, self.rows, link, solve, 0.0, course, gap)
        s = self.rows.A.adjoint(lam)
        astray = steps.dot(w, s) <= 0
        if bool(astray.any()):
            w = torch.where(astray, self.power(s, 1 / (x.p - 1)), w)
        return self.normalised(w, s, lam, u, x.p)

    def mapped(self, x: Tensor, exponent: Tensor) -> Tensor:
        lengths, frame = self.shape.split(x)
        return self.shape.join(frame, lengths**exponent)

    def linearised(self, x: Iterate, gap: Tensor) -> steps.Link:
        """Return the model of the mirror map; `_newton_step.py` explains."""
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

        multiply = partial(shape.multiply, frame, slopes)
        rho = f - x.w if self.goal < 2 else multiply(x.s - f)
        return steps.Link((frame, slopes), rho, f, multiply, self.mapped)


def _norm(lengths: Tensor, p: Tensor) -> Tensor:
    top = lengths.amax(-1, keepdim=True).clamp_min(1e-300)
    return ((lengths / top) ** p).sum(-1, keepdim=True) ** (1 / p) * top
