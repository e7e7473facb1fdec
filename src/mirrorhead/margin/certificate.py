"""Proofs that come with an answer, and can be checked from the data alone.

For any w with A w >= 1 and any lam >= 0,

    sum(lam) <= <lam, A w> = <A' lam, w> <= ||A' lam||_* ||w||,

so sum(lam) / ||A' lam||_* is a lower bound of every feasible norm, whatever produced lam. And
if A' lam = 0 with lam >= 0 not zero, no w is feasible (Farkas).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead.margin.constraints import Constraints
from mirrorhead.potentials import dual_exponent, power

# A' lam counts as zero when its norm is below this part of sum lam ||row||_2.
FARKAS = 2e-9


@dataclass(frozen=True)
class Norm:
    """The norm that is minimised, entrywise lp or nuclear, and its dual. Weights are (B, a, c)."""

    p: float
    nuclear: bool = False

    def value(self, w: Tensor) -> Tensor:
        if self.nuclear:
            return torch.linalg.svdvals(w).sum(-1)
        return _lp(w, self.p)

    def dual(self, s: Tensor) -> Tensor:
        if self.nuclear:
            return torch.linalg.svdvals(s).amax(-1)
        if self.p == 1:
            return _lp(s, math.inf)
        return _lp(s, 1.0 if self.p == math.inf else dual_exponent(self.p))


@dataclass(frozen=True, eq=False)
class Certificate:
    """What weights and multipliers prove about a problem; every field has the batch shape.

    margin: the smallest (A w)_k; upper: ||w|| once scaled to margin 1, inf if the margin is
    not positive; lower: sum(lam) / ||A' lam||_*; gap: upper/lower - 1, so the best norm lies
    within a factor 1 + gap of both; farkas: ||A' lam||_2 / sum(lam ||row||_2), which is zero
    just when lam proves infeasibility.
    """

    margin: Tensor
    upper: Tensor
    lower: Tensor
    gap: Tensor
    farkas: Tensor

    def gap_as_is(self) -> Tensor:
        """The gap of w unscaled: a margin above 1 is waste, one below 1 is paid for."""
        waste = (self.margin - 1).clamp_min(0)
        return torch.where(waste > 0, self.gap + (1 + self.gap) * waste, self.gap)


def certify(problem: Constraints, w: Tensor, lam: Tensor, norm: Norm) -> Certificate:
    """Evaluate weights w (B, N) and multipliers lam (B, m); negative multipliers count as 0."""
    A, live = problem.A, problem.live
    shape = (A.batch, A.left.shape[3], A.right.shape[2])
    lam = lam.clamp_min(0) * live
    margin = torch.where(live, A.apply(w), math.inf).amin(-1)
    pulled = A.adjoint(lam)
    s = norm.dual(pulled.view(shape))
    size = norm.value(w.view(shape))
    upper = torch.where(margin > 0, size / margin, math.inf)
    lower = torch.where(s > 0, lam.sum(-1) / s, 0.0)
    gap = torch.where((margin > 0) & (lower > 0), (upper / lower - 1).clamp_min(0), math.inf)
    mass = (lam * A.row_norms).sum(-1)
    euclid = torch.linalg.vector_norm(pulled, dim=-1)
    # A row of zeros with a positive multiplier has no mass and proves infeasibility outright.
    farkas = torch.where(mass > 0, euclid / mass, torch.where(lam.sum(-1) > 0, 0.0, math.inf))
    return Certificate(margin, upper, lower, gap, farkas)


def _lp(x: Tensor, p: float) -> Tensor:
    """||x||_p of (B, a, c), by the largest entry first so that nothing over- or underflows."""
    size = x.abs()
    largest = size.amax((-2, -1))
    if p == math.inf:
        return largest
    scale = largest.where(largest > 0, 1.0)
    return scale * power(size / scale[:, None, None], p).sum((-2, -1)) ** (1 / p)
