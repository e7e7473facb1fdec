r"""The cone of `Schatten(1)` and `Schatten(inf)`: positive semidefinite matrices [[P, W], [W', Q]].

With <x, z> = tr(x z) / 2, z = [[Y, -S], [-S', T]] and V z V = x, V = G G', a step has

    dW = V11 dS V22 + V12 dS' V12 + ...                      where Y = T = I,       p = 1,
    dS = U11 dW U22 + U12 dW' U12 + ...,   U = V^-1,         where P = Q = t I,     p = inf.

A constraint has rank one in W. So for p = 1 the Schur complement is a sum of Hadamard products,

    M = (D V11 D') o (R V22 R') + (D V12 R') o (D V12 R')'.

For p = inf, V11 = B B', V22 = C C' and V12 = B diag(k) C'. In these coordinates the map of the
second line couples only the entries (i, j) and (j, i), and has the inverse

    y_ij -> (1 - k_i^2)(1 - k_j^2) / (1 - k_i^2 k_j^2) (y_ij - k_i k_j y_ji).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mirrorhead.geometry import Schatten
from mirrorhead.margin import _compiled
from mirrorhead.margin._conic import (
    MAX_ITERATIONS,
    PATIENCE,
    Point,
    Program,
    Scaling,
    solve_program,
)
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._interior_point import SolverResult
from mirrorhead.margin._linear_systems import RefinedSystem, refuse_large
from mirrorhead.margin._shapes import turn


def solve_spectral(A: ConstraintMatrix, b: Tensor, norm: Schatten, tol: float) -> SolverResult:
    """Minimise the sum (p = 1) or the largest (p = inf) of the singular values, A W >= b."""
    refuse_large(A, norm)
    # W needs no columns outside the span of the queries.
    basis = None
    if A.right.shape[1] < A.right.shape[2]:
        basis, triangle = torch.linalg.qr(A.right.mT)
        A = ConstraintMatrix(A.left, triangle.mT)
    result = solve_program(A, b, SpectralProgram(A, b, norm.p == 1), tol)
    if basis is None:
        return result
    return result._replace(w=(result.w.view(A.batch, *A.shape) @ basis.mT).flatten(1))


class SpectralProgram(Program):
    """Matrices x and z of order a + c; the weights are (B, a c)."""

    def __init__(self, A: ConstraintMatrix, b: Tensor, summed: bool) -> None:
        self.A, self.b, self.summed = A, b, summed
        self.degree = sum(A.shape) / 2

    def take(self, keep: Tensor) -> SpectralProgram:
        return SpectralProgram(self.A.take(keep), self.b[keep], self.summed)

    def weights(self, x: Tensor) -> Tensor:
        a = self.A.shape[0]
        return x[:, :a, a:].flatten(1)

    def matrix(self, w: Tensor) -> Tensor:
        return w.view(-1, *self.A.shape)

    def start(self, w: Tensor) -> Point:
        W, (a, c) = self.matrix(w), self.A.shape
        u = self.A.apply(w) - self.b
        U, sigma, Vt = torch.linalg.svd(self.matrix(self.A.adjoint(1 / u)), full_matrices=False)
        size = sigma.amax(-1) if self.summed else sigma.sum(-1)
        mu = 0.6 / size
        largest = 1.5 * torch.linalg.matrix_norm(W, 2)
        sigma = (mu.unsqueeze(-1) * sigma).unsqueeze(-2)
        S = (U * sigma) @ Vt
        eye = torch.eye(a + c).to(w)
        if self.summed:
            z = eye.expand(len(w), -1, -1)
        else:
            z = 0.8 / (a + c) * eye + block((U * sigma) @ U.mT, (Vt.mT * sigma) @ Vt)
        t = torch.maximum(largest, mu if self.summed else mu * self.degree)
        x = t[:, None, None] * eye + off(W)
        return Point(x, z - off(S), u, mu.unsqueeze(-1) / u)

    def bounds(self, point: Point) -> tuple[Tensor, Tensor]:
        trace = 0.5 * point.x.diagonal(dim1=-2, dim2=-1).sum(-1)
        upper = trace if self.summed else trace / self.degree
        return upper, torch.ones_like(upper)

    def compiled(self, point: Point, tol: float) -> tuple[Tensor, ...] | None:
        rule = tol, MAX_ITERATIONS, PATIENCE
        return _compiled.solve_cones(self.A, self.b, point, self.summed, *rule)

    def scaling(self, point: Point) -> Scaling:
        return (_Summed if self.summed else _Largest)(self, point)

    def tidied(self, point: Point) -> Point:
        a, x, z = self.A.shape[0], point.x, point.z
        eye = torch.eye(x.shape[-1]).to(x)
        if self.summed:
            y, x = eye, sym(x)
        else:
            y = sym(block(z[:, :a, :a], z[:, a:, a:]))
            y = y * (2 / y.diagonal(dim1=-2, dim2=-1).sum(-1))[:, None, None]
        return point._replace(x=x, z=y - off(self.matrix(self.A.adjoint(point.lam))))


class _Spectral(Scaling):
    """The scaling G with G^-1 x G^-T = G' z G, a diagonal matrix."""

    def __init__(self, program: SpectralProgram, point: Point) -> None:
        self.program, self.at, self.a = program, point, program.A.shape[0]
        L = torch.linalg.cholesky_ex(point.x)[0]
        square = L.mT @ point.z @ L
        values, vectors = torch.linalg.eigh(sym(square).nan_to_num(0.0, 0.0, 0.0))
        self.values = values.clamp_min(1e-300).sqrt()
        root = self.values.sqrt()
        self.G = (L @ vectors) / root.unsqueeze(-2)
        self.point = torch.diag_embed(self.values)
        self.relative = torch.rsqrt(self.values.unsqueeze(-1) * self.values.unsqueeze(-2))

    def least(self, *moves: Tensor) -> list[Tensor]:
        scaled = torch.stack(moves) * self.relative
        return list(torch.linalg.eigvalsh(sym(scaled).nan_to_num(0.0, 0.0, 0.0))[..., 0])

    def inner(self, x: Tensor, z: Tensor) -> Tensor:
        return 0.5 * (x * z).sum((-2, -1))

    def centred(self, mu: Tensor, products: tuple[Tensor, Tensor]) -> Tensor:
        both = self.values.unsqueeze(-1) + self.values.unsqueeze(-2)
        x, z = products
        r = -2 * sym(x @ z) / both
        r.diagonal(dim1=-2, dim2=-1).add_(mu.unsqueeze(-1) / self.values - self.values)
        return r


class _Summed(_Spectral):
    def __init__(self, program: SpectralProgram, point: Point) -> None:
        super().__init__(program, point)
        A, a = program.A, self.a
        B, n, R, _ = A.left.shape
        D = A.left.reshape(B, n * R, a)
        V = self.G @ self.G.mT
        M = (D @ V[:, :a, :a] @ D.mT).view(B, n, R, n, R)
        M.mul_((A.right @ V[:, a:, a:] @ A.right.mT)[:, :, None, :, None])
        side = (D @ V[:, :a, a:] @ A.right.mT).view(B, n, R, n)  # of row (i, t) and sample j
        M.addcmul_(side.unsqueeze(-1), side.permute(0, 3, 1, 2).unsqueeze(2))
        self.system = RefinedSystem(M.view(B, n * R, n * R), point.u / point.lam)

    def fixed(self, r: Tensor) -> tuple[Any, Tensor, Tensor]:
        R = self.G[:, : self.a] @ r @ self.G[:, self.a :].mT
        return None, R.flatten(1), R.new_zeros(len(R))

    def moved(self, r: Tensor, known: Any, ds: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        dz = -off(self.program.matrix(ds))
        scaled = self.G.mT @ dz @ self.G
        return self.G @ (r - scaled) @ self.G.mT, dz, scaled


class _Largest(_Spectral):
    """In the coordinates of B and C, dx = r - V dz V reads, with y and t the blocks of dz,

    r11 - dt E = y + k t k - (S k + k S'),      r22 - dt F = t + k y k - (S' k + k S),
    r12 - dW   = y k + k t - (S + k S' k),      E = (B'B)^-1,    F = (C'C)^-1.
    """

    def __init__(self, program: SpectralProgram, point: Point) -> None:
        super().__init__(program, point)
        (a, c), V = program.A.shape, self.G @ self.G.mT
        one, two = (torch.linalg.cholesky_ex(v)[0] for v in (V[:, :a, :a], V[:, a:, a:]))
        half = torch.linalg.solve_triangular(one, V[:, :a, a:], upper=False)
        half = torch.linalg.solve_triangular(two, half.mT, upper=False).mT
        U, k, Vt = torch.linalg.svd(half.nan_to_num(0.0, 0.0, 0.0))
        self.B, self.C = one @ U, two @ Vt.mT
        # The inverses of B' and C', and G in the new coordinates.
        self.inverses = (
            torch.linalg.solve_triangular(one.mT, U, upper=True),
            torch.linalg.solve_triangular(two.mT, Vt.mT, upper=True),
        )
        self.frames = self.inverses[0].mT @ self.G[:, :a], self.inverses[1].mT @ self.G[:, a:]
        self.small, self.large = min(a, c), max(a, c)
        k = pad(k.clamp_max(1 - 1e-16), (0, self.large - self.small))
        i, j = self.sides = k.unsqueeze(-1), k.unsqueeze(-2)
        kernel = (1 - i * i) * (1 - j * j) / ((1 - i * j) * (1 + i * j))
        self.own = kernel[:, :a, :c]
        self.swap = -(i * j * kernel)[:, : self.small, : self.small]
        self.E = [widened(y.mT @ y, self.large) for y in self.inverses]
        self.of_t = self._halves(self.E[0] + self.E[1], self.E[0] - self.E[1])
        self.gain = self._coupled(*self.of_t)  # what W gains from t
        K = program.A.turned(self.B, self.C).gram(self.own, self.swap)
        border = program.A.apply(self.gain.flatten(1)), self._trace(*self.of_t)
        self.system = RefinedSystem(K, point.u / point.lam, border)

    def fixed(self, r: Tensor) -> tuple[Any, Tensor, Tensor]:
        one, two = (widened(frame @ r @ frame.mT, self.large) for frame in self.frames)
        halves = self._halves(one + two, one - two)
        side = self.B @ self.frames[0] @ r @ self.frames[1].mT @ self.C.mT
        surplus = 0.5 * self.at.z.diagonal(dim1=-2, dim2=-1).sum(-1) - 1 + self._trace(*halves)
        dW = side - self._coupled(*halves)
        return (halves, dW), dW.flatten(1), surplus

    def moved(self, r: Tensor, known: Any, ds: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        (of_r, dW), i, j = known, *self.sides
        dS, dt = self.program.matrix(ds), dt[:, None, None]
        dW = dW + turn(self.B, self.C, self.own, self.swap, dS) + dt * self.gain
        S = self.B.mT @ dS @ self.C
        S = pad(S, (0, self.large - S.shape[2], 0, self.large - S.shape[1]))
        of_S = self._halves((S + S.mT) * (i + j), (S - S.mT) * (j - i))
        plus, minus = (
            one + two - dt * three for one, two, three in zip(of_r, of_S, self.of_t, strict=True)
        )
        y, t = (
            f @ part[:, : f.shape[-1], : f.shape[-1]] @ f.mT
            for f, part in zip(self.inverses, (plus + minus, plus - minus), strict=True)
        )
        dz = block(y, t) - off(dS)
        return off(dW) + dt * torch.eye(r.shape[-1]).to(r), dz, self.G.mT @ dz @ self.G

    def _halves(self, total: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y + t)/2 and (y - t)/2, where y + k t k and t + k y k have this sum and
        difference."""
        i, j = self.sides
        return 0.5 * total / (1 + i * j), 0.5 * apart / (1 - i * j)

    def _coupled(self, plus: Tensor, minus: Tensor) -> Tensor:
        """Return y k + k t as weights."""
        i, j = self.sides
        both = plus * (i + j) + minus * (j - i)
        return self.B @ both[:, : self.B.shape[-1], : self.C.shape[-1]] @ self.C.mT

    def _trace(self, plus: Tensor, minus: Tensor) -> Tensor:
        """Return half the traces of y and t."""
        E, F = self.E
        return 0.5 * (plus * (E + F) + minus * (E - F)).sum((-2, -1))


def widened(x: Tensor, size: int) -> Tensor:
    return pad(x, (0, size - x.shape[-1]) * 2)


def block(P: Tensor, Q: Tensor) -> Tensor:
    """[[P, 0], [0, Q]]."""
    a, c = P.shape[-1], Q.shape[-1]
    return pad(P, (0, c, 0, c)) + pad(Q, (a, 0, a, 0))


def off(S: Tensor) -> Tensor:
    """[[0, S], [S', 0]]."""
    a, c = S.shape[1:]
    whole = S.new_zeros(len(S), a + c, a + c)
    whole[:, :a, a:], whole[:, a:, :a] = S, S.mT
    return whole


def sym(X: Tensor) -> Tensor:
    return 0.5 * (X + X.mT)
