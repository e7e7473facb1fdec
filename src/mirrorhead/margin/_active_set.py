r"""Newton's method on the active constraints, for what the interior point method leaves unfinished.

Where columns differ much in size or are nearly dependent, K = A diag(h) A' + diag(e) squares the
condition of A, and the method stalls at gaps of 1e-5 to 1e-9. By then the active rows S are known,
and the solution is where

    A_S w = b_S,    A_S' lam = phi(w),    phi(w) = sign(w)|w|^(p-1).

A step linearises the second equation as in `_newton_step` and factors G = diag(h)^1/2 A_S' = Q R
instead of K = G' G, so that the condition is not squared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix

MOST_STEPS = 12
MOST_ENTRIES = 4_000_000  # of G
_EPS = 2.0**-52


def sharpen(
    A: ConstraintMatrix, b: Tensor, w: Tensor, lam: Tensor, p: float, tol: float
) -> tuple[Tensor, Tensor, float]:
    """Improve w (1, N) and lam (1, m) of one problem; return them and their gap.

    b: (1, m), -1 on padding. The point returned is the best one, perhaps the one given.
    """
    real = b > 0

    def slack(w: Tensor) -> Tensor:
        """(A w)_k / b_k relative to what it is for the best scale of w, less 1."""
        values = torch.where(real, A.apply(w) / b, math.inf)
        return values / values.amin() - 1

    best, best_gap = (w, lam), _gap(A, b, w, lam, p)
    if best_gap == math.inf:
        return w, lam, best_gap
    w = w / torch.linalg.vector_norm(w, p)
    goal = b * torch.where(real, A.apply(w) / b, math.inf).amin()  # what A_S w is to be
    lam = lam / (goal * lam).sum()  # so that <A' lam, w> = ||w||^p = 1
    active = (goal * lam > slack(w)) & real
    for _ in range(MOST_STEPS):
        S = active[0].nonzero().squeeze(-1)
        k, N = len(S), A.columns
        if k == 0 or k * N > MOST_ENTRIES:
            break
        rows = A.take_rows(S.unsqueeze(0))[0]
        step = _step(rows, goal[0, S], w[0], lam[0, S], p)
        if step is None:
            break
        w = w + step[0]
        lam = torch.zeros_like(lam).index_add_(1, S, (lam[0, S] + step[1]).unsqueeze(0))
        # Leave rows with negative multipliers, enter rows that are violated.
        active = (active & (lam > 0)) | ((A.apply(w) < (1 - tol) * goal) & real)
        lam = lam.clamp_min(0)
        gap = _gap(A, b, w, lam, p)
        if gap < best_gap:
            best, best_gap = (w, lam), gap
        if best_gap <= tol or gap == math.inf:
            break
    return best[0], best[1], best_gap


def sharpen_vertex(
    A: ConstraintMatrix, b: Tensor, w: Tensor, lam: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    """The same for p = 1 and p = inf, where the solution is a vertex, known but for rounding.

    For p = 1 the weights w = E y are 0 except for some, e = sign(y); for p = inf they are +-y_0
    except for some, e = (1, 0, ...). With M = A_S E, the solution is where M y = b_S, M' lam = e.
    """
    given, S = lam, (lam[0] > 0).nonzero().squeeze(-1)
    size, sign = w[0].abs(), torch.sign(w[0])
    rest = size > 0 if p == 1 else size < size.max()
    J = rest.nonzero().squeeze(-1)
    rows = A.take_rows(S.unsqueeze(0))[0]
    M = rows[:, J]
    if p == 1:
        e, y = sign[J], w[0, J]
    else:
        M = torch.cat([(rows @ (sign * ~rest)).unsqueeze(-1), M], 1)
        e = torch.zeros(M.shape[1]).to(w).index_fill_(0, S.new_zeros(1), 1.0)
        y = torch.cat([size.max().view(1), w[0, J]])
    lam = lam[:, S].T.clone()
    lam, y = lam * ((e @ y) / (b[0, S] @ lam)), y.unsqueeze(-1)
    # Columns of size 1, so that what counts as dependent does not depend on their units.
    scale = torch.linalg.vector_norm(M, dim=0).clamp_min(1e-300).unsqueeze(-1)
    M, e, y = M / scale.T, e.unsqueeze(-1) / scale, y * scale
    inverse = torch.linalg.pinv(M)
    for _ in range(3):
        y = y + inverse @ (b[:, S].T - M @ y)
        lam = lam + inverse.T @ (e - M.T @ lam)
    y = (y / scale).squeeze(-1)
    new = w.clone() if p == 1 else sign * ~rest * y[0]
    new[..., J] = y if p == 1 else y[1:]
    full = torch.zeros_like(b).index_copy_(1, S, lam.clamp_min(0).T)
    better = new.view_as(w), full
    return better if _gap(A, b, *better, p) < _gap(A, b, w, given, p) else (w, given)


def _gap(A: ConstraintMatrix, b: Tensor, w: Tensor, lam: Tensor, p: float) -> float:
    """The gap of one problem's w and lam, inf where they prove nothing."""
    q = 1.0 if p == math.inf else math.inf if p == 1 else p / (p - 1)
    margin = torch.where(b > 0, A.apply(w) / b, math.inf).amin()
    dual_norm = torch.linalg.vector_norm(A.adjoint(lam), q)
    gap = torch.linalg.vector_norm(w, p) / margin * (dual_norm / (b * lam).sum()) - 1
    return float(gap) if float(margin) > 0 and float(gap) >= 0 else math.inf


def _step(
    rows: Tensor, goal: Tensor, w: Tensor, lam: Tensor, p: float
) -> tuple[Tensor, Tensor] | None:
    """dw and dlam of one Newton step; rows: (k, N), goal and lam: (k,), w: (N,)."""
    s = rows.mT @ lam
    if p == 2:
        h, rho = torch.ones_like(s), s - w
    elif p < 2:
        power = 1 / (p - 1)
        h = power * s.abs() ** (power - 1)
        rho = torch.copysign(s.abs() ** power, s) - w
    else:
        f = torch.copysign(w.abs() ** (p - 1), w)
        f = f / (f @ w)
        # Where s and f differ by the rounding of s only, they are equal: h would blow it up.
        noise = _EPS * (rows.abs().mT @ lam.abs())
        size = torch.maximum(f.abs(), noise).clamp_min(_EPS * float(f.abs().max()))
        h = size ** (1 / (p - 1) - 1) / (p - 1)
        rho = h * torch.where((s - f).abs() <= noise, 0.0, s - f)
    root = h.clamp_min(1e-300).sqrt()
    G = (rows * root).mT
    k, N = rows.shape
    # More rows than columns: the shortest multipliers.
    G = torch.cat([G, 1e-12 * torch.linalg.vector_norm(G) * torch.eye(k).to(G)]) if k > N else G
    Q, R = torch.linalg.qr(G)
    t = torch.cat([rho / root, rho.new_zeros(len(G) - N)])
    y = torch.linalg.solve_triangular(R.mT, (goal - rows @ w).unsqueeze(-1), upper=False)
    along = Q.mT @ t.unsqueeze(-1)
    dlam = torch.linalg.solve_triangular(R, y - along, upper=True).squeeze(-1)
    dw = root * (t + (Q @ (y - along)).squeeze(-1))[:N]
    return (dw, dlam) if bool(dw.isfinite().all() & dlam.isfinite().all()) else None
