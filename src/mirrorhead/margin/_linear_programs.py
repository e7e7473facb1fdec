"""The limits p = 1 and p = inf, which are linear programs, by HiGHS."""

from __future__ import annotations

import numpy as np
import torch
from scipy import optimize, sparse
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult
from mirrorhead.margin._interior_point import solve as solve_lp

# HiGHS needs the matrix; beyond this many entries (800 MB) use a p near the limit instead.
MAX_ENTRIES = 100_000_000


def solve(A: ConstraintMatrix, b: Tensor, p: float) -> SolverResult:
    r"""min ||w||_1 (p = 1) or ||w||_inf (p = inf) subject to A w >= b, one problem at a time.

    p = 1 splits w = w+ - w-; p = inf bounds -t <= w <= t and minimises t. The multipliers of
    A w >= b are the dual solution. HiGHS reports infeasible problems without a certificate, so
    the interior point method solves those again; its Farkas certificate holds for every p.
    """
    if A.rows * A.columns > MAX_ENTRIES:
        raise ValueError(
            f"p={p:g} needs the constraint matrix, here {A.rows} x {A.columns}; at most "
            f"{MAX_ENTRIES:.0e} entries are allowed. Use p=1.02 or p=100 instead"
        )
    result = SolverResult.empty(A, b)
    everything = torch.arange(A.rows, device=b.device).unsqueeze(0)
    for k in range(A.batch):
        one = A.take(slice(k, k + 1))
        live = (b[k] > 0).cpu().numpy()
        bound = b[k].cpu().numpy()
        matrix = one.take_rows(everything)[0].cpu().numpy()[live] / bound[live, None]
        found = _linear_program(matrix, p)
        result.iterations[k] = int(found.nit)
        if found.status == 0:
            w = found.x[: A.columns]
            w = w - found.x[A.columns :] if p == 1 else w
            result.w[k] = torch.from_numpy(w)
            lam = np.zeros(A.rows)
            lam[live] = np.maximum(-found.ineqlin.marginals[: len(matrix)], 0) / bound[live]
            result.lam[k] = torch.from_numpy(lam)
        else:
            proof = solve_lp(one, b[k : k + 1], 2.0, 1e-9)
            result.infeasible[k], result.lam[k] = proof.infeasible[0], proof.lam[0]
    return result


def _linear_program(matrix: np.ndarray, p: float) -> optimize.OptimizeResult:
    m, N = matrix.shape
    if p == 1:
        cost = np.ones(2 * N)
        rows, bound, limits = np.hstack([-matrix, matrix]), -np.ones(m), (0, None)
    else:
        cost = np.append(np.zeros(N), 1.0)
        one, t = sparse.eye_array(N), np.full((N, 1), -1.0)
        rows = sparse.block_array([[-matrix, None], [one, t], [-one, t]], format="csc")
        bound, limits = np.append(-np.ones(m), np.zeros(2 * N)), (None, None)
    return optimize.linprog(
        cost,
        A_ub=rows,
        b_ub=bound,
        bounds=limits,
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
