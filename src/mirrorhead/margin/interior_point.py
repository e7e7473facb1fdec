"""A primal-dual interior point method for min ||w||_p subject to A w >= b, 1 < p < inf.

It knows operators and exponents, nothing of attention. The barrier and the exponent move
together: the method starts near p = 2, where the problem is a quadratic one, and takes the
exponent to p while the gap falls, so there is no separate solve on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mirrorhead.margin import compiled
from mirrorhead.margin.arithmetic import BATCH, Vector
from mirrorhead.margin.form import Form, Rows, gap_of
from mirrorhead.margin.operator import Blocks
from mirrorhead.margin.step import Pace, Point, advance, begin, normalised
from mirrorhead.margin.systems import (
    DENSE_LIMIT,
    LAST_RESORT,
    RowSystem,
    make_system,
    part_size,
)

# The hull of the unit rows comes this near to the origin: no direction separates.
INFEASIBLE = 1e-9
# Rows are left out while the gap is below the first, where e > second times g (see `_tight`), if
# no more than the third of each block's rows stay.
NARROW_BELOW, LOOSE, WORTH = 0.3, 5.0, 0.7
# With fewer rows than this, neither float32 nor leaving out rows saves anything.
BRISK = 100


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where the method ended.

    w: (B, N) with ||w||_p = 1; lam: (B, m) > 0, of no particular scale; gap: (B,), the
    certified relative gap, inf where w has no positive margin; infeasible: (B,), lam is a
    Farkas certificate; iterations and inner: (B,), Newton and conjugate-gradient steps.
    """

    w: Tensor
    lam: Tensor
    gap: Tensor
    infeasible: Tensor
    iterations: Tensor
    inner: Tensor


# What does not finish at one pace starts again at the next.
_PACES = (
    Pace(1.5, 0.5, 0.1, 40, DENSE_LIMIT, brisk=True),
    Pace(1.25, 0.2, 0.1, 60, LAST_RESORT),
    Pace(1.15, 0.1, 0.3, 100, LAST_RESORT),
)


def solve(
    A: Blocks, b: Tensor, p: float, tol: float, start: tuple[Tensor, Tensor] | None = None
) -> Outcome:
    r"""Minimise ||w||_p subject to A w >= b for a batch of problems.

    The rows of A should have norm 1 or 0. b is (B, m), at most 1; a row of zeros with b = -1
    is a constraint that always holds, which is how a batch is padded. `start` is a pair
    (w, lam) from a similar problem; where it leads nowhere, the cold start takes over.

    >>> A = Blocks(torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2), torch.ones(1, 1, 1).double())
    >>> b = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    >>> outcome = solve(A, b, p=3, tol=1e-12)
    >>> outcome.w / outcome.w[0, 0]  # both constraints hold with equality: w = b
    tensor([[1.0000, 0.5000]], dtype=torch.float64)
    """
    B = A.batch
    result = Outcome(
        w=b.new_zeros(B, A.columns),
        lam=torch.zeros_like(b),
        gap=b.new_full((B,), math.inf),
        infeasible=torch.zeros(B, dtype=torch.bool, device=b.device),
        iterations=torch.zeros(B, dtype=torch.long, device=b.device),
        inner=torch.zeros(B, dtype=torch.long, device=b.device),
    )
    left = torch.arange(B, device=b.device)
    if start is not None:
        left = _run_parts(A, b, p, tol, _PACES[0], start, result, left)
    for pace in _PACES:
        left = _run_parts(A, b, p, tol, pace, None, result, left)
        if pace.brisk and len(left):
            # Rows left out may have mattered after all: go on with all of them.
            so_far = result.w.clone(), result.lam.clone()
            left = _run_parts(A, b, p, tol, replace(pace, brisk=False), so_far, result, left)
    return result


def _run_parts(
    A: Blocks,
    b: Tensor,
    p: float,
    tol: float,
    pace: Pace,
    start: tuple[Tensor, Tensor] | None,
    result: Outcome,
    left: Tensor,
) -> Tensor:
    """Run the problems named by `left`, as many at a time as memory allows; what is left."""
    if len(left) and compiled.serves(A, pace):
        return _run_compiled(A, b, p, tol, pace, start, result, left)
    still = []
    for index in left.split(part_size(A, pace.dense)) if len(left) else ():
        everything = len(index) == A.batch
        rows = Rows.of(A, b) if everything else Rows.of(A.take(index), b[index])
        near = None if start is None else (start[0][index], start[1][index])
        with np.errstate(all="ignore"):  # as torch does: what is lost shows in the gap
            still.append(index[_run(rows, p, tol, pace, near, result, index)])
    return torch.cat(still) if still else left


def _run_compiled(
    A: Blocks,
    b: Tensor,
    p: float,
    tol: float,
    pace: Pace,
    start: tuple[Tensor, Tensor] | None,
    result: Outcome,
    left: Tensor,
) -> Tensor:
    """The same by the compiled kernel."""
    if len(left) < A.batch:
        A, b = A.take(left), b[left]
        start = None if start is None else (start[0][left], start[1][left])
    brisk = pace.brisk and A.rows >= BRISK
    # Row by row, not block by block, fewer would stay: the bound makes up for it.
    narrowing = compiled.Narrowing(NARROW_BELOW if brisk else 0.0, 2 * LOOSE, WORTH)
    ended = compiled.run(A, b, p, tol, pace, start, INFEASIBLE, narrowing)
    result.iterations[left] += ended.iterations
    known = ~ended.lost
    at = left[known]
    result.w[at], result.lam[at], result.gap[at] = (
        x[known] for x in (ended.w, ended.lam, ended.gap)
    )
    result.infeasible[at] = ended.infeasible[known]
    return left[~(ended.solved | ended.infeasible)]


def _run(
    rows: Rows,
    p: float,
    tol: float,
    pace: Pace,
    start: tuple[Tensor, Tensor] | None,
    result: Outcome,
    index: Tensor,
) -> Tensor:
    """Iterate until every problem has ended; True where one has not come to a conclusion.

    A problem is written to its place `index` in the result and leaves the batch when it ends.
    """
    every = rows
    brisk = pace.brisk and rows.A.rows >= BRISK
    system = make_system(rows.A, pace.dense, p, brisk)
    form = Form.of(rows, system)
    x = form.hold(begin(rows.A, rows.b, p, pace, start))
    inconclusive = torch.ones(len(index), dtype=torch.bool, device=index.device)
    here = torch.arange(len(index), device=index.device)
    for iteration in range(pace.iterations + 1):
        gap = form.gap(x)
        smallest, largest = float(gap.min()), float(gap.max())
        last = iteration == pace.iterations
        if last or not (smallest > tol and largest < math.inf):  # someone may have ended
            point = form.tensors(x)
            gaps = whole = torch.as_tensor(gap).view(-1, 1)
            distance = _hull_distance(point, rows)
            if isinstance(system, RowSystem) and float(distance.min()) < 1e-4:
                system.coarse = None  # float32 could not tell it from 0
            lost = ~(gaps > -1e-3).squeeze(-1)  # overflow or worse: the point says nothing
            infeasible = (distance < INFEASIBLE) & (gaps == math.inf).squeeze(-1) & ~lost
            solved = ((point.p == p) & (gaps <= tol)).squeeze(-1)
            ended = infeasible | lost | solved | last
            if bool(ended.any()):
                if rows is not every:  # the rows left out have to hold as well
                    pairing = BATCH.dot(rows.b, point.lam)
                    whole = gap_of(BATCH, point.log_dual_norm, pairing, every.margin(point.w))
                    solved &= (whole <= tol).squeeze(-1)
                done = ended.nonzero().squeeze(-1)
                at = index[here[done]]
                result.iterations[at] += iteration
                result.inner[at] += system.steps
                done = done[~lost[done]]
                at = index[here[done]]
                result.w[at], result.gap[at] = point.w[done], whole[done].squeeze(-1)
                result.lam[at] = every.b.new_zeros(len(done), every.A.rows).scatter_(
                    1, rows.place[done], point.lam[done]
                )
                result.infeasible[at] = infeasible[done]
                inconclusive[here[done]] = ~(solved | infeasible)[done]
                keep = (~ended).nonzero().squeeze(-1)
                if len(keep) == 0:
                    break
                same = rows is every
                rows, system, here = rows.take(keep), system.take(keep), here[keep]
                every = rows if same else every.take(keep)
                form = Form.of(rows, system)
                x = form.hold(point.take(keep))
                gap = form.gap(x)
                smallest, largest = float(gap.min()), float(gap.max())
        if brisk and largest < NARROW_BELOW and isinstance(system, RowSystem) and iteration > 0:
            tight = _tight(x, form.array(system.gram), rows.A, p)
            if tight is not None:
                x, rows = _narrowed(form.tensors(x), rows, tight, p)
                system = system.narrow(rows.A)
                form = Form.of(rows, system)
                x = form.hold(x)
        x = advance(form.ops, x, form.A, form.b, form.system, p, pace, gap, smallest, largest)
    return inconclusive


def _hull_distance(x: Point, rows: Rows) -> Tensor:
    """The length of the mean of the unit rows by lam, (B,): 0 proves infeasibility."""
    mass = (x.lam * (rows.b > 0)).sum(-1)
    return torch.linalg.vector_norm(x.s, dim=-1) / mass


def _tight(x: Point, gram: Vector, A: Blocks, p: float) -> Tensor | None:
    """The rows that still matter, (B, n, fewer) counted within each block; None if most do.

    What a row contributes to K beside its own diagonal e = u / lam is about its entry g of
    the diagonal of A diag(h) A'. Where e is far above g it contributes nothing, and the row
    is on its way out. Each block keeps as many rows as the fullest of them needs.
    """
    B, n, R, _ = A.left.shape
    # For p < 2 more rows can come back while the exponent is still on its way.
    bound = LOOSE * max(1.0, float(x.p.max() - 1) / (p - 1)) if p < 2 else LOOSE
    loose = (x.u / (x.lam * gram)).reshape(B, n, R)
    fewer = int((loose < bound).sum(-1).max())
    if fewer > WORTH * R:
        return None
    return torch.as_tensor(loose).topk(fewer, dim=-1, largest=False, sorted=False).indices


def _narrowed(x: Point, rows: Rows, index: Tensor, p: float) -> tuple[Point, Rows]:
    """The point and the rows without those that `index` does not name."""
    B, n, R, _ = rows.A.left.shape
    first = torch.arange(0, n * R, R, device=index.device).view(n, 1)
    flat = (index + first).view(B, -1)
    lam, aw, u = (y.gather(1, flat) for y in (x.lam, x.aw, x.u))
    rows = rows.narrow(index, flat)
    return normalised(BATCH, x.w, aw, u, rows.A.adjoint(lam), lam, x.p, p), rows
