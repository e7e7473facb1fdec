"""Three ways to solve K x = r with K = A diag(h) A' + diag(e), the system of a Newton step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor

from mirrorhead.margin._constraints import ConstraintMatrix

# Dense up to this many rows or columns, conjugate gradients beyond; where these fail, dense
# up to the second limit, slower and safer.
DENSE_LIMIT, LAST_RESORT = 700, 4000
# A batch is solved in parts whose largest tensors have this many numbers (4 MB) at most, about
# what the caches of a core hold; a single problem may exceed it.
BUDGET = 1 << 19
# The columns kept for the preconditioner have at most this many numbers (600 MB).
COLUMN_BUDGET = 75 << 20
# Blocks of this many numbers in all take milliseconds, far longer than handing them to threads.
SHARED_FROM = 1 << 20
# A step that may be wrong by this much is solved in float32.
FLOAT32_ACCURACY = 1e-5

Map = Callable[[Tensor], Tensor]
# solve(r, guess, tol) -> x; only the iterative system looks at guess and tol.
Solver = Callable[[Tensor, Tensor | None, float], Tensor]


def system_kind(A: ConstraintMatrix, limit: int) -> Literal["rows", "columns", "iterative"]:
    """Choose one of the three; systems of up to `limit` rows or columns are factored."""
    if min(A.rows, A.columns) > limit:
        return "iterative"
    return "rows" if A.rows <= min(2 * A.columns, limit) else "columns"


def problems_at_once(A: ConstraintMatrix, limit: int) -> int:
    """How many problems to solve at a time, so that memory stays bounded."""
    kind = system_kind(A, limit)
    if kind == "iterative":
        return 1
    n, R, a = A.left.shape[1:]
    each = n * n * R * a + A.rows**2 if kind == "rows" else 8 * A.columns**2 + A.rows * a
    return max(1, BUDGET // each)


def make_system(A: ConstraintMatrix, limit: int, p: float, allow_float32: bool) -> System:
    """Choose a system; `allow_float32` permits float32 where the requested accuracy allows it."""
    kind = system_kind(A, limit)
    if kind == "iterative":
        return IterativeSystem(A, grows=p > 2)
    return RowSystem(A, p == 2, allow_float32) if kind == "rows" else ColumnSystem(A)


class RowSystem:
    """K itself, m x m, by Cholesky. At p = 2 only e changes, and K keeps the rest.

    The large temporaries are kept from step to step, and handed on when the system shrinks:
    allocating them again costs more in page faults than the arithmetic done on them.
    """

    steps = 0

    def __init__(
        self,
        A: ConstraintMatrix,
        constant: bool = False,
        allow_float32: bool = False,
        space: list[Tensor] | None = None,
    ) -> None:
        B, n, R, a = A.left.shape
        lines = n if B > 1 else min(n, max(1, 8 * BUDGET // (n * R * a)))
        if space is not None:
            lines = min(lines, space[0].numel() // (B * n * R * a))
        shapes = [(B, lines, n, R, a), (B, n * R, n * R), (B, n * R, n * R)]
        space = space or [A.left.new_empty(math.prod(shape)) for shape in shapes]
        views = zip(space, shapes, strict=True)
        # K, of which the lower triangle counts, its Cholesky factor L, and `lines` rows of blocks.
        self.scaled, self.K, L = (flat[: math.prod(shape)].view(shape) for flat, shape in views)
        self.A, self.L, self.space = A, L.mT, space
        self.constant = constant  # h never changes
        self.filled = False  # K holds A diag(h) A' but for its diagonal, once and for all
        self.gram = L.new_empty(B, n * R)  # the diagonal of A diag(h) A' in the last factor
        self.pairs = A.right[:, :, None] * A.right[:, None]  # (B, n, n, c): right_i o right_j
        self.float32 = None  # the same system in float32, while that is accurate enough
        if allow_float32:
            single = ConstraintMatrix(A.left.float(), A.right.float())
            self.float32 = RowSystem(single, constant, space=[x.view(torch.float32) for x in space])

    def keep_rows(self, A: ConstraintMatrix) -> RowSystem:
        """The system of A, which has fewer rows, in the same memory."""
        return RowSystem(A, self.constant, self.float32 is not None, self.space)

    def take(self, keep: Tensor) -> RowSystem:
        taken, B = copy(self), len(keep)
        taken.A, taken.gram, taken.pairs = self.A.take(keep), self.gram[keep], self.pairs[keep]
        taken.scaled, taken.L = self.scaled[:B], self.L[:B]
        taken.K = self.K[keep] if self.filled else self.K[:B]
        taken.float32 = None if self.float32 is None else self.float32.take(keep)
        return taken

    def factor(self, h: Tensor, e: Tensor, tol: float) -> Solver:
        if self.float32 is not None:
            if tol >= FLOAT32_ACCURACY:
                solve = self.float32.factor(h.float(), e.float(), tol)
                self.gram = self.float32.gram
                return lambda r, guess, tol: solve(r.float(), None, tol).double()
            self.float32 = None  # from now on float64
        diagonal = self.K.diagonal(dim1=-2, dim2=-1)
        if not self.filled:
            self._fill(h)
            self.gram = diagonal.clone()
            self.filled = self.constant
        torch.add(self.gram, e, out=diagonal)
        L = cholesky(self.K, out=self.L)
        return lambda r, guess, tol: cholesky_solve(L, r)

    def _fill(self, h: Tensor) -> None:
        """K = A diag(h) A', by its blocks left_i diag(H (right_i o right_j)) left_j'."""
        left = self.A.left
        B, n, R, a = left.shape
        lines = self.scaled.shape[1]
        weights = (self.pairs.view(B, n * n, -1) @ h.view(B, a, -1).mT).view(B, n, n, 1, a)
        K = self.K.view(B, n, R, n * R)
        for k in range(0, n, lines):  # one turn, unless a single problem is large
            at = slice(k, min(k + lines, n))
            scaled = torch.mul(left[:, None], weights[:, at], out=self.scaled[:, : at.stop - k])
            torch.matmul(left[:, at], scaled.view(B, -1, n * R, a).mT, out=K[:, at])


@dataclass
class ColumnSystem:
    r"""N x N matrices, for problems with many more rows than columns.

    With B = A diag(h)^1/2, split the rows into S, the k rows with the smallest e (the active
    ones are among them), and the rest O. Eliminating O, whose e is not small, leaves

        M = I + B_O' E_O^-1 B_O = L L',    C = B_S L^-T,    (C C' + E_S) x_S = r_S - C L^-1 g,

    g = B_O' E_O^-1 r_O. Eliminating all rows at once would be shorter, and loses the identity
    in M to rounding as soon as some e are tiny.
    """

    A: ConstraintMatrix
    steps: int = 0

    def take(self, keep: Tensor) -> ColumnSystem:
        return ColumnSystem(self.A.take(keep))

    def factor(self, h: Tensor, e: Tensor, tol: float) -> Solver:
        A = self.A
        root = h.sqrt()
        k = min(A.rows, A.columns + A.columns // 2)
        active = e.topk(k, dim=-1, largest=False).indices
        inverse = (1 / e).scatter(1, active, 0.0)
        M = self._weighted(inverse).mul_(root.unsqueeze(-1)).mul_(root.unsqueeze(-2))
        M.diagonal(dim1=-2, dim2=-1).add_(1)
        L = cholesky(M)
        rows = A.take_rows(active) * root.unsqueeze(-2)  # B_S, (B, k, N)
        C = torch.linalg.solve_triangular(L, rows.mT, upper=False).mT
        K = C @ C.mT
        K.diagonal(dim1=-2, dim2=-1).add_(e.gather(1, active))
        small = cholesky(K)

        def solve(r: Tensor, guess: Tensor | None, tol: float) -> Tensor:
            g = root * A.adjoint(inverse * r)
            t = torch.linalg.solve_triangular(L, g.unsqueeze(-1), upper=False)
            x = cholesky_solve(small, r.gather(1, active) - (C @ t).squeeze(-1))
            t = t + C.mT @ x.unsqueeze(-1)
            y = torch.linalg.solve_triangular(L.mT, t, upper=True).squeeze(-1)
            rest = inverse * (r - A.apply(root * y))
            return rest.scatter(1, active, x)

        return solve

    def _weighted(self, e: Tensor) -> Tensor:
        """A' diag(e) A, (B, N, N)."""
        left, right = self.A.left, self.A.right
        B, n, R, a = left.shape
        c = right.shape[2]
        inner = (left.mT * e.view(B, n, 1, R)) @ left  # (B, n, a, a)
        outer = right[:, :, :, None] * right[:, :, None, :]  # (B, n, c, c)
        full = inner.view(B, n, a * a).mT @ outer.view(B, n, c * c)
        return full.view(B, a, a, c, c).transpose(2, 3).reshape(B, a * c, a * c)


@dataclass
class IterativeSystem:
    r"""Conjugate gradients, preconditioned by blocks and by the heaviest columns.

    P = blockdiag(K without the columns in S) + A_S diag(h_S) A_S', inverted by Woodbury. For
    p <= 2 the blocks suffice and S is empty. For p > 2 a few weights near zero have an
    enormous h, couple all blocks, and would cost thousands of steps: they go to S, whose
    size doubles when the steps become many.
    """

    A: ConstraintMatrix
    grows: bool  # whether S may be other than empty
    steps: int = 0
    heavy: int = 0  # the size of S
    last: int = 0  # steps of the longest solve with the last factorisation

    @cached_property
    def column_sizes(self) -> Tensor:
        return self.A.column_sizes()

    def take(self, keep: Tensor) -> IterativeSystem:
        return self  # one problem at a time: what is kept is everything

    def factor(self, h: Tensor, e: Tensor, tol: float) -> Solver:
        A = self.A
        if self.grows and self.last > 32:
            most = min(2048, A.columns // 4, COLUMN_BUDGET // A.rows)
            self.heavy = min(most, max(128, self.heavy) * (1 + self.last // 32))
        self.last = 0
        precondition = self._preconditioner(h, e)

        def K(v: Tensor) -> Tensor:
            return A.apply(h * A.adjoint(v)) + e * v

        def solve(r: Tensor, guess: Tensor | None, tol: float) -> Tensor:
            x, steps = _conjugate_gradients(K, r, precondition, guess, tol)
            self.steps += steps
            self.last = max(self.last, steps)
            return x

        return solve

    def _preconditioner(self, h: Tensor, e: Tensor) -> Map:
        A = self.A
        B, n, R, _ = A.left.shape
        heavy, root = None, h
        if self.heavy:
            heavy = (h * self.column_sizes)[0].topk(self.heavy).indices
            root = h[0, heavy].sqrt()
            h = h.clone()
            h[0, heavy] = 0
        K = A.block_gram(h)
        K.diagonal(dim1=-2, dim2=-1).add_(e.view(B, n, R))
        L = K.new_empty(K.shape)
        _share_blocks(lambda at: L[:, at].copy_(cholesky(K[:, at])), n, R)

        def solve_blocks(x: Tensor, upper: bool) -> Tensor:
            """L^-1 x or L'^-1 x for x of shape (B, n, R, 1)."""
            y, factor = torch.empty_like(x), L.mT if upper else L

            def solve(at: slice) -> None:
                y[:, at] = torch.linalg.solve_triangular(factor[:, at], x[:, at], upper=upper)

            _share_blocks(solve, n, R)
            return y

        if heavy is None:
            return lambda r: solve_blocks(solve_blocks(r.view(B, n, R, 1), False), True).view(B, -1)
        Y = K.new_empty(B, n, R, self.heavy)
        for at in A.chunks(R * self.heavy):
            columns = A.take_columns(heavy, at).mul_(root)
            Y[:, at] = torch.linalg.solve_triangular(L[:, at], columns, upper=False)
        Y = Y.view(B, n * R, -1)
        M = Y.mT @ Y
        M.diagonal(dim1=-2, dim2=-1).add_(1)
        small = cholesky(M)

        def precondition(r: Tensor) -> Tensor:
            flat = solve_blocks(r.view(B, n, R, 1), False).view(B, n * R, 1)
            flat = flat - Y @ torch.cholesky_solve(Y.mT @ flat, small)
            return solve_blocks(flat.view(B, n, R, 1), True).view(B, -1)

        return precondition


System = RowSystem | ColumnSystem | IterativeSystem


@cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads do not survive a fork, so that each process has its own."""
    return ThreadPoolExecutor(count, "mirrorhead-blocks")


def _share_blocks(work: Callable[[slice], object], n: int, R: int) -> None:
    """Do `work` for n blocks R x R; large ones on several threads, since torch would use one."""
    count = min(torch.get_num_threads(), n)
    if count == 1 or n * R * R < SHARED_FROM:
        work(slice(0, n))
        return
    parts = [slice(k * n // count, (k + 1) * n // count) for k in range(count)]
    list(_threads(count, os.getpid()).map(work, parts))


def _conjugate_gradients(
    K: Map, r: Tensor, precondition: Map, guess: Tensor | None, tol: float
) -> tuple[Tensor, int]:
    """Solve K x = r until the preconditioned residual has fallen to tol of that of x = 0."""
    x = torch.zeros_like(r) if guess is None else guess.clone()
    goal = tol**2 * (r * precondition(r)).sum()
    if guess is not None:
        r = r - K(guess)
    z = precondition(r)
    d, rz = z, (r * z).sum()
    steps = 0
    while steps < 1000 and bool(rz > goal):
        Kd = K(d)
        alpha = rz / (d * Kd).sum()
        x = x + alpha * d
        r = r - alpha * Kd
        z = precondition(r)
        rz, before = (r * z).sum(), rz
        d = z + (rz / before) * d
        steps += 1
    return x, steps


def cholesky(K: Tensor, out: Tensor | None = None) -> Tensor:
    """Cholesky factors of a batch; a matrix that fails gets a jitter of its own."""
    info = torch.empty(K.shape[:-2], dtype=torch.int32, device=K.device)
    L, info = torch.linalg.cholesky_ex(K, out=None if out is None else (out, info))
    jitter = 50 * torch.finfo(K.dtype).eps
    while bool((info > 0).any()) and jitter < 1e-2:
        bad = info > 0
        # In proportion to each diagonal entry: these range over many decades.
        shifted = K[bad]
        shifted = shifted + torch.diag_embed(jitter * shifted.diagonal(dim1=-2, dim2=-1))
        L[bad], info[bad] = torch.linalg.cholesky_ex(shifted)
        jitter *= 100
    return L


def cholesky_solve(L: Tensor, r: Tensor) -> Tensor:
    """Two triangular solves: twice as fast as torch.cholesky_solve on batches."""
    y = torch.linalg.solve_triangular(L, r.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(L.mT, y, upper=True).squeeze(-1)


def refuse_large(A: ConstraintMatrix, norm: object) -> None:
    """Refuse what `RefinedSystem` would not finish in reasonable time and memory."""
    if A.rows > LAST_RESORT:
        raise ValueError(
            f"{norm!r} takes at most {LAST_RESORT} constraints per problem, got {A.rows}"
        )


class RefinedSystem:
    """(K + diag) y = r, or the same with a border; Jacobi scaling and refinement. Takes over K.

    With a border (column, corner) the solution (y, t) is that of (K + diag) y + column t = r and
    column' y - corner t = s. A corner near 0 makes this one constraint, and K alone is factored.
    """

    def __init__(
        self, K: Tensor, diagonal: Tensor, border: tuple[Tensor, Tensor] | None = None
    ) -> None:
        K.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        self.scale = K.diagonal(dim1=-2, dim2=-1).rsqrt()
        self.K = K.mul_(self.scale.unsqueeze(-1)).mul_(self.scale.unsqueeze(-2))
        self.L = cholesky(K)
        self.border = border
        if border is not None:
            column = border[0] * self.scale
            self.border, self.against = (column, border[1]), cholesky_solve(self.L, column)
            self.pivot = border[1] + (column * self.against).sum(-1)

    def solve(self, r: Tensor) -> Tensor:
        return self.solve_bordered(r, r.new_zeros(len(r)))[0]

    def solve_bordered(self, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and t; t is 0 without a border."""
        r = r * self.scale
        y, t = torch.zeros_like(r), torch.zeros_like(s)
        for _ in range(3):
            left = r - (self.K @ y.unsqueeze(-1)).squeeze(-1)
            if self.border is None:
                y = y + cholesky_solve(self.L, left)
                continue
            column, corner = self.border
            step = cholesky_solve(self.L, left - column * t.unsqueeze(-1))
            rest = s - (column * (y + step)).sum(-1) + corner * t
            more = -rest / self.pivot
            y, t = y + step - self.against * more.unsqueeze(-1), t + more
        return y * self.scale, t
