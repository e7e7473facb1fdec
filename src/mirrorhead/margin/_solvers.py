"""Which solver takes which norm. A norm without one is refused before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mirrorhead.geometry import Grouped, Norm, PNorm, Schatten, as_norm
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._group_cone import solve_groups
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._newton_step import Start
from mirrorhead.margin._other_norms import solve_polyhedral
from mirrorhead.margin._smooth_norms import solve_smooth
from mirrorhead.margin._spectral_cone import solve_spectral


class Task(NamedTuple):
    """What is asked of a solver, beside the constraints."""

    norm: Norm
    weights: tuple[int, ...]  # the shape of one problem's weights
    tol: float
    start: Start = None  # w and lam of a similar problem


Solve = Callable[[ConstraintMatrix, Tensor, Task], SolverResult]


class Solver(NamedTuple):
    """A solver and the norms that it declares: a class and its exponents."""

    kind: type[PNorm] | type[Schatten] | type[Grouped]
    takes: Callable[[float], bool]
    solve: Solve


def _smooth(p: float) -> bool:
    return 1 < p < math.inf


def _limits(p: float) -> bool:
    return p in (1, math.inf)


SOLVERS = (
    Solver(PNorm, _smooth, lambda A, b, to: solve(A, b, to.norm.p, to.tol, to.start)),
    Solver(PNorm, _limits, lambda A, b, to: solve_polyhedral(A, b, to.norm.p)),
    *(
        Solver(kind, _smooth, lambda A, b, to: solve_smooth(A, b, to.norm, to.weights, to.tol))
        for kind in (Schatten, Grouped)
    ),
    Solver(Schatten, _limits, lambda A, b, to: solve_spectral(A, b, to.norm, to.tol)),
    Solver(Grouped, _limits, lambda A, b, to: solve_groups(A, b, to.norm, to.weights, to.tol)),
)


class Choice(NamedTuple):
    """A norm and its solver."""

    norm: Norm
    solve: Solve


def choose(geometry: float | Norm, name: str = "geometry") -> Choice:
    """Return a norm and its solver, or an error that says which norms have one."""
    norm = as_norm(geometry, name)
    for solver in SOLVERS:
        # A class derived from one of these may be another norm.
        if type(norm) is solver.kind and solver.takes(norm.p):
            return Choice(norm, solver.solve)
    raise ValueError(
        f"{name} must be a norm that has a solver, got {norm!r}. Solvers know PNorm(p),"
        " Schatten(p) and Grouped(p) with 1 <= p <= inf"
    )
