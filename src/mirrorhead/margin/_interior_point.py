"""A primal-dual interior point method for min ||w||_p subject to A w >= b, 1 < p < inf.

It knows constraint matrices and exponents, nothing of attention. The barrier and the exponent
move together: the method starts near p = 2, where the problem is quadratic, and moves the
exponent to p while the gap falls. There is no separate solve at p = 2.

Small problems on a CPU are solved by the compiled kernel (`_compiled.py`), all others in torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mirrorhead.margin import _compiled
from mirrorhead.margin._compiled import Verdict
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._linear_systems import (
    DENSE_LIMIT,
    LAST_RESORT,
    RowSystem,
    make_system,
    problems_at_once,
)
from mirrorhead.margin._newton_step import (
    Iterate,
    Schedule,
    newton_step,
    normalised,
    starting_point,
)

# The problem is infeasible if the hull of the unit rows comes this near to the origin.
INFEASIBLE = 1e-9
# Rows are dropped once the gap is below the first, if their ratio (`_rows_that_matter`) exceeds
# the second, and if at most the third, a fraction of each block, remains.
DROP_BELOW, DROP_RATIO, MOST_KEPT = 0.3, 5.0, 0.7
# With fewer rows than this, neither float32 nor dropping rows saves time.
SHORTCUT_ROWS = 100

Start = tuple[Tensor, Tensor] | None  # w and lam of a similar problem


@dataclass(frozen=True, eq=False)
class SolverResult:
    """Where the method ended.

    w: (B, N) with ||w||_p = 1; lam: (B, m) >= 0, of no particular scale; gap: (B,), the
    certified relative gap, inf where w has no positive margin; infeasible: (B,), lam is a
    Farkas certificate; iterations and inner: (B,), Newton and conjugate-gradient steps.
    """

    w: Tensor
    lam: Tensor
    gap: Tensor
    infeasible: Tensor
    iterations: Tensor
    inner: Tensor

    @staticmethod
    def empty(A: ConstraintMatrix, b: Tensor) -> SolverResult:
        """A result to fill in: no point, no certificate, no steps."""
        counts = torch.zeros(2, A.batch, dtype=torch.long, device=b.device)
        return SolverResult(
            w=b.new_zeros(A.batch, A.columns),
            lam=torch.zeros_like(b),
            gap=b.new_full((A.batch,), math.inf),
            infeasible=torch.zeros(A.batch, dtype=torch.bool, device=b.device),
            iterations=counts[0],
            inner=counts[1],
        )


# A problem that does not finish with one schedule starts again with the next.
_SCHEDULES = (
    Schedule(1.5, 0.5, 0.1, 40, DENSE_LIMIT, shortcuts=True),
    Schedule(1.25, 0.2, 0.1, 60, LAST_RESORT),
    Schedule(1.15, 0.1, 0.3, 100, LAST_RESORT),
)


def solve(
    A: ConstraintMatrix, b: Tensor, p: float, tol: float, start: Start = None
) -> SolverResult:
    r"""Minimise ||w||_p subject to A w >= b for a batch of problems.

    The rows of A should have norm 1 or 0. b is (B, m), at most 1; a row of zeros with b = -1
    is a constraint that always holds, which is how a batch is padded. `start` is a pair
    (w, lam) from a similar problem; where it does not help, the method starts from the data.

    >>> left = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    >>> A = ConstraintMatrix(left, torch.ones(1, 1, 1, dtype=torch.float64))
    >>> b = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    >>> result = solve(A, b, p=3, tol=1e-12)
    >>> result.w / result.w[0, 0]  # both constraints hold with equality: w = b
    tensor([[1.0000, 0.5000]], dtype=torch.float64)
    """
    run = _Solver(A, b, p, tol, SolverResult.empty(A, b))
    left = torch.arange(A.batch, device=b.device)
    if start is not None:
        left = run.attempt(_SCHEDULES[0], start, left)
    for schedule in _SCHEDULES:
        left = run.attempt(schedule, None, left)
        if schedule.shortcuts and len(left):
            # Dropped rows may have mattered after all: continue with all of them.
            so_far = run.result.w.clone(), run.result.lam.clone()
            left = run.attempt(replace(schedule, shortcuts=False), so_far, left)
    return run.result


@dataclass(frozen=True, eq=False)
class _Solver:
    """The problems of a batch, and what has been found of them."""

    A: ConstraintMatrix
    b: Tensor
    p: float
    tol: float
    result: SolverResult

    def attempt(self, schedule: Schedule, start: Start, left: Tensor) -> Tensor:
        """Run one schedule on the problems named by `left`; return those that remain unsolved."""
        A, b = self.A, self.b
        if not len(left):
            return left
        if _compiled.can_solve(A, schedule):
            return self._attempt_compiled(schedule, start, left)
        still = []
        for index in left.split(problems_at_once(A, schedule.dense_limit)):
            everything = len(index) == A.batch
            rows = Rows.of(A, b) if everything else Rows.of(A.take(index), b[index])
            near = None if start is None else (start[0][index], start[1][index])
            still.append(index[self._iterate(rows, schedule, near, index)])
        return torch.cat(still)

    def _attempt_compiled(self, schedule: Schedule, start: Start, left: Tensor) -> Tensor:
        """The same by the compiled kernel."""
        A, b, result = self.A, self.b, self.result
        if len(left) < A.batch:
            A, b = A.take(left), b[left]
            start = None if start is None else (start[0][left], start[1][left])
        drop = schedule.shortcuts and A.rows >= SHORTCUT_ROWS
        # The kernel drops row by row, not block by block, so more rows go: twice the ratio.
        dropping = _compiled.RowDropping(DROP_BELOW if drop else 0.0, 2 * DROP_RATIO, MOST_KEPT)
        found = _compiled.solve(A, b, self.p, self.tol, schedule, start, INFEASIBLE, dropping)
        result.iterations[left] += found.iterations
        solved, infeasible = found.verdict == Verdict.SOLVED, found.verdict == Verdict.INFEASIBLE
        known = found.verdict != Verdict.LOST
        at = left[known]
        result.w[at], result.lam[at] = found.w[known], found.lam[known]
        result.gap[at], result.infeasible[at] = found.gap[known], infeasible[known]
        return left[~(solved | infeasible)]

    def _iterate(self, rows: Rows, schedule: Schedule, start: Start, index: Tensor) -> Tensor:
        """Iterate until every problem has ended; return True where one ended without a conclusion.

        A problem is written to its place `index` in the result and leaves the batch when it ends.
        """
        p, tol, result = self.p, self.tol, self.result
        every = rows
        shortcuts = schedule.shortcuts and rows.A.rows >= SHORTCUT_ROWS
        system = make_system(rows.A, schedule.dense_limit, p, shortcuts)
        x = starting_point(rows.A, rows.b, p, schedule, start)
        inconclusive = torch.ones(len(index), dtype=torch.bool, device=index.device)
        here = torch.arange(len(index), device=index.device)
        for iteration in range(schedule.iterations + 1):
            gap = rows.gap(x)
            last = iteration == schedule.iterations
            if last or not (float(gap.min()) > tol and float(gap.max()) < math.inf):
                # Some problem may have ended.
                whole = gap
                distance = _hull_distance(x, rows)
                if isinstance(system, RowSystem) and float(distance.min()) < 1e-4:
                    system.float32 = None  # it cannot distinguish such a distance from 0
                lost = ~(gap > -1e-3).squeeze(-1)  # overflow or worse: the point says nothing
                infeasible = (distance < INFEASIBLE) & (gap == math.inf).squeeze(-1) & ~lost
                solved = ((x.p == p) & (gap <= tol)).squeeze(-1)
                ended = infeasible | lost | solved | last
                if bool(ended.any()):
                    if rows is not every:  # the dropped rows have to hold as well
                        whole = x.gap(rows.pairing(x), every.margin(every.A.apply(x.w)))
                        solved &= (whole <= tol).squeeze(-1)
                    done = ended.nonzero().squeeze(-1)
                    at = index[here[done]]
                    result.iterations[at] += iteration
                    result.inner[at] += system.steps
                    done = done[~lost[done]]
                    at = index[here[done]]
                    result.w[at], result.gap[at] = x.w[done], whole[done].squeeze(-1)
                    result.lam[at] = every.b.new_zeros(len(done), every.A.rows).scatter_(
                        1, rows.place[done], x.lam[done]
                    )
                    result.infeasible[at] = infeasible[done]
                    inconclusive[here[done]] = ~(solved | infeasible)[done]
                    keep = (~ended).nonzero().squeeze(-1)
                    if len(keep) == 0:
                        break
                    same = rows is every
                    rows, system, here = rows.take(keep), system.take(keep), here[keep]
                    every = rows if same else every.take(keep)
                    x = x.take(keep)
                    gap = rows.gap(x)
            may_drop = shortcuts and iteration > 0 and float(gap.max()) < DROP_BELOW
            if may_drop and isinstance(system, RowSystem):
                kept = _rows_that_matter(x, system.gram, rows.A, p)
                if kept is not None:
                    x, rows = _drop_rows(x, rows, kept, p)
                    system = system.keep_rows(rows.A)
            x = newton_step(x, rows.A, rows.b, system, p, schedule, gap)
        return inconclusive


@dataclass(frozen=True, eq=False)
class Rows:
    """The constraints A w >= b of a run: all of a problem's, or those that were not dropped."""

    A: ConstraintMatrix
    b: Tensor  # (B, m)
    inverse: Tensor  # (B, m), 1 / b
    padding: Tensor  # (B, m), inf on padding, else 0
    place: Tensor  # (B, m), the index of each row among all of the problem's

    @staticmethod
    def of(A: ConstraintMatrix, b: Tensor) -> Rows:
        padding = torch.zeros_like(b).masked_fill_(b < 0, math.inf)
        return Rows(A, b, 1 / b, padding, torch.arange(A.rows, device=b.device).expand_as(b))

    def take(self, keep: Tensor) -> Rows:
        rest = (self.b, self.inverse, self.padding, self.place)
        return Rows(self.A.take(keep), *(x[keep] for x in rest))

    def keep_rows(self, index: Tensor, flat: Tensor) -> Rows:
        """The rows named by index (B, n, fewer) within each block, or by flat (B, n fewer)."""
        rest = (self.b, self.inverse, self.padding, self.place)
        return Rows(self.A.keep_rows(index), *(x.gather(1, flat) for x in rest))

    def margin(self, aw: Tensor) -> Tensor:
        """The smallest (A w)_k / b_k, (B, 1)."""
        return torch.addcmul(self.padding, aw, self.inverse).amin(-1, keepdim=True)

    def gap(self, x: Iterate) -> Tensor:
        """The gap of x at its current exponent, (B, 1)."""
        return x.gap(self.pairing(x), self.margin(x.aw))

    def pairing(self, x: Iterate) -> Tensor:
        return (self.b * x.lam).sum(-1, keepdim=True)


def _hull_distance(x: Iterate, rows: Rows) -> Tensor:
    """The length of the mean of the unit rows weighted by lam, (B,): 0 proves infeasibility."""
    mass = (x.lam * (rows.b > 0)).sum(-1)
    return torch.linalg.vector_norm(x.s, dim=-1) / mass


def _rows_that_matter(x: Iterate, gram: Tensor, A: ConstraintMatrix, p: float) -> Tensor | None:
    """The rows that still matter, (B, n, fewer) within each block; None if most do.

    A row contributes its entry g of the diagonal of A diag(h) A' to K, beside its own diagonal
    e = u / lam. Where e is far above g the row contributes nothing, and it is becoming
    inactive. Each block keeps as many rows as the block with the most needs.
    """
    B, n, R, _ = A.left.shape
    # For p < 2 more rows can become active while the exponent still moves.
    bound = DROP_RATIO * max(1.0, float(x.p.max() - 1) / (p - 1)) if p < 2 else DROP_RATIO
    ratio = (x.u / (x.lam * gram)).reshape(B, n, R)
    fewer = int((ratio < bound).sum(-1).max())
    if fewer > MOST_KEPT * R:
        return None
    return ratio.topk(fewer, dim=-1, largest=False, sorted=False).indices


def _drop_rows(x: Iterate, rows: Rows, index: Tensor, p: float) -> tuple[Iterate, Rows]:
    """The point and the rows without those that `index` does not name."""
    B, n, R, _ = rows.A.left.shape
    first = torch.arange(0, n * R, R, device=index.device).view(n, 1)
    flat = (index + first).view(B, -1)
    lam, aw, u = (y.gather(1, flat) for y in (x.lam, x.aw, x.u))
    rows = rows.keep_rows(index, flat)
    return normalised(x.w, aw, u, rows.A.adjoint(lam), lam, x.p, p), rows
