r"""The cone of `Grouped(1)` and `Grouped(inf)`: pairs (t, w) of each group with ||w||_2 <= t.

With H = theta^2 (2 v v' - J), J = diag(1, -1, ..., -1) and H z = x, a step has dx + H dz = r, and
scaled coordinates are those of the root of H. Without y, or with y eliminated where p = inf, the
map from ds to dw is again a product along v and one across it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirrorhead.geometry import Grouped
from mirrorhead.margin._conic import Point, Program, Scaling, solve_program
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult
from mirrorhead.margin._linear_systems import RefinedSystem, refuse_large
from mirrorhead.margin._shapes import Groups, shape_of


def solve_groups(
    A: ConstraintMatrix, b: Tensor, norm: Grouped, weights: tuple[int, ...], tol: float
) -> SolverResult:
    """Minimise the sum (p = 1) or the largest (p = inf) of the groups' 2-norms, A w >= b."""
    refuse_large(A, norm)
    shape = shape_of(norm, A, weights)
    assert isinstance(shape, Groups)
    return solve_program(A, b, GroupProgram(A, b, shape, norm.p == 1), tol)


class GroupProgram(Program):
    """Points x and z of the groups' cones, (B, G, 1 + k)."""

    def __init__(self, A: ConstraintMatrix, b: Tensor, shape: Groups, summed: bool) -> None:
        self.A, self.b, self.shape, self.summed = A, b, shape, summed
        self.degree = shape.count

    def take(self, keep: Tensor) -> GroupProgram:
        return GroupProgram(self.A.take(keep), self.b[keep], self.shape, self.summed)

    def weights(self, x: Tensor) -> Tensor:
        return self.shape.joined(x[..., 1:])

    def start(self, w: Tensor) -> Point:
        u = self.A.apply(w) - self.b
        pulled = self.A.adjoint(1 / u)
        lengths = self.shape.split(pulled)[0]
        mu = 0.6 / (lengths.amax(-1, True) if self.summed else lengths.sum(-1, keepdim=True))
        y = torch.ones_like(lengths) if self.summed else mu * lengths + 0.4 / self.degree
        t = 1.5 * self.shape.split(w)[0].amax(-1, keepdim=True)
        t = torch.maximum(t, mu if self.summed else mu * self.degree).expand_as(y)
        return Point(
            cone(t, -self.shape.groups(w)), cone(y, self.shape.groups(mu * pulled)), u, mu / u
        )

    def bounds(self, point: Point) -> tuple[Tensor, Tensor]:
        w, s = (torch.linalg.vector_norm(x[..., 1:], dim=-1) for x in point[:2])
        return (w.sum(-1), s.amax(-1)) if self.summed else (w.amax(-1), s.sum(-1))

    def scaling(self, point: Point) -> Scaling:
        return _GroupScaling(self, point)

    def tidied(self, point: Point) -> Point:
        y = point.z[..., 0]
        y = torch.ones_like(y) if self.summed else y / y.sum(-1, keepdim=True)
        return point._replace(z=cone(y, self.shape.groups(self.A.adjoint(point.lam))))


class _GroupScaling(Scaling):
    def __init__(self, program: GroupProgram, point: Point) -> None:
        self.program, self.at = program, point
        size_x, size_z = det(point.x).sqrt(), det(point.z).sqrt()
        unit_x, unit_z = point.x / size_x, point.z / size_z
        mean = ((1 + (unit_x * unit_z).sum(-1, keepdim=True)) / 2).sqrt()
        self.v = v = (unit_x + flip(unit_z)) / (2 * mean)
        self.theta = (size_x / size_z).sqrt()  # (B, G, 1)
        self.point = self.scaled(point.z)
        length = torch.linalg.vector_norm(v[..., 1:], dim=-1)
        frame = v[..., 1:] / length.clamp_min(1e-300).unsqueeze(-1)
        across = self.theta.squeeze(-1).square()
        stretch = 1 + 2 * length.square()  # 2 v_0^2 - 1, as v_0^2 = 1 + |v_1|^2
        slopes = (across * stretch if program.summed else across / stretch), across
        K = program.shape.gram(program.A, frame, slopes)
        self.easy = 1 / (across * stretch)  # 1 / H_tt
        side = 2 * self.theta.square() * v[..., :1] * v[..., 1:]  # H_tw, (B, G, k)
        self.gain = self.easy.unsqueeze(-1) * side
        lift = program.A.apply(program.shape.joined(self.gain))
        border = None if program.summed else (lift, self.easy.sum(-1))
        self.system = RefinedSystem(K, point.u / point.lam, border)

    def fixed(self, r: Tensor) -> tuple[Any, Tensor, Tensor]:
        r = self.scaled(r)
        t, w = r[..., 0], r[..., 1:]
        if not self.program.summed:
            w = w - t.unsqueeze(-1) * self.gain
        surplus = self.at.z[..., 0].sum(-1) - 1 + (self.easy * t).sum(-1)
        return r, self.program.shape.joined(w), surplus

    def moved(self, r: Tensor, known: Any, ds: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        groups = self.program.shape.groups(ds)
        dy = self.easy * (known[..., 0] - dt.unsqueeze(-1)) + (self.gain * groups).sum(-1)
        dz = cone(torch.zeros_like(dy) if self.program.summed else dy, groups)
        scaled = self.scaled(dz)
        return known - self.scaled(scaled), dz, scaled

    def centred(self, mu: Tensor, products: tuple[Tensor, Tensor]) -> Tensor:
        x, z = products
        first = mu[:, None, None] - (x * z).sum(-1, keepdim=True)
        rest = -x[..., :1] * z[..., 1:] - z[..., :1] * x[..., 1:]
        # The quotient of (first, rest) by the point.
        at = self.point
        t = (at[..., :1] * first - (at[..., 1:] * rest).sum(-1, keepdim=True)) / det(at)
        return torch.cat([t, (rest - t * at[..., 1:]) / at[..., :1]], -1) - at

    def least(self, *moves: Tensor) -> list[Tensor]:
        size = det(self.point).sqrt()
        x = self.point / size
        found = []
        for move in moves:
            d = move / size
            first = (flip(x) * d).sum(-1, keepdim=True)
            rest = d[..., 1:] - (first + d[..., :1]) / (1 + x[..., :1]) * x[..., 1:]
            found.append((first.squeeze(-1) - torch.linalg.vector_norm(rest, dim=-1)).amin(-1))
        return found

    def inner(self, x: Tensor, z: Tensor) -> Tensor:
        return (x * z).sum((-2, -1))

    def scaled(self, x: Tensor) -> Tensor:
        """Return the root of H times x."""
        v = self.v
        inner = (v[..., 1:] * x[..., 1:]).sum(-1, keepdim=True)
        first = v[..., :1] * x[..., :1] + inner
        rest = x[..., 1:] + (x[..., :1] + inner / (1 + v[..., :1])) * v[..., 1:]
        return self.theta * torch.cat([first, rest], -1)


def cone(y: Tensor, s: Tensor) -> Tensor:
    """Return (y, -s) of each group, (B, G, 1 + k)."""
    return torch.cat([y.unsqueeze(-1), -s], -1)


def flip(x: Tensor) -> Tensor:
    """Return J x."""
    return torch.cat([x[..., :1], -x[..., 1:]], -1)


def det(x: Tensor) -> Tensor:
    """Return t^2 - |w|^2, (B, G, 1), positive."""
    length = torch.linalg.vector_norm(x[..., 1:], dim=-1, keepdim=True)
    return ((x[..., :1] - length) * (x[..., :1] + length)).clamp_min(1e-300)
