r"""A primal-dual method for the largest singular value, min t subject to A W >= b and

    Z = [[t I, W], [W', t I]]   positive semidefinite.

The dual slack of the nuclear norm (`_nuclear.py`) is the primal here, so the linear system is that
of W and t. With Y Z = mu I, lam u = mu and Z^-1 = [[E, F], [F', G]], its part of W is

    dW -> Y11 dW G + E dW Y22 + Y12 dW' F + F dW' Y12 + A' (lam/u) A dW.

Every iterate is feasible; tr Y = 1 and A' lam = -2 Y12 hold once full steps are taken.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._nuclear import inverse_of, narrowed, off, relative, sym
from mirrorhead.margin._smooth_norms import BUDGET, system, times

MAX_ITERATIONS, PATIENCE = 100, 8
MAX_WEIGHTS = 4000  # the system has their number squared (130 MB)


class _Point(NamedTuple):
    W: Tensor  # (B, a, c)
    t: Tensor  # (B,), above the largest singular value
    u: Tensor  # (B, m) > 0, A W - b
    Y: Tensor  # (B, a + c, a + c), positive definite
    lam: Tensor  # (B, m) > 0


def solve_spectral(A: ConstraintMatrix, b: Tensor, tol: float) -> SolverResult:
    """Minimise the largest singular value subject to A W >= b for a batch of problems.

    The problem with p = 2 gives the start, and the Farkas certificate where there is no solution.
    """
    right, basis = narrowed(A.right)
    small = ConstraintMatrix(A.left, right)
    if small.columns > MAX_WEIGHTS:
        raise ValueError(
            f"Schatten(inf) takes at most {MAX_WEIGHTS} weights per problem, got {small.columns}"
            " (rows of W times queries, or columns of W if these are fewer). Use Schatten(30)"
        )
    result = solve(A, b, 2.0, 1e-2)
    todo = result.gap.isfinite().nonzero().squeeze(-1)
    every = torch.arange(A.rows, device=b.device)
    size = small.columns * max(small.columns, A.rows)
    for index in todo.split(max(1, BUDGET // size)) if len(todo) else ():
        rows = small.take(index).take_rows(every.expand(len(index), -1))
        W = result.w[index].view(-1, *A.shape)
        W = W if basis is None else W @ basis[index]
        W, lam, gap, steps = _iterate(rows, b[index], W, tol)
        result.w[index] = (W if basis is None else W @ basis[index].mT).flatten(1)
        result.lam[index], result.gap[index] = lam, gap
        result.iterations[index] += steps
    return result


def _iterate(rows: Tensor, b: Tensor, W: Tensor, tol: float) -> tuple[Tensor, ...]:
    """Return the best weights and multipliers of each problem, their gaps, and counts of steps."""
    x = _start(rows, b, W)
    B = len(b)
    W, best, gaps = x.W.clone(), x.lam.clone(), b.new_full((B,), math.inf)
    counts, since = torch.zeros(2, B, dtype=torch.long, device=b.device)
    index = torch.arange(B, device=b.device)
    for step in range(MAX_ITERATIONS):
        gap = _gap(rows, b, x)
        better = gap < gaps[index]
        at = index[better]
        W[at], best[at], gaps[at] = x.W[better], x.lam[better], gap[better]
        since[at] = step
        going = (
            (gap > tol)
            & ((step - since[index] < PATIENCE) | gaps[index].isinf())
            & x.lam.isfinite().all(-1)
        )
        keep = going.nonzero().squeeze(-1)
        if len(keep) < len(index):
            rows, b, index = rows[keep], b[keep], index[keep]
            x = _Point(*(y[keep] for y in x))
        if not len(index):
            break
        x = _step(rows, b, x)
        counts[index] += 1
    return W, best, gaps, counts


def _start(rows: Tensor, b: Tensor, W: Tensor) -> _Point:
    """Return a point with Y Z = mu I and lam u = mu, of the weights of p = 2 with margin 1.5."""
    margin = torch.where(b > 0, times(rows, W.flatten(1)) / b, math.inf).amin(-1)
    W = W * (1.5 / margin)[:, None, None]
    t = 1.5 * torch.linalg.matrix_norm(W, 2)
    u = times(rows, W.flatten(1)) - b
    inverse = inverse_of(-W / t[:, None, None]) / t[:, None, None]
    mu = 1 / inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
    return _Point(W, t, u, mu[:, None, None] * inverse, mu[:, None] / u)


def _gap(rows: Tensor, b: Tensor, x: _Point) -> Tensor:
    margin = torch.where(b > 0, times(rows, x.W.flatten(1)) / b, math.inf).amin(-1)
    pulled = times(rows.mT, x.lam).view_as(x.W)
    usable = pulled.isfinite().all(-1, keepdim=True) & x.W.isfinite().all(-1, keepdim=True)
    sizes = torch.linalg.svdvals(torch.stack([x.W, pulled]).where(usable, 0.0))
    lower = (b.clamp_min(0) * x.lam).sum(-1)
    gap = sizes[0].amax(-1) * sizes[1].sum(-1) / (margin * lower) - 1
    # The gap of nothing is none.
    real = (margin > 0) & (lower > 0) & usable.all(-2).squeeze(-1)
    return torch.where(real, gap, math.inf).nan_to_num(math.inf)


def _step(rows: Tensor, b: Tensor, point: _Point) -> _Point:
    W, t, u, Y, lam = point
    a, c = W.shape[1:]
    inverse = inverse_of(-W / t[:, None, None]) / t[:, None, None]
    eye = torch.eye(a + c).to(W)
    K = _system_of(rows, inverse, Y, lam / u, a)
    solved = system(K, torch.zeros_like(K[:, 0]))

    def direction(rest: Tensor, push: Tensor) -> _Point:
        """The step with Y + dY = rest - sym(Y dZ Z^-1) and lam + dlam = push - (lam/u) du."""
        right = times(rows.mT, push) + 2 * rest[:, :a, a:].flatten(1)
        last = rest.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) - 1
        move = solved(torch.cat([right, last], -1))
        dW, dt = move[:, :-1].view_as(W), move[:, -1]
        dY = rest - Y - sym(Y @ (off(dW) + dt[:, None, None] * eye) @ inverse)
        du = times(rows, move[:, :-1])
        return _Point(dW, dt, du, dY, push - lam - lam / u * du)

    least_of = relative(torch.stack([off(W) + t[:, None, None] * eye, Y]))

    def longest(d: _Point) -> tuple[Tensor, Tensor]:
        least = least_of(torch.stack([off(d.W) + d.t[:, None, None] * eye, d.Y]))
        primal = torch.minimum(least[0], (d.u / u).amin(-1))
        dual = torch.minimum(least[1], (d.lam / lam).amin(-1))
        return 1 / (-primal).clamp_min(1e-9), 1 / (-dual).clamp_min(1e-9)

    def moved(d: _Point, primal: Tensor, dual: Tensor) -> _Point:
        steps = (primal, primal, primal, dual, dual)
        return _Point(
            *(
                x + s.view(-1, *[1] * (x.dim() - 1)) * dx
                for x, dx, s in zip(point, d, steps, strict=True)
            )
        )

    now, width = _complementarity(point), a + c + b.shape[-1]
    d = direction(torch.zeros_like(Y), torch.zeros_like(u))
    primal, dual = (step.clamp_max(1) for step in longest(d))
    share = (_complementarity(moved(d, primal, dual)) / now).clamp(0, 1) ** 2
    mu = share * now / width
    # The products of the predictor, which the linear model leaves out.
    dZ = off(d.W) + d.t[:, None, None] * eye
    rest = mu[:, None, None] * inverse - sym(d.Y @ dZ @ inverse)
    near = 0.9 + 0.09 * torch.minimum(primal, dual)
    d = direction(rest, mu[:, None] / u - d.u * d.lam / u)
    primal, dual = ((near * step).clamp_max(1) for step in longest(d))
    new = moved(d, primal, dual)
    return new._replace(u=torch.maximum(times(rows, new.W.flatten(1)) - b, 1e-3 * new.u))


def _system_of(rows: Tensor, inverse: Tensor, Y: Tensor, weights: Tensor, a: int) -> Tensor:
    """The symmetric matrix of the system in (W, t), (B, N + 1, N + 1)."""
    B, _, N = rows.shape
    K = rows.new_empty(B, N + 1, N + 1)
    E, F, G = inverse[:, :a, :a], inverse[:, :a, a:], inverse[:, a:, a:]
    P, Q, R = Y[:, :a, :a], Y[:, :a, a:], Y[:, a:, a:]
    inner = torch.einsum("bik,bjl->bijkl", P, G) + torch.einsum("bik,bjl->bijkl", E, R)
    inner += torch.einsum("bil,bkj->bijkl", Q, F) + torch.einsum("bil,bkj->bijkl", F, Q)
    K[:, :N, :N] = inner.reshape(B, N, N)
    K[:, :N, :N] += (rows * weights.unsqueeze(-1)).mT @ rows
    both = sym(Y @ inverse)
    K[:, :N, N] = K[:, N, :N] = 2 * both[:, :a, a:].flatten(1)
    K[:, N, N] = both.diagonal(dim1=-2, dim2=-1).sum(-1)
    return sym(K)


def _complementarity(x: _Point) -> Tensor:
    a = x.W.shape[1]
    inner = x.t * x.Y.diagonal(dim1=-2, dim2=-1).sum(-1) + 2 * (x.Y[:, :a, a:] * x.W).sum((-2, -1))
    return inner + (x.u * x.lam).sum(-1)
