"""The nuclear norm: min ||W||_* subject to A W >= b, by a barrier method on its dual."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult
from mirrorhead.margin._interior_point import solve as solve_lp
from mirrorhead.margin._linear_systems import LAST_RESORT, cholesky, cholesky_solve

MAX_ITERATIONS = 200


def solve(A: ConstraintMatrix, b: Tensor, tol: float) -> SolverResult:
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
    result = solve_lp(A, b, 2.0, 1e-2)
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
    best, best_gap = (b.new_zeros(a * c), lam), math.inf
    steps = 0
    while steps < MAX_ITERATIONS:
        steps += 1
        S = pull(lam)
        U, sigma, Vt = torch.linalg.svd(S)
        k = len(sigma)
        grow = 1 / ((1 - sigma) * (1 + sigma))
        G = torch.eye(a, dtype=b.dtype, device=b.device) + (U[:, :k] * (grow - 1)) @ U[:, :k].mT
        F = torch.eye(len(Vt), dtype=b.dtype, device=b.device)
        F = F + (Vt[:k].mT * (grow - 1)) @ Vt[:k]
        Q = (U[:, :k] * (grow * sigma)) @ Vt[:k]
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
    eye = torch.eye(new.shape[1], dtype=b.dtype, device=b.device)
    Q = torch.linalg.solve(eye - new.mT @ new, new.mT).mT
    barrier = 2 * (Q * dS).sum() - (step / (lam + size * step)).sum()
    return float(mu * barrier - b @ step)
