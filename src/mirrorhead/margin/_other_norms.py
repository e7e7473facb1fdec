"""The p-norms at p = 1 and p = inf, which are linear programs."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from mirrorhead.margin._active_set import sharpen_vertex
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve

# HiGHS needs the matrix; beyond this many entries (800 MB) use a p near the limit instead.
MAX_ENTRIES = 100_000_000
# A solution w of a linear program, the multipliers of its rows, and the number of iterations.
Found: TypeAlias = tuple[np.ndarray, np.ndarray, int]


def solve_polyhedral(A: ConstraintMatrix, b: Tensor, p: float) -> SolverResult:
    """min ||w||_1 (p = 1) or ||w||_inf (p = inf) subject to A w >= b, by HiGHS, one at a time.

    The interior point method first solves p = 2 for all problems together: its proof of
    infeasibility holds for every p, and its solution gives the scale of the others.
    """
    if A.rows * A.columns > MAX_ENTRIES:
        raise ValueError(
            f"p={p:g} needs the constraint matrix, here {A.rows} x {A.columns}; at most "
            f"{MAX_ENTRIES:.0e} entries are allowed. Use p=1.02 or p=100 instead"
        )
    result = SolverResult.empty(A, b)
    start = solve(A, b, 2.0, 1e-9)
    for k in range(A.batch):
        if start.infeasible[k]:
            result.infeasible[k], result.lam[k] = True, start.lam[k]
            continue
        live = (b[k] > 0).nonzero().mT  # not empty: problems without constraints need no solver
        bound = b[k, live[0]].cpu().numpy()
        matrix = A.take(slice(k, k + 1)).take_rows(live)[0].cpu().numpy() / bound[:, None]
        scale = float(start.w[k].abs().max())
        found = _smallest_sum(matrix) if p == 1 else _largest_margin(matrix, scale)
        w, lam, result.iterations[k] = found
        result.w[k] = torch.from_numpy(w)
        result.lam[k, live[0]] = torch.from_numpy(np.maximum(lam, 0) / bound).to(b.device)
        if w.any() and lam.any():
            at = slice(k, k + 1)
            result.w[at], result.lam[at] = sharpen_vertex(
                A.take(at), b[at], result.w[at], result.lam[at], p
            )
    return result


def _smallest_sum(matrix: np.ndarray) -> Found:
    """min ||w||_1 subject to A w >= 1: w = w+ - w-, both at least 0."""
    m, N = matrix.shape
    found = _highs(np.ones(2 * N), np.hstack([-matrix, matrix]), -np.ones(m), (0, None))
    if found.status != 0:
        return np.zeros(N), np.zeros(m), int(found.nit)
    return found.x[:N] - found.x[N:], -found.ineqlin.marginals, int(found.nit)


def _largest_margin(matrix: np.ndarray, scale: float) -> Found:
    """min ||w||_inf subject to A w >= 1, as the largest g with B A s >= g in the box |s| <= 1.

    The solution is w = B s / g. Rows -t <= w <= t instead of the box would take five times as long.
    HiGHS's tolerances are absolute; B is the largest entry of the solution for p = 2, so g is at
    least 1 and at most about sqrt(N).
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
    accuracy = {f"{side}_feasibility_tolerance": 1e-10 for side in ("primal", "dual")}
    return optimize.linprog(cost, rows, bound, bounds=limits, method="highs-ds", options=accuracy)
