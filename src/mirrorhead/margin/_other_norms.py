"""The other norms: p = 1 and p = inf, which are linear programs, and the nuclear norm."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from mirrorhead.margin._active_set import sharpen_vertex
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._linear_systems import LAST_RESORT, cholesky, cholesky_solve

# HiGHS needs the matrix; beyond this many entries (800 MB) use a p near the limit instead.
MAX_ENTRIES = 100_000_000
# A solution w of a linear program, the multipliers of its rows, and the number of iterations.
Found: TypeAlias = tuple[np.ndarray, np.ndarray, int]
MAX_ITERATIONS = 200  # of Newton's method for the nuclear norm


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


def solve_nuclear(A: ConstraintMatrix, b: Tensor, tol: float) -> SolverResult:
    r"""Certified nuclear-norm solutions, one problem at a time.

    The dual is max b' lam subject to ||S||_op <= 1, S = A' lam, lam >= 0, with as many
    variables as constraints. Newton's method follows the minimisers of

        -b' lam - mu (log det(I - S' S) + sum log lam)

    to mu = 0. With G = (I - S S')^-1, F = (I - S' S)^-1 and Q = G S, its gradient is
    A W - b - mu / lam at W = 2 mu Q, and a Newton step carries W to
    2 mu (Q + G dS F + Q dS' Q), which meets A W >= b exactly as soon as dlam <= lam: a
    feasible W at every step, and so a gap. The Hessian needs only products of the factors:
    entry (k, l) of A (G A'(.) F) is (left_k' G left_l)(right_k' F right_l).

    The problem with p = 2 gives the start, and the Farkas certificate where there is no solution.
    """
    if A.rows > LAST_RESORT:
        raise ValueError(
            f"norm='nuclear' takes at most {LAST_RESORT} constraints per problem, got {A.rows}"
        )
    result = solve(A, b, 2.0, 1e-2)
    n, R, a = A.left.shape[1:]
    for k in range(A.batch):
        if math.isfinite(float(result.gap[k])):
            live = b[k] > 0  # padding is no constraint, and has no multiplier
            left = A.left[k].reshape(n * R, a)[live]
            right = A.right[k].repeat_interleave(R, 0)[live]
            w, lam, gap, iterations = _follow(left, right, b[k, live], result.lam[k, live], tol)
            result.w[k], result.gap[k] = w, gap
            result.lam[k] = torch.zeros_like(b[k]).masked_scatter_(live, lam)
            result.iterations[k] += iterations
    return result


def _follow(
    left: Tensor, right: Tensor, b: Tensor, lam: Tensor, tol: float
) -> tuple[Tensor, Tensor, float, int]:
    """Follow the central path of one problem from near lam to its end.

    left: (m, a) and right: (m, c), the factors of each row; b, lam: (m,), b > 0, lam >= 0.
    Returns the best weights (N,) and multipliers (m,), their gap, and the number of steps.
    """
    a, c = left.shape[1], right.shape[1]

    def pull(x: Tensor) -> Tensor:
        return left.mT @ (x.unsqueeze(-1) * right)

    def push(W: Tensor) -> Tensor:
        return (left @ W * right).sum(-1)

    # The start may have multipliers 0, of constraints that do not matter at p = 2. The barrier
    # needs all of them positive.
    lam = 0.95 / (b @ lam) * lam + 0.05 / (b @ b) * b
    lam = lam * (0.5 / torch.linalg.matrix_norm(pull(lam), 2))
    mu = float(b @ lam) / (len(b) + a)
    best, best_gap, steps = (b.new_zeros(a * c), lam), math.inf, 0
    while steps < MAX_ITERATIONS:
        steps += 1
        S = pull(lam)
        U, sigma, Vt = torch.linalg.svd(S)
        k = len(sigma)
        grow = 1 / ((1 - sigma) * (1 + sigma))
        U, Vt = U[:, :k], Vt[:k]
        G = torch.eye(a).to(b) + (U * (grow - 1)) @ U.mT
        F = torch.eye(c).to(b) + (Vt.mT * (grow - 1)) @ Vt
        Q = (U * (grow * sigma)) @ Vt
        cross = left @ Q @ right.mT  # (m, m)
        H = 2 * mu * ((left @ G @ left.mT) * (right @ F @ right.mT) + cross * cross.mT)
        H.diagonal().add_(mu / lam.square())
        gradient = b - 2 * mu * push(Q) + mu / lam
        step = cholesky_solve(cholesky(H.unsqueeze(0)), gradient.unsqueeze(0)).squeeze(0)
        if not bool(step.isfinite().all()):
            break  # rounding errors dominate: keep the best point so far
        decrement = math.sqrt(max(float(step @ gradient), 0.0) / mu)
        dS = pull(step)
        W = 2 * mu * (Q + G @ dS @ F + Q @ dS.mT @ Q)
        margin = float((push(W) / b).min())
        if margin > 0:
            upper = float(torch.linalg.svdvals(W).sum()) / margin
            gap = upper * float(sigma[0]) / float(b @ lam) - 1
            if gap < best_gap:
                best, best_gap = (W.reshape(-1), lam), gap
            if gap <= tol:
                break
        size = min(1.0, 0.95 / max(float((-step / lam).max()), 1e-300))
        room = 1 - 0.05 * (1 - float(sigma[0]))
        while size > 1e-12 and float(torch.linalg.svdvals(S + size * dS)[0]) >= room:
            size *= 0.7
        if decrement > 0.5:
            while size > 1e-3 and _slope(lam, size, step, S, dS, b, mu) > 0.5 * mu * decrement**2:
                size *= 0.5
        lam = lam + size * step
        if decrement < 1:
            mu *= 0.1
    return best[0], best[1], best_gap, steps


def _slope(
    lam: Tensor, size: float, step: Tensor, S: Tensor, dS: Tensor, b: Tensor, mu: float
) -> float:
    """The derivative of the barrier function along the step."""
    new = S + size * dS
    Q = torch.linalg.solve(torch.eye(new.shape[1]).to(b) - new.mT @ new, new.mT).mT
    barrier = 2 * (Q * dS).sum() - (step / (lam + size * step)).sum()
    return float(mu * barrier - b @ step)
