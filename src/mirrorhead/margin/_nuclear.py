r"""A primal-dual method for min ||W||_* subject to left_k' W right_k >= b_k.

It is a semidefinite program in X = [[P, W], [W', Q]] with the dual slack Z = [[I, -S], [-S', I]],
S = A' lam, and the central path X Z = 2 mu I, u lam = mu. The steps are those of HKM with
Mehrotra's predictor and corrector. A constraint has rank two in X, so the Schur complement is a
sum of Hadamard products of Gram matrices: with D and R the factors of the rows and
Z^-1 = [[E, F], [F', G]],

    2 M = (D W R') o (D F R')' + (D F R')  o (D W R')' + (D P D') o (R G R') + (D E D') o (R Q R').
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._linear_systems import LAST_RESORT, cholesky, cholesky_solve

MAX_ITERATIONS = 100
# A run ends when a finite gap has not fallen for this many steps.
PATIENCE = 6
_BUDGET = 1 << 21  # numbers in the matrices of the problems that are solved at a time


class _Point(NamedTuple):
    X: Tensor  # (B, a + c, a + c), positive definite
    u: Tensor  # (B, m) > 0, the slack
    lam: Tensor  # (B, m) > 0
    S: Tensor  # (B, a, c), A' lam


@dataclass(frozen=True, eq=False)
class _Rows:
    D: Tensor  # (B, m, a)
    R: Tensor  # (B, n, c), one for several rows
    b: Tensor  # (B, m)

    def push(self, W: Tensor) -> Tensor:
        """A W, (B, m)."""
        B, m, a = self.D.shape
        image = W @ self.R.mT  # (B, a, n)
        per = self.D.view(B, self.R.shape[1], -1, a)
        return (per @ image.mT.unsqueeze(-1)).view(B, m)

    def pull(self, lam: Tensor) -> Tensor:
        """A' lam, (B, a, c)."""
        B, _, a = self.D.shape
        n = self.R.shape[1]
        return (lam.view(B, n, 1, -1) @ self.D.view(B, n, -1, a)).view(B, n, a).mT @ self.R

    def take(self, keep: Tensor) -> _Rows:
        return _Rows(self.D[keep], self.R[keep], self.b[keep])

    def schur(self, X: Tensor, inverse: Tensor) -> Tensor:
        """M, (B, m, m)."""
        B, m, a = self.D.shape
        n, per = self.R.shape[1], m // self.R.shape[1]
        D, R = self.D, self.R

        def blocks(one: Tensor, two: Tensor) -> Tensor:
            """(one_kl of rows) times (two_ij of their samples)."""
            rows = one.view(B, n, per, n, per)
            return rows.mul_(two[:, :, None, :, None]).view(B, m, m)

        M = blocks(D @ X[:, :a, :a] @ D.mT, R @ inverse[:, a:, a:] @ R.mT)
        M += blocks(D @ inverse[:, :a, :a] @ D.mT, R @ X[:, a:, a:] @ R.mT)
        one = (D @ X[:, :a, a:] @ R.mT).view(B, n, per, n)  # of row (i, t) and sample j
        two = (D @ inverse[:, :a, a:] @ R.mT).view(B, n, per, n)
        both = one.unsqueeze(-1) * two.permute(0, 3, 1, 2).unsqueeze(2)
        both = both.reshape(B, m, m)
        return M.add_(both).add_(both.mT).mul_(0.5)


def solve_nuclear(A: ConstraintMatrix, b: Tensor, tol: float) -> SolverResult:
    """Minimise ||W||_* subject to A W >= b for a batch of problems.

    The problem with p = 2 gives the start, and the Farkas certificate where there is no solution.
    """
    if A.rows > LAST_RESORT:
        raise ValueError(
            f"Schatten(1) takes at most {LAST_RESORT} constraints per problem, got {A.rows}"
        )
    result = solve(A, b, 2.0, 1e-2)
    _, n, R, a = A.left.shape
    right, basis = narrowed(A.right)
    todo = result.gap.isfinite().nonzero().squeeze(-1)
    for index in todo.split(max(1, _BUDGET // A.rows**2)) if len(todo) else ():
        rows = _Rows(A.left[index].view(-1, n * R, a), right[index], b[index])
        W = result.w[index].view(-1, *A.shape)
        W = W if basis is None else W @ basis[index]
        W, lam, gap, iterations = _iterate(rows, W, tol)
        result.w[index] = (W if basis is None else W @ basis[index].mT).flatten(1)
        result.lam[index], result.gap[index] = lam, gap
        result.iterations[index] += iterations
    return result


def narrowed(right: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return queries in the span of all of them, and its basis: W needs no other columns."""
    if right.shape[1] >= right.shape[2]:
        return right, None
    basis, triangle = torch.linalg.qr(right.mT)
    return triangle.mT, basis


def _iterate(rows: _Rows, W: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best weights and multipliers of each problem, their gaps, and counts of steps."""
    B, _, a = rows.D.shape
    x = _start(rows, W)
    W, best, gaps = x.S.clone(), x.lam.clone(), x.u.new_full((B,), math.inf)
    counts, since = torch.zeros(2, B, dtype=torch.long, device=W.device)
    index = torch.arange(B, device=W.device)
    for step in range(MAX_ITERATIONS):
        gap = _gap(rows, x)
        better = gap < gaps[index]
        at = index[better]
        W[at], best[at], gaps[at] = x.X[better, :a, a:], x.lam[better], gap[better]
        since[at] = step
        going = (
            (gap > tol)
            & ((step - since[index] < PATIENCE) | gaps[index].isinf())
            & x.lam.isfinite().all(-1)
        )
        keep = going.nonzero().squeeze(-1)
        if len(keep) < len(index):
            rows, x, index = rows.take(keep), _Point(*(y[keep] for y in x)), index[keep]
        if not len(index):
            break
        x = _step(rows, x)
        counts[index] += 1
    return W, best, gaps, counts


def _start(rows: _Rows, W: Tensor) -> _Point:
    """Return a feasible point with u lam = mu, of the weights of p = 2 with margin 1.5."""
    b = rows.b
    margin = torch.where(b > 0, rows.push(W) / b, math.inf).amin(-1)
    W = W * (1.5 / margin)[:, None, None]
    u = rows.push(W) - b
    mu = (0.6 / torch.linalg.matrix_norm(rows.pull(1 / u), 2))[:, None]
    lam = mu / u
    t = torch.maximum(1.5 * torch.linalg.matrix_norm(W, 2)[:, None], 2 * mu)[..., None]
    return _Point(off(W) + t * torch.eye(sum(W.shape[1:])).to(W), u, lam, rows.pull(lam))


def _gap(rows: _Rows, x: _Point) -> Tensor:
    """The gap, (B,); (tr P + tr Q) / 2 bounds the nuclear norm of W."""
    a = x.S.shape[1]
    values = rows.push(x.X[:, :a, a:]) / rows.b
    margin = torch.where(rows.b > 0, values, math.inf).amin(-1)
    upper = 0.5 * x.X.diagonal(dim1=-2, dim2=-1).sum(-1) / margin
    usable = x.S.isfinite().all(-1, keepdim=True)  # LAPACK raises where it is not
    largest = torch.linalg.matrix_norm(x.S.where(usable, 1.0), 2)
    lower = (rows.b.clamp_min(0) * x.lam).sum(-1) / largest
    return torch.where((margin > 0) & (lower > 0), upper / lower - 1, math.inf).nan_to_num(math.inf)


def _step(rows: _Rows, x: _Point) -> _Point:
    b, lam, u, X = rows.b, x.lam, x.u, x.X
    a = x.S.shape[1]
    inverse = inverse_of(x.S)
    K = rows.schur(X, inverse)
    K.diagonal(dim1=-2, dim2=-1).add_(u / lam)
    scale = K.diagonal(dim1=-2, dim2=-1).rsqrt()
    K = K * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    L = cholesky(K)

    def solved(r: Tensor) -> Tensor:
        r = r * scale
        y = cholesky_solve(L, r)
        for _ in range(2):
            y = y + cholesky_solve(L, r - (K @ y.unsqueeze(-1)).squeeze(-1))
        return y * scale

    def direction(rest: Tensor, push: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The step to X + dX = rest + what dlam adds, u + du = push - (u/lam) dlam."""
        dlam = solved(b + push - rows.push(rest[:, :a, a:]))
        dS = rows.pull(dlam)
        dX = rest - X + sym(X @ off(dS) @ inverse)
        return dX, push - u - u / lam * dlam, dlam, dS

    eye = torch.eye(X.shape[-1]).to(X)
    least_of = relative(torch.stack([X, eye - off(x.S)]))

    def longest(dX: Tensor, du: Tensor, dlam: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
        least = least_of(torch.stack([dX, -off(dS)]))
        primal = torch.minimum(least[0], (du / u).amin(-1))
        dual = torch.minimum(least[1], (dlam / lam).amin(-1))
        return 1 / (-primal).clamp_min(1e-9), 1 / (-dual).clamp_min(1e-9)

    width = X.shape[-1] + b.shape[-1]

    def complementarity(X: Tensor, S: Tensor, u: Tensor, lam: Tensor) -> Tensor:
        inner = X.diagonal(dim1=-2, dim2=-1).sum(-1) - 2 * (X[:, :a, a:] * S).sum((-2, -1))
        return 0.5 * inner + (u * lam).sum(-1)

    now = complementarity(X, x.S, u, lam)
    zero = torch.zeros_like(X)
    dX, du, dlam, dS = direction(zero, torch.zeros_like(u))
    primal, dual = (s.clamp_max(1) for s in longest(dX, du, dlam, dS))
    p, d = primal[:, None], dual[:, None]
    after = complementarity(
        X + p[..., None] * dX, x.S + d[..., None] * dS, u + p * du, lam + d * dlam
    )
    mu = ((after / now).clamp(0, 1) ** 2 * now / width)[:, None]
    # The products of the predictor, which the linear model leaves out.
    rest = 2 * mu[..., None] * inverse + sym(dX @ off(dS) @ inverse)
    dX, du, dlam, dS = direction(rest, mu / lam - du * dlam / lam)
    near = 0.9 + 0.09 * torch.minimum(primal, dual)
    primal, dual = longest(dX, du, dlam, dS)
    p, d = ((near * s).clamp_max(1)[:, None] for s in (primal, dual))
    lam = lam + d * dlam
    return _Point(sym(X + p[..., None] * dX), u + p * du, lam, rows.pull(lam))


def relative(matrices: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what gives the smallest eigenvalues of symmetric moves relative to `matrices`."""
    roots = torch.linalg.cholesky_ex(matrices)[0]

    def least(moves: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(roots, moves, upper=False)
        whole = torch.linalg.solve_triangular(roots, half.mT, upper=False)
        return torch.linalg.eigvalsh(sym(whole).nan_to_num(0.0, 0.0, 0.0))[..., 0]

    return least


def inverse_of(S: Tensor) -> Tensor:
    """The inverse of Z = [[I, -S], [-S', I]], from the singular values of S."""
    U, sigma, Vt = torch.linalg.svd(S, full_matrices=False)
    grow = 1 / ((1 - sigma) * (1 + sigma))
    eye = [torch.eye(k).to(S) for k in S.shape[1:]]
    E = eye[0] + (U * (grow * sigma.square()).unsqueeze(-2)) @ U.mT
    G = eye[1] + (Vt.mT * (grow * sigma.square()).unsqueeze(-2)) @ Vt
    F = (U * (grow * sigma).unsqueeze(-2)) @ Vt
    return torch.cat([torch.cat([E, F], -1), torch.cat([F.mT, G], -1)], -2)


def off(S: Tensor) -> Tensor:
    """[[0, S], [S', 0]]."""
    a, c = S.shape[1:]
    whole = S.new_zeros(len(S), a + c, a + c)
    whole[:, :a, a:], whole[:, a:, :a] = S, S.mT
    return whole


def sym(X: Tensor) -> Tensor:
    return 0.5 * (X + X.mT)
