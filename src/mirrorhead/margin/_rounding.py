"""Rounding all multipliers of a problem together, where rounding each alone costs the gap.

Where rows are nearly dependent, multipliers are large and cancel in A' lam. Rounding each of them
to float64 then changes A' lam by more than a gap of 1e-9 allows, though far better choices exist.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mirrorhead.geometry import PNorm
from mirrorhead.margin import _doubled as doubled
from mirrorhead.margin._constraints import Constraints

MOST_ENTRIES = 1_000_000  # of the rows with a positive multiplier


def round_together(problem: Constraints, k: int, W: Tensor, dual: Tensor, norm: PNorm) -> Tensor:
    """The multipliers (m,) of problem k, corrected and rounded to match the weights W (N,)."""
    p, size = norm.p, W.abs() / norm.norm(W)
    if p == 1:  # A' dual = sign(W) where W is not 0
        columns, goal = size > 0, torch.sign(W)
    elif p == math.inf:  # A' dual = 0 where |W| is not the largest
        columns, goal = size < 1, torch.zeros_like(W)
    else:  # A' dual = mirror(W / ||W||)
        columns, goal = size >= 0, torch.copysign(size ** (p - 1), W)
    S = (dual > 0).nonzero().squeeze(-1)
    if not bool(columns.any()) or len(S) * len(W) > MOST_ENTRIES:
        return dual
    index = torch.tensor([k], device=W.device)
    rows = problem.A.take(index).take_rows(S.unsqueeze(0))[0]
    rest = goal - doubled.pulled(problem, index, dual.unsqueeze(0))[0].view(-1)
    units = _nearest(rows[:, columns], dual[S], rest[columns])
    return dual.index_copy(0, S, (dual[S] + units).clamp_min(0))


def _nearest(rows: Tensor, lam: Tensor, rest: Tensor) -> Tensor:
    """Multiples of lam's units in the last place, (k,), for which rows' x is near `rest`, (J,).

    This asks for a near vector of a lattice. Babai's nearest-plane method rounds one multiplier
    after the other; those that follow, which have smaller units, make up for it.
    """
    unit = torch.ldexp(torch.ones_like(lam), torch.frexp(lam).exponent - 53)
    basis = (rows * unit.unsqueeze(-1)).mT
    order = torch.linalg.vector_norm(basis, dim=0).argsort()
    Q, R = torch.linalg.qr(basis[:, order])
    left = Q.mT @ rest
    count = torch.zeros_like(lam)
    for k in reversed(range(len(left))):
        if R[k, k].abs() > 1e-14 * R[0, 0].abs():
            count[k] = (left[k] / R[k, k]).round()
            left = left - count[k] * R[:, k]
    return torch.zeros_like(lam).index_copy_(0, order, count) * unit
