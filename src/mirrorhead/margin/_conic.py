r"""A primal-dual method for norms that are cone programs: `Schatten` and `Grouped`, p = 1 and inf.

Each norm belongs to a symmetric cone of pairs x = (t, w) with "the lengths of w are at most t".
The dual slack z = (y, -s) lies in the same cone, with s = A' lam, and the central path is

    A w - u = b,    x o z = mu e,    u lam = mu.

For p = 1 the program minimises the sum of t, and y = e. For p = inf t is a multiple of e, and the
sum of y is 1. The directions are those of Nesterov and Todd: a map takes x and z to one point of
the cone, `scaled`, and a step asks there for dx + dz = r. Predictor and corrector are Mehrotra's.
`_group_cone.py` and `_spectral_cone.py` define the cones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._linear_systems import RefinedSystem

MAX_ITERATIONS = 100
_BUDGET = 1 << 21  # numbers in the matrices of the problems that are solved at a time
PATIENCE = 8  # a run ends when a finite gap has not fallen for this many steps


class Point(NamedTuple):
    """A point of the program, or a move of it."""

    x: Tensor  # in the cone
    z: Tensor  # in the cone
    u: Tensor  # (B, m) > 0, the slack
    lam: Tensor  # (B, m) > 0


class Move(NamedTuple):
    by: Point
    x: Tensor  # the same in scaled coordinates
    z: Tensor


class Scaling(ABC):
    """The coordinates of a step in which x and z are the same, and the linear system in them.

    What a step asks for, dx + dz = r, leaves dw = fixed(r) + H ds + dt gain, with the number dt
    only for p = inf, where lift = A gain and <gain, ds> - bend dt + surplus(r) = 0.
    """

    program: Any  # of the class that belongs to this one
    at: Point
    point: Tensor  # x and z in these coordinates
    system: RefinedSystem  # A H A' + diag(u / lam), for p = inf with the border (lift, bend)

    @abstractmethod
    def centred(self, mu: Tensor, products: tuple[Tensor, Tensor]) -> Tensor:
        """Return r with point o (point + r) = mu e - the product of the two."""

    @abstractmethod
    def fixed(self, r: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return what `moved` needs to know of r, fixed(r) and surplus(r)."""

    @abstractmethod
    def moved(self, r: Tensor, known: Any, ds: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        """Return dx, dz, and dz in scaled coordinates."""

    @abstractmethod
    def least(self, *moves: Tensor) -> list[Tensor]:
        """Return the smallest eigenvalue, (B,), of each scaled move relative to the point."""

    @abstractmethod
    def inner(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the inner product of the cone, (B,); that of the point with itself is <x, z>."""

    def direction(self, r: Tensor, push: Tensor) -> Move:
        """Solve for dx + dz = r in scaled coordinates and u + du = push - (u/lam) dlam."""
        program, (x, _, u, lam) = self.program, self.at
        known, fixed, surplus = self.fixed(r)
        right = program.b + push - program.A.apply(program.weights(x) + fixed)
        dlam, dt = self.system.solve_bordered(right, -surplus)
        dx, dz, scaled = self.moved(r, known, program.A.adjoint(dlam), dt)
        return Move(Point(dx, dz, push - u - u / lam * dlam, dlam), r - scaled, scaled)


class Program(ABC):
    """A batch of cone programs."""

    A: ConstraintMatrix
    b: Tensor  # (B, m)
    degree: float  # <x, z> / mu on the central path

    @abstractmethod
    def take(self, keep: Tensor) -> Program:
        """Return the programs named by `keep`."""

    @abstractmethod
    def start(self, w: Tensor) -> Point:
        """Return a feasible point near the central path, from weights with margin 1.5."""

    @abstractmethod
    def weights(self, x: Tensor) -> Tensor:
        """Return w, (B, N)."""

    @abstractmethod
    def bounds(self, point: Point) -> tuple[Tensor, Tensor]:
        """Return upper bounds of the norm of w and of the dual norm of A' lam, (B,) each."""

    @abstractmethod
    def scaling(self, point: Point) -> Scaling: ...

    @abstractmethod
    def tidied(self, point: Point) -> Point:
        """Return the point without what rounding did to its fixed parts."""

    def compiled(self, point: Point, tol: float) -> tuple[Tensor, ...] | None:
        """Return what `_iterate` does, by a compiled kernel; None if there is none."""
        return None

    def margin(self, w: Tensor) -> Tensor:
        values = torch.where(self.b > 0, self.A.apply(w) / self.b, math.inf)
        return values.amin(-1)

    def gap(self, point: Point) -> Tensor:
        """Return the gap, (B,), inf where the point proves nothing."""
        margin = self.margin(self.weights(point.x))
        upper, dual = self.bounds(point)
        lower = (self.b.clamp_min(0) * point.lam).sum(-1)
        gap = upper * dual / (margin * lower) - 1
        real = (margin > 0) & (lower > 0) & (gap > -1e-6)
        return torch.where(real, gap, math.inf).nan_to_num(math.inf)


def solve_program(A: ConstraintMatrix, b: Tensor, program: Program, tol: float) -> SolverResult:
    """Solve the programs, of which p = 2 gives the start and the Farkas certificates."""
    result = solve(A, b, 2.0, 1e-2)
    todo = result.gap.isfinite().nonzero().squeeze(-1)
    for index in todo.split(max(1, _BUDGET // A.rows**2)) if len(todo) else ():
        w = result.w[index]
        w = 1.5 / program.take(index).margin(w).unsqueeze(-1) * w
        # Tokens that differ in their last bits may leave no margin after rounding.
        u = A.take(index).apply(w) - b[index]
        inside = ((u > 0) & u.isfinite() & (1 / u).isfinite()).all(-1) & w.isfinite().all(-1)
        result.gap[index[~inside]] = math.inf
        index, w = index[inside], w[inside]
        if not len(index):
            continue
        some = program.take(index)
        point = some.start(w)
        found = some.compiled(point, tol) or _iterate(some, point, tol)
        result.w[index], result.lam[index], result.gap[index] = found[:3]
        result.iterations[index] += found[3]
    return result


def _iterate(program: Program, point: Point, tol: float) -> tuple[Tensor, ...]:
    """Return the best weights and multipliers of each problem, their gaps, and counts of steps."""
    w, lam = program.weights(point.x).clone(), point.lam.clone()
    best = point.u.new_full((len(w),), math.inf)
    counts, since = torch.zeros(2, len(w), dtype=torch.long, device=w.device)
    index = torch.arange(len(w), device=w.device)
    for step in range(MAX_ITERATIONS):
        gap = program.gap(point)
        better = gap < best[index]
        at = index[better]
        w[at], lam[at], best[at] = program.weights(point.x)[better], point.lam[better], gap[better]
        since[at] = step
        fell = (step - since[index] < PATIENCE) | best[index].isinf()
        sound = torch.stack([x.flatten(1).isfinite().all(-1) for x in point]).all(0)
        keep = ((gap > tol) & fell & sound).nonzero().squeeze(-1)
        if len(keep) < len(index):
            program, index = program.take(keep), index[keep]
            point = Point(*(x[keep] for x in point))
        if not len(index):
            break
        point = _step(program, point)
        counts[index] += 1
    return w, lam, best, counts


def _step(program: Program, point: Point) -> Point:
    """Take one predictor-corrector step."""
    _, _, u, lam = point
    scaling = program.scaling(point)
    now = scaling.inner(scaling.point, scaling.point) + (u * lam).sum(-1)

    def lengths(move: Move) -> tuple[Tensor, Tensor]:
        """The longest steps that x and u, and z and lam, can take."""
        x, z = scaling.least(move.x, move.z)
        primal = torch.minimum(x, (move.by.u / u).amin(-1))
        dual = torch.minimum(z, (move.by.lam / lam).amin(-1))
        return 1 / (-primal).clamp_min(1e-9), 1 / (-dual).clamp_min(1e-9)

    move = scaling.direction(-scaling.point, torch.zeros_like(u))
    primal, dual = (step.clamp_max(1) for step in lengths(move))
    x = scaling.point + along(primal, move.x)
    z = scaling.point + along(dual, move.z)
    after = scaling.inner(x, z)
    after += ((u + along(primal, move.by.u)) * (lam + along(dual, move.by.lam))).sum(-1)
    mu = (after / now).clamp(0, 1) ** 2 * now / (program.degree + u.shape[-1])
    # The products of the predictor, which the linear model leaves out.
    r = scaling.centred(mu, (move.x, move.z))
    near = 0.9 + 0.09 * torch.minimum(primal, dual)
    move = scaling.direction(r, mu.unsqueeze(-1) / lam - move.by.u * move.by.lam / lam)
    primal, dual = ((near * step).clamp_max(1) for step in lengths(move))
    by = zip(point, move.by, (primal, dual, primal, dual), strict=True)
    new = program.tidied(Point(*(old + along(step, new) for old, new, step in by)))
    slack = program.A.apply(program.weights(new.x)) - program.b
    return new._replace(u=torch.maximum(slack, 1e-3 * new.u))


def along(step: Tensor, x: Tensor) -> Tensor:
    """Return x times a number for each problem, (B,)."""
    return step.view(-1, *[1] * (x.dim() - 1)) * x
