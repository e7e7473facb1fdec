r"""A primal-dual method for `Grouped(1)` and `Grouped(inf)`, which are second-order cone programs.

Each group has x = (t, w) and z = (y, -s) in the cone |w| <= t, with s = A' lam. For p = 1 the
program minimises sum t, and y = 1; for p = inf all t are one, and sum y = 1. The directions are
those of Nesterov and Todd: with H z = x, a step asks for

    dx + H dz = r,    H = theta^2 (2 v v' - J),    J = diag(1, -1, ..., -1),

and dw = H ds on a group is again a product along v and one across it. Mehrotra's predictor and
corrector, from a point on the cone's central path near the multipliers of p = 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorhead.geometry import Grouped
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult, solve
from mirrorhead.margin._shapes import Groups, order_rows
from mirrorhead.margin._smooth_norms import BUDGET, refuse_large, system, times

MAX_ITERATIONS = 100
PATIENCE = 8  # a run ends when a finite gap has not fallen for this many steps


class _Point(NamedTuple):
    x: Tensor  # (B, G, 1 + k), in the cone
    z: Tensor  # (B, G, 1 + k), in the cone
    u: Tensor  # (B, m) > 0, the slack
    lam: Tensor  # (B, m) > 0


class _Program(NamedTuple):
    rows: Tensor  # (B, m, N), the groups one after the other
    b: Tensor  # (B, m)
    shape: Groups
    summed: bool  # p = 1

    def take(self, keep: Tensor) -> _Program:
        return self._replace(rows=self.rows[keep], b=self.b[keep])


def solve_group_limit(
    A: ConstraintMatrix, b: Tensor, norm: Grouped, weights: tuple[int, ...], tol: float
) -> SolverResult:
    """Minimise the sum or the largest of the groups' 2-norms subject to A w >= b.

    The problem with p = 2 gives the start, and the Farkas certificate where there is no solution.
    """
    refuse_large(A, norm)
    result = solve(A, b, 2.0, 1e-2)
    shape, order = order_rows(norm, weights)
    assert isinstance(shape, Groups)
    todo = result.gap.isfinite().nonzero().squeeze(-1)
    every = torch.arange(A.rows, device=b.device)
    for index in todo.split(max(1, BUDGET // (A.rows * A.columns))) if len(todo) else ():
        rows = A.take(index).take_rows(every.expand(len(index), -1))[..., order]
        program = _Program(rows, b[index], shape, norm.p == 1)
        w, lam, gap, steps = _iterate(program, result.w[index][:, order], tol)
        result.w[index[:, None], order] = w
        result.lam[index], result.gap[index] = lam, gap
        result.iterations[index] += steps
    return result


def _iterate(program: _Program, w: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best weights and multipliers of each problem, their gaps, and counts of steps."""
    x = _start(program, w)
    B = len(w)
    w, best, gaps = program.rows[:, 0].clone(), x.lam.clone(), x.u.new_full((B,), math.inf)
    counts, since = torch.zeros(2, B, dtype=torch.long, device=w.device)
    index = torch.arange(B, device=w.device)
    for step in range(MAX_ITERATIONS):
        gap = _gap(program, x)
        better = gap < gaps[index]
        at = index[better]
        w[at], best[at], gaps[at] = x.x[better, :, 1:].flatten(1), x.lam[better], gap[better]
        since[at] = step
        keep = (
            (
                (gap > tol)
                & ((step - since[index] < PATIENCE) | gaps[index].isinf())
                & x.lam.isfinite().all(-1)
            )
            .nonzero()
            .squeeze(-1)
        )
        if len(keep) < len(index):
            program, x, index = program.take(keep), _Point(*(y[keep] for y in x)), index[keep]
        if not len(index):
            break
        x = _step(program, x)
        counts[index] += 1
    return w, best, gaps, counts


def _start(program: _Program, w: Tensor) -> _Point:
    """Return a feasible point with u lam = mu, of the weights of p = 2 with margin 1.5."""
    rows, b, shape, summed = program
    margin = torch.where(b > 0, times(rows, w) / b, math.inf).amin(-1, keepdim=True)
    w = 1.5 / margin * w
    u = times(rows, w) - b
    lengths = shape.lengths(times(rows.mT, 1 / u))
    mu = 0.6 / (lengths.amax(-1, True) if summed else lengths.sum(-1, keepdim=True))
    s, lengths = times(rows.mT, mu / u), mu * lengths
    y = torch.ones_like(lengths) if summed else lengths + 0.4 / shape.count
    t = 1.5 * shape.lengths(w).amax(-1, keepdim=True)
    t = torch.maximum(t, mu if summed else mu * shape.count).expand_as(y)
    return _Point(_cone(t, -w, shape), _cone(y, s, shape), u, mu / u)


def _cone(y: Tensor, s: Tensor, shape: Groups) -> Tensor:
    """(y, -s) of each group, (B, G, 1 + k)."""
    return torch.cat([y.unsqueeze(-1), -s.unflatten(-1, (shape.count, -1))], -1)


def _gap(program: _Program, x: _Point) -> Tensor:
    rows, b, shape, summed = program
    w, s = x.x[..., 1:].flatten(-2), x.z[..., 1:].flatten(-2)
    margin = torch.where(b > 0, times(rows, w) / b, math.inf).amin(-1)
    one, two = shape.lengths(w), shape.lengths(s)
    size = one.sum(-1) * two.amax(-1) if summed else one.amax(-1) * two.sum(-1)
    lower = (b.clamp_min(0) * x.lam).sum(-1)
    gap = size / (margin * lower) - 1
    return torch.where((margin > 0) & (lower > 0), gap, math.inf).nan_to_num(math.inf)


def _step(program: _Program, point: _Point) -> _Point:
    rows, b, shape, summed = program
    x, z, u, lam = point
    # The scaling of Nesterov and Todd.
    size_x, size_z = _det(x).sqrt(), _det(z).sqrt()
    unit_x, unit_z = x / size_x, z / size_z
    mean = ((1 + (unit_x * unit_z).sum(-1, keepdim=True)) / 2).sqrt()
    v = (unit_x + _flip(unit_z)) / (2 * mean)
    theta = (size_x / size_z).sqrt()  # (B, G, 1)
    length = torch.linalg.vector_norm(v[..., 1:], dim=-1)
    frame = v[..., 1:] / length.clamp_min(1e-300).unsqueeze(-1)
    across = theta.squeeze(-1).square()
    stretch = 1 + 2 * length.square()  # 2 v_0^2 - 1, as v_0^2 = 1 + |v_1|^2
    slopes = (across * stretch if summed else across / stretch), across
    turned = shape.multiply(frame, slopes, rows)
    K = turned @ rows.mT
    easy = 1 / (across * stretch)  # 1 / H_tt
    side = 2 * theta.square() * v[..., :1] * v[..., 1:]  # H_tw, (B, G, k)
    lift = times(rows, (easy.unsqueeze(-1) * side).flatten(-2)).unsqueeze(-1)  # (B, m, 1)
    if not summed:
        K = K + lift @ lift.mT / easy.sum(-1)[:, None, None]
    solved = system(0.5 * (K + K.mT), u / lam)
    w = x[..., 1:].flatten(-2)

    def direction(r: Tensor, push: Tensor) -> _Point:
        """The step with dx + H dz = r and u + du = push - (u/lam) dlam."""
        r_w = r[..., 1:].flatten(-2)
        free = x[..., 0] + r[..., 0]  # what t would be
        right = b + push - times(rows, w + r_w)
        if not summed:
            free = easy * free
            centred = free - easy * (free.sum(-1) / easy.sum(-1)).unsqueeze(-1)
            right = right + times(rows, (centred.unsqueeze(-1) * side).flatten(-2))
        dlam = solved(right)
        ds = times(rows.mT, dlam)
        dy = torch.zeros_like(easy)
        if not summed:
            inner = (side * ds.unflatten(-1, (shape.count, -1))).sum(-1)
            dy = free + easy * inner
            dy = dy - easy * (dy.sum(-1) / easy.sum(-1)).unsqueeze(-1)
        dz = _cone(dy, ds, shape)
        dx = r - _scaled(v, theta, _scaled(v, theta, dz))
        return _Point(dx, dz, push - u - u / lam * dlam, dlam)

    def longest(d: _Point) -> tuple[Tensor, Tensor]:
        primal = torch.minimum(_least(x, d.x), (d.u / u).amin(-1))
        dual = torch.minimum(_least(z, d.z), (d.lam / lam).amin(-1))
        return 1 / (-primal).clamp_min(1e-9), 1 / (-dual).clamp_min(1e-9)

    def moved(d: _Point, primal: Tensor, dual: Tensor) -> _Point:
        p, q = primal[:, None], dual[:, None]
        return _Point(x + p[..., None] * d.x, z + q[..., None] * d.z, u + p * d.u, lam + q * d.lam)

    now = _complementarity(point)
    width = shape.count + b.shape[-1]
    d = direction(-x, torch.zeros_like(u))
    primal, dual = (step.clamp_max(1) for step in longest(d))
    share = (_complementarity(moved(d, primal, dual)) / now).clamp(0, 1) ** 2
    mu = (share * now / width)[:, None]
    # The products of the predictor in scaled coordinates, which the linear model leaves out.
    scaled = _scaled(v, theta, z)
    products = _product(_unscaled(v, theta, d.x), _scaled(v, theta, d.z))
    r = mu[..., None] * _flip(z) / _det(z) - x - _scaled(v, theta, _quotient(scaled, products))
    near = 0.9 + 0.09 * torch.minimum(primal, dual)
    d = direction(r, mu / lam - d.u * d.lam / lam)
    primal, dual = ((near * step).clamp_max(1) for step in longest(d))
    new = moved(d, primal, dual)
    y = new.z[..., 0] / (1 if summed else new.z[..., 0].sum(-1, keepdim=True))
    return new._replace(z=_cone(y, times(rows.mT, new.lam), shape))


def _complementarity(point: _Point) -> Tensor:
    return (point.x * point.z).sum((-2, -1)) + (point.u * point.lam).sum(-1)


def _flip(x: Tensor) -> Tensor:
    """J x."""
    return torch.cat([x[..., :1], -x[..., 1:]], -1)


def _det(x: Tensor) -> Tensor:
    """t^2 - |w|^2, (B, G, 1), positive."""
    length = torch.linalg.vector_norm(x[..., 1:], dim=-1, keepdim=True)
    return ((x[..., :1] - length) * (x[..., :1] + length)).clamp_min(1e-300)


def _scaled(v: Tensor, theta: Tensor, x: Tensor) -> Tensor:
    """The root of H times x."""
    inner = (v[..., 1:] * x[..., 1:]).sum(-1, keepdim=True)
    first = v[..., :1] * x[..., :1] + inner
    rest = x[..., 1:] + (x[..., :1] + inner / (1 + v[..., :1])) * v[..., 1:]
    return theta * torch.cat([first, rest], -1)


def _unscaled(v: Tensor, theta: Tensor, x: Tensor) -> Tensor:
    return _scaled(_flip(v), 1 / theta, x)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """The Jordan product of the cone."""
    first = (x * y).sum(-1, keepdim=True)
    return torch.cat([first, x[..., :1] * y[..., 1:] + y[..., :1] * x[..., 1:]], -1)


def _quotient(x: Tensor, c: Tensor) -> Tensor:
    """y with x o y = c."""
    first = (_flip(x) * c).sum(-1, keepdim=True) / _det(x)
    return torch.cat([first, (c[..., 1:] - first * x[..., 1:]) / x[..., :1]], -1)


def _least(x: Tensor, d: Tensor) -> Tensor:
    """The smallest eigenvalue of d relative to x over all groups, (B,): 1 / -it is the step."""
    size = _det(x).sqrt()
    x, d = x / size, d / size
    first = (_flip(x) * d).sum(-1, keepdim=True)
    rest = d[..., 1:] - (first + d[..., :1]) / (1 + x[..., :1]) * x[..., 1:]
    return (first.squeeze(-1) - torch.linalg.vector_norm(rest, dim=-1)).amin(-1)
