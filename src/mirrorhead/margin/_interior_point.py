"""A primal-dual interior point method for min ||w||_p subject to A w >= b, 1 < p < inf.

The barrier and the exponent move together: the method starts near p = 2, where the problem is
quadratic, and moves the exponent to p while the gap falls. There is no separate solve at p = 2.
Small problems on a CPU are solved by the compiled kernel (`_compiled.py`), all others in torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorhead.margin import _compiled
from mirrorhead.margin import _linear_systems as systems
from mirrorhead.margin import _newton_step as steps
from mirrorhead.margin._active_set import sharpen
from mirrorhead.margin._compiled import Rule, Verdict
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._newton_step import Iterate, Rows, Schedule, Start

# The problem is infeasible if the hull of the unit rows comes this near to the origin.
INFEASIBLE = 1e-9
# Rows are dropped once the gap is below the first, if their ratio (`_rows_that_matter`) exceeds
# the second, and if at most the third, a fraction of each block, remains.
DROP_BELOW, DROP_RATIO, MOST_KEPT = 0.3, 5.0, 0.7
# With fewer rows than this, neither float32 nor dropping rows saves time.
SHORTCUT_ROWS = 100


class SolverResult(NamedTuple):
    """Where a method ended."""

    w: Tensor  # (B, N), ||w||_p = 1
    lam: Tensor  # (B, m) >= 0, of no particular scale
    gap: Tensor  # (B,), the certified relative gap, inf where w has no positive margin
    infeasible: Tensor  # (B,), lam is a Farkas certificate
    iterations: Tensor  # (B,), Newton steps
    inner: Tensor  # (B,), conjugate-gradient steps

    @staticmethod
    def empty(A: ConstraintMatrix, b: Tensor) -> SolverResult:
        """A result to fill in: no point, no certificate, no steps."""
        w, gap = b.new_zeros(A.batch, A.columns), b.new_full((A.batch,), math.inf)
        infeasible = torch.zeros_like(gap, dtype=torch.bool)
        counts = torch.zeros(2, A.batch, dtype=torch.long, device=b.device)
        return SolverResult(w, torch.zeros_like(b), gap, infeasible, *counts)

    def improved_by(self, index: Tensor, gap: Tensor, infeasible: Tensor) -> Tensor:
        """Whether such results are at least as good as what is known of the problems `index`."""
        return infeasible | (gap <= self.gap[index])


# A problem that does not finish with one schedule starts again with the next.
_SCHEDULES = (
    Schedule(1.5, 0.5, 0.1, 40, systems.DENSE_LIMIT, shortcuts=True),
    Schedule(1.25, 0.2, 0.1, 60, systems.LAST_RESORT),
    Schedule(1.15, 0.1, 0.3, 100, systems.LAST_RESORT),
)
# Where all of these end far from a solution: the exponent moves once a problem is nearly solved.
_SLOWEST = Schedule(1.15, 1e-3, 0.3, 300, systems.LAST_RESORT)
_FAR = 1e-6  # gaps below this are a matter of rounding


def solve(
    A: ConstraintMatrix, b: Tensor, p: float, tol: float, start: Start = None
) -> SolverResult:
    """Minimise ||w||_p subject to A w >= b for a batch of problems.

    The rows of A should have norm 1 or 0. b is (B, m), at most 1; a row of zeros with b = -1
    is a constraint that always holds, which is how a batch is padded. `start` is a pair
    (w, lam) from a similar problem; where it does not help, the method starts from the data.
    """
    run = _Solver(A, b, p, tol, SolverResult.empty(A, b))
    left = torch.arange(A.batch, device=b.device)
    if start is not None:
        left = run.attempt(_SCHEDULES[0], start, left)
    for schedule in _SCHEDULES:
        left = run.sharpen(run.attempt(schedule, None, left))
        if schedule.shortcuts and len(left):
            # Dropped rows may have mattered after all: continue with all of them.
            so_far = run.result.w.clone(), run.result.lam.clone()
            left = run.attempt(replace(schedule, shortcuts=False), so_far, left)
            left = run.sharpen(left)
    if p != 2:
        run.sharpen(run.attempt(_SLOWEST, None, left[run.result.gap[left] > _FAR]))
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
        places = torch.arange(A.rows, device=b.device).expand_as(b)
        still = []
        for index in left.split(systems.problems_at_once(A, schedule.dense_limit)):
            rows = Rows(A, b, places)
            near = None if start is None else (start[0][index], start[1][index])
            everything = len(index) == A.batch
            still += self._iterate(rows if everything else rows.take(index), schedule, near, index)
        return torch.cat(still).sort().values

    def sharpen(self, left: Tensor) -> Tensor:
        """Finish problems by their active constraints; return those that remain unsolved."""
        result, still = self.result, []
        for k in left.tolist():
            at = slice(k, k + 1)
            problem = self.A.take(at), self.b[at]
            w, lam, gap = sharpen(*problem, result.w[at], result.lam[at], self.p, self.tol)
            if gap < float(result.gap[k]):
                result.w[at], result.lam[at], result.gap[k] = w, lam, gap
            if not float(result.gap[k]) <= self.tol:
                still.append(k)
        return left.new_tensor(still)

    def _attempt_compiled(self, schedule: Schedule, start: Start, left: Tensor) -> Tensor:
        """The same by the compiled kernel."""
        A, b, result = self.A, self.b, self.result
        if len(left) < A.batch:
            A, b = A.take(left), b[left]
            start = None if start is None else (start[0][left], start[1][left])
        below = DROP_BELOW if schedule.shortcuts and A.rows >= SHORTCUT_ROWS else 0.0
        # The kernel drops row by row, not block by block, so more rows go: twice the ratio.
        dropping = (below, 2 * DROP_RATIO, MOST_KEPT)
        moves = (schedule.factor, schedule.threshold, schedule.floor)
        rule = Rule(*moves, INFEASIBLE, *dropping, schedule.iterations)
        w, lam, gap, verdict, iterations = _compiled.solve(A, b, self.p, self.tol, rule, start)
        result.iterations[left] += iterations
        solved, infeasible = verdict == Verdict.SOLVED, verdict == Verdict.INFEASIBLE
        if below:  # without a conclusion, the gap may be one without the rows that were dropped
            gap = gap.where(solved, math.inf)
        known = (verdict != Verdict.LOST) & result.improved_by(left, gap, infeasible)
        at = left[known]
        result.w[at], result.lam[at] = w[known], lam[known]
        result.gap[at], result.infeasible[at] = gap[known], infeasible[known]
        return left[~(solved | infeasible)]

    def _iterate(self, rows: Rows, schedule: Schedule, start: Start, index: Tensor) -> list[Tensor]:
        """Iterate until every problem has ended; return those that ended without a conclusion.

        A problem is written to its place `index` in the result and leaves the batch when it ends.
        """
        p, tol, result = self.p, self.tol, self.result
        unsolved: list[Tensor] = []
        every = rows
        shortcuts = schedule.shortcuts and rows.A.rows >= SHORTCUT_ROWS
        system = systems.make_system(rows.A, schedule.dense_limit, p, shortcuts)
        x = steps.starting_point(rows, p, schedule, start)
        for iteration in range(schedule.iterations + 1):
            gap = rows.gap(x)
            last = iteration == schedule.iterations
            if last or not (float(gap.min()) > tol and float(gap.max()) < math.inf):
                # Some problem may have ended.
                # The length of the mean of the unit rows weighted by lam: 0 proves infeasibility.
                distance = torch.linalg.vector_norm(x.s, dim=-1) / (x.lam * (rows.b > 0)).sum(-1)
                if isinstance(system, systems.RowSystem) and float(distance.min()) < 1e-4:
                    system.float32 = None  # it cannot distinguish such a distance from 0
                lost = ~(gap > -1e-3).squeeze(-1)  # overflow or worse: the point says nothing
                infeasible = (distance < INFEASIBLE) & (gap == math.inf).squeeze(-1) & ~lost
                solved = ((x.p == p) & (gap <= tol)).squeeze(-1)
                ended = infeasible | lost | solved | last
                if bool(ended.any()):
                    if rows is not every:  # the dropped rows have to hold as well
                        gap = rows.gap(x, every.margin(every.A.apply(x.w)))
                        solved &= (gap <= tol).squeeze(-1)
                    result.iterations[index[ended]] += iteration
                    result.inner[index[ended]] += system.steps
                    unsolved.append(index[ended & (lost | ~(solved | infeasible))])
                    better = result.improved_by(index, gap.squeeze(-1), infeasible)
                    done = (ended & ~lost & better).nonzero().squeeze(-1)
                    at = index[done]
                    result.w[at], result.gap[at] = x.w[done], gap[done].squeeze(-1)
                    lam = every.b.new_zeros(len(done), every.A.rows)
                    result.lam[at] = lam.scatter_(1, rows.place[done], x.lam[done])
                    result.infeasible[at] = infeasible[done]
                    keep = (~ended).nonzero().squeeze(-1)
                    if len(keep) == 0:
                        break
                    same = rows is every
                    rows, system, index = rows.take(keep), system.take(keep), index[keep]
                    every = rows if same else every.take(keep)
                    x = x.take(keep)
                    gap = rows.gap(x)
            may_drop = shortcuts and iteration > 0 and float(gap.max()) < DROP_BELOW
            if may_drop and isinstance(system, systems.RowSystem):
                kept = _rows_that_matter(x, system.gram, rows.A, p)
                if kept is not None:
                    x, rows = steps.drop_rows(x, rows, kept, p)
                    system = system.keep_rows(rows.A)
            x = steps.newton_step(x, rows, system, p, schedule, gap)
        return unsolved


def _rows_that_matter(x: Iterate, gram: Tensor, A: ConstraintMatrix, p: float) -> Tensor | None:
    """The rows that still matter, (B, n, fewer) within each block; None if most do.

    Where e = u / lam is far above the entry of A diag(h) A' beside it, the row becomes inactive.
    Each block keeps as many rows as the block with the most needs.
    """
    B, n, R, _ = A.left.shape
    # For p < 2 more rows can become active while the exponent still moves.
    bound = DROP_RATIO * max(1.0, float(x.p.max() - 1) / (p - 1)) if p < 2 else DROP_RATIO
    ratio = (x.u / (x.lam * gram)).reshape(B, n, R)
    fewer = int((ratio < bound).sum(-1).max())
    if fewer > MOST_KEPT * R:
        return None
    return ratio.topk(fewer, dim=-1, largest=False, sorted=False).indices
