"""The margin problems of the paper: lp-AttSVM and lp-SVM, solved with a certificate."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from mirrorhead._checks import is_number
from mirrorhead.margin._certificate import FARKAS, Norm, certify, support_excess
from mirrorhead.margin._constraints import Constraints, attention_constraints, svm_constraints
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._other_norms import solve_nuclear, solve_polyhedral
from mirrorhead.margin._solution import MarginSolution, Status
from mirrorhead.potentials import check_p


def attention_svm(
    X: Tensor,
    z: Tensor,
    tokens: Tensor,
    p: float = 2,
    tol: float = 1e-9,
    *,
    norm: Literal["lp", "nuclear"] = "lp",
    mask: Tensor | None = None,
    start: MarginSolution | None = None,
) -> MarginSolution:
    r"""Compute the weights of smallest norm whose attention prefers the tokens with margin 1.

        min ||W||_p   subject to   (x_i,sel - x_it)' W z_i >= 1   for all t != sel = tokens_i

    Args:
        X: (..., n, T, d) tokens; leading dimensions are separate problems, solved together.
        z: (..., n, d) queries.
        tokens: (..., n) integers, the selected token of each sample.
        p: from 1 to inf. The interior point method is known to finish between 1.02 and 100;
            1 and inf are linear programs, solved by HiGHS, and may have several solutions.
        tol: the relative gap between ||W|| and a lower bound on it, within (0, 1). For p > 2
            W itself is less accurate: use 1e-12 if you need W.
        norm: "nuclear" minimises the sum of singular values instead, the limit of training
            W = K Q' with p = 2 (examples/key_query.py); p must be 2, and `start` is not used.
        mask: (..., n, T) bool, False on padding, for sequences of different length.
        start: a solution of a similar problem of the same shape (another p, a few other tokens).

    Returns a `MarginSolution`; look at its `status`. Data are promoted to float64. A sample
    with one token has no constraint; without any constraint W = 0 is optimal.

    >>> X = torch.tensor([[[1.0, 0.0], [-1.0, 1.0], [0.0, 0.0]]])
    >>> z = torch.tensor([[2.0, 0.0]])
    >>> solution = attention_svm(X, z, torch.tensor([0]), p=1.5)
    >>> solution.status, solution.W.round(decimals=6)  # only 2 W_11 >= 1 binds
    ('optimal', tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]], dtype=torch.float64))
    >>> solution.support
    tensor([[False, False,  True]])
    >>> bool(solution.check(X, z, torch.tensor([0])))
    True
    """
    if norm not in ("lp", "nuclear"):
        raise ValueError(f"norm must be 'lp' or 'nuclear', got {norm!r}")
    if norm == "nuclear" and p != 2:
        raise ValueError(f"norm='nuclear' goes with p=2, got p={p!r}")
    return _solve(attention_constraints(X, z, tokens, mask), p, tol, norm == "nuclear", start)


def svm(
    features: Tensor,
    labels: Tensor,
    p: float = 2,
    tol: float = 1e-9,
    *,
    start: MarginSolution | None = None,
) -> MarginSolution:
    r"""Compute the lp max-margin separator through the origin: min ||v||_p, y_i v' x_i >= 1.

    features: (..., n, d); labels: (..., n) of +1 and -1. The other arguments are those of
    `attention_svm`. The weights are `solution.v`, (..., d).

    >>> solution = svm(torch.tensor([[2.0, 0.0], [0.0, -4.0]]), torch.tensor([1, -1]), p=3)
    >>> solution.status, solution.v.round(decimals=6)
    ('optimal', tensor([0.5000, 0.2500], dtype=torch.float64))
    """
    return _solve(svm_constraints(features, labels), p, tol, False, start)


def _solve(
    problem: Constraints, p: float, tol: float, nuclear: bool, start: MarginSolution | None
) -> MarginSolution:
    p = float(p) if is_number(p) and p in (1, math.inf) else check_p(p)
    if not (is_number(tol) and 0 < tol < 1):
        raise ValueError(f"tol must be a number between 0 and 1, got {tol!r}")
    tol = float(tol)
    if start is not None and not isinstance(start, MarginSolution):
        raise TypeError(f"start must be a MarginSolution, got {type(start).__name__}")
    near = None if start is None else _start(problem, start)
    A, norms = problem.A, problem.A.row_norms.where(problem.live, math.inf)
    zero = norms == 0  # the constraint reads 0 >= 1: its unit vector is a certificate
    result = SolverResult.empty(A, norms)
    result.infeasible[:] = zero.any(-1)
    result.lam[:] = zero.double() / zero.sum(-1, keepdim=True).clamp_min(1)
    todo = (problem.live.any(-1) & ~result.infeasible).nonzero().squeeze(-1)
    if len(todo):
        if len(todo) < A.batch:
            A, norms = A.take(todo), norms[todo]
            near = None if near is None else (near[0][todo], near[1][todo])
        # Scale the rows to norm 1 and the right-hand side to maximum 1.
        padding = norms == math.inf
        A, b = A.unit_rows(), (norms.amin(-1, keepdim=True) / norms).where(~padding, -1.0)
        # Half of tol: rounding must not raise the gap recomputed from the data above tol.
        if nuclear:
            found = solve_nuclear(A, b, 0.5 * tol)
        elif p in (1, math.inf):
            found = solve_polyhedral(A, b, p)
        else:
            near = None if near is None else (near[0], near[1] * norms.where(~padding, 0.0))
            found = solve(A, b, p, 0.5 * tol, near)
        for name in ("w", "gap", "infeasible", "iterations", "inner"):
            getattr(result, name)[todo] = getattr(found, name)
        result.lam[todo] = found.lam / norms
    return _conclude(problem, result, tol, Norm(p, nuclear))


def _conclude(problem: Constraints, result: SolverResult, tol: float, norm: Norm) -> MarginSolution:
    """Certify the result from the original data; the certificate decides the status."""
    lead, free = problem.lead, ~problem.live.any(-1)  # free of constraints
    lam = result.lam * problem.live
    margin = problem.margin(result.w)
    found = (margin > 0) & ~free
    W = torch.where(found.unsqueeze(-1), result.w / margin.unsqueeze(-1), 0.0)
    # Feasible: A' lam gets norm 1, that is, the sum is the lower bound. Infeasible: sum 1.
    total = torch.where(result.infeasible, lam.sum(-1), norm.dual(problem.pull(lam)))
    dual = torch.where(total > 0, 1 / total, 0.0).unsqueeze(-1) * lam
    proof = certify(problem, W, dual, norm)  # of exactly what is returned
    gap = proof.gap_as_is()
    infeasible = result.infeasible & (proof.farkas <= FARKAS)
    codes = torch.full_like(result.iterations, Status.UNFINISHED)
    codes[gap <= tol] = Status.OPTIMAL
    codes[infeasible] = Status.INFEASIBLE
    found = (free | found) & ~infeasible
    support = (support_excess(problem, W, dual) > 0) & found.unsqueeze(-1)
    size = torch.where(free, 0.0, proof.upper)
    return MarginSolution(
        W=W.where(found.unsqueeze(-1), math.nan).reshape(*lead, *problem.weights),
        norm=torch.where(infeasible, math.inf, size).reshape(lead),
        dual=problem.spread(dual),
        gap=gap.where(~infeasible, math.inf).reshape(lead),
        support=problem.spread(support.to(lam.dtype)).bool(),
        iterations=result.iterations.reshape(lead),
        inner_iterations=result.inner.reshape(lead),
        p=norm.p,
        tol=tol,
        kind=norm,
        codes=codes.reshape(lead),
    )


def _start(problem: Constraints, start: MarginSolution) -> tuple[Tensor, Tensor]:
    if start.W.shape != (*problem.lead, *problem.weights):
        raise ValueError(
            f"start must solve a problem of the same shape, with weights "
            f"{(*problem.lead, *problem.weights)}; its weights are {tuple(start.W.shape)}"
        )
    if start.dual.shape != (*problem.lead, *problem.shape):
        raise ValueError(
            f"start must solve a problem of the same shape, with dual "
            f"{(*problem.lead, *problem.shape)}; its dual is {tuple(start.dual.shape)}"
        )
    W = start.W.reshape(problem.A.batch, problem.A.columns).to(problem.A.left)
    return W, problem.collect(start.dual.to(W.device))
