"""The limits p = 1 and p = inf, which are linear programs, by HiGHS."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult
from mirrorhead.margin._interior_point import solve as solve_lp

# HiGHS needs the matrix; beyond this many entries (800 MB) use a p near the limit instead.
MAX_ENTRIES = 100_000_000


def solve(A: ConstraintMatrix, b: Tensor, p: float) -> SolverResult:
    r"""min ||w||_1 (p = 1) or ||w||_inf (p = inf) subject to A w >= b.

    The interior point method first solves p = 2 for all problems together: its proof of
    infeasibility holds for every p, and its solution gives the scale of the others. HiGHS then
    solves the feasible problems one at a time.
    """
    if A.rows * A.columns > MAX_ENTRIES:
        raise ValueError(
            f"p={p:g} needs the constraint matrix, here {A.rows} x {A.columns}; at most "
            f"{MAX_ENTRIES:.0e} entries are allowed. Use p=1.02 or p=100 instead"
        )
    result = SolverResult.empty(A, b)
    start = solve_lp(A, b, 2.0, 1e-9)
    everything = torch.arange(A.rows, device=b.device).unsqueeze(0)
    for k in range(A.batch):
        if start.infeasible[k]:
            result.infeasible[k], result.lam[k] = True, start.lam[k]
            continue
        live = (b[k] > 0).cpu().numpy()
        if not live.any():
            continue  # nothing is asked for: w = 0
        bound = b[k].cpu().numpy()[live]
        one = A.take(slice(k, k + 1))
        matrix = one.take_rows(everything)[0].cpu().numpy()[live] / bound[:, None]
        scale = float(start.w[k].abs().max())
        w, lam, result.iterations[k] = (
            _smallest_sum(matrix) if p == 1 else _largest_margin(matrix, scale)
        )
        result.w[k] = torch.from_numpy(w)
        full = np.zeros(A.rows)
        full[live] = np.maximum(lam, 0) / bound
        result.lam[k] = torch.from_numpy(full)
    return result


# A solution w, the multipliers of its rows, and the number of iterations.
Found: TypeAlias = tuple[np.ndarray, np.ndarray, int]


def _smallest_sum(matrix: np.ndarray) -> Found:
    """min ||w||_1 subject to A w >= 1: w = w+ - w-, both at least 0."""
    m, N = matrix.shape
    found = _highs(np.ones(2 * N), np.hstack([-matrix, matrix]), -np.ones(m), (0, None))
    if found.status != 0:
        return np.zeros(N), np.zeros(m), int(found.nit)
    return found.x[:N] - found.x[N:], -found.ineqlin.marginals, int(found.nit)


def _largest_margin(matrix: np.ndarray, scale: float) -> Found:
    """min ||w||_inf subject to A w >= 1, as the largest g with B A s >= g in the box |s| <= 1.

    The solution is w = B s / g. The simplex method knows boxes; rows -t <= w <= t would be 2 N
    more constraints: that takes five times as long and more. HiGHS's tolerances are absolute; B is
    the largest entry of the solution for p = 2, so g is at least 1 and at most about sqrt(N).
    """
    m, N = matrix.shape
    cost, rows = np.append(np.zeros(N), -1.0), np.hstack([-scale * matrix, np.ones((m, 1))])
    limits = np.tile([-1.0, 1.0], (N + 1, 1))
    limits[N] = 0, np.inf
    found = _highs(cost, rows, np.zeros(m), limits)
    if found.status != 0 or found.x[N] <= 0:
        return np.zeros(N), np.zeros(m), int(found.nit)
    factor = scale / found.x[N]
    return factor * found.x[:N], -factor * found.ineqlin.marginals, int(found.nit)


def _highs(
    cost: np.ndarray, rows: np.ndarray, bound: np.ndarray, limits: object
) -> optimize.OptimizeResult:
    return optimize.linprog(
        cost,
        A_ub=rows,
        b_ub=bound,
        bounds=limits,
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
