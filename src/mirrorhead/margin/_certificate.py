"""Certificates of margin problems, computed from the data alone.

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

from mirrorhead.geometry._powers import dual_exponent, power
from mirrorhead.margin._constraints import Constraints

# A' lam counts as zero when its norm is below this part of sum lam ||row||_2.
FARKAS = 2e-9
# Sums of some thousand terms are right to this relative accuracy.
ROUNDING = 1e-14
# Rows are looked at in parts of this many numbers.
_CHUNK = 1 << 20


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

    The best norm lies within a factor 1 + gap of `upper` and of `lower`.
    """

    size: Tensor  # ||w||
    margin: Tensor  # the smallest (A w)_k, inf without constraints
    upper: Tensor  # ||w|| once scaled to margin 1, inf if the margin is not positive
    lower: Tensor  # sum(lam) / ||A' lam||_*
    gap: Tensor  # upper/lower - 1
    farkas: Tensor  # ||A' lam||_2 / sum(lam ||row||_2): 0 if and only if lam proves infeasibility

    def gap_as_is(self) -> Tensor:
        """The gap of w as it is. W is not scaled down, so a margin above 1 increases the gap."""
        surplus = torch.where(self.margin < math.inf, self.margin - 1, 0.0).clamp_min(0)
        return torch.where(surplus > 0, self.gap + (1 + self.gap) * surplus, self.gap)


def certify(problem: Constraints, w: Tensor, lam: Tensor, norm: Norm) -> Certificate:
    """Evaluate weights w (B, N) and multipliers lam (B, m); negative multipliers count as 0."""
    live = problem.live
    lam = lam.clamp_min(0) * live
    margin = problem.margin(w)
    pulled = problem.pull(lam)
    s = norm.dual(pulled)
    size = norm.value(w.view_as(pulled))
    upper = torch.where(margin > 0, size / margin, math.inf)
    lower = torch.where(s > 0, lam.sum(-1) / s, 0.0)
    gap = torch.where((margin > 0) & (lower > 0), (upper / lower - 1).clamp_min(0), math.inf)
    free = ~live.any(-1)  # without constraints W = 0 is the solution, and no other W is
    gap = torch.where(free, torch.where(size == 0, 0.0, math.inf), gap)
    mass = (lam * problem.A.row_norms).sum(-1)
    # A row of zeros with a positive multiplier has no mass and proves infeasibility outright.
    massless = torch.where(lam.sum(-1) > 0, 0.0, math.inf)
    farkas = torch.where(mass > 0, _lp(pulled, 2.0) / mass, massless)
    return Certificate(size, margin, upper, lower, gap, farkas)


def support_excess(problem: Constraints, w: Tensor, lam: Tensor) -> Tensor:
    """The share of each multiplier less the slack of its constraint, (B, m): > 0 on the support."""
    share = lam / lam.sum(-1, keepdim=True).clamp_min(torch.finfo(lam.dtype).tiny)
    return torch.where(problem.live, share - (problem.A.apply(w) - 1), -math.inf)


def active_constraints(
    problem: Constraints, w: Tensor, lam: Tensor, norm: Norm, asked: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Decide which of the asked constraints hold with equality at the exact solution.

    w: (B, N) feasible up to scale; lam: (B, m) >= 0; asked: (B, m) bool. Returns two (B, m)
    bools, `active` and `inactive`, both False where the certificate does not decide. Let g be
    the certified gap and w* an exact solution. With any multipliers mu >= 0 and any u
    >= ||w*||, the value of row a at w* satisfies

        <a, w*>  =  <A' mu, w*> + <a - A' mu, w*>  >=  sum(mu) - u ||a - A' mu||_* .

    * inactive: this bound exceeds 1 for some mu = t lam. As t grows the bound tends to
      <a, w> for an exact certificate; with a gap g the best t is of order g^(-1/2).
    * active: lam_k (<a_k, w*> - 1) <= <lam, A w* - 1> <= g sum(lam), so a row with a share
      lam_k / sum(lam) of at least sqrt(g) holds with equality up to sqrt(g).

    A row with equality and multiplier 0, at a degenerate vertex, is decided by neither. Rows are
    not proved inactive in problems that have an active one among those asked for.
    """
    proof = certify(problem, w, lam, norm)
    lam = lam.clamp_min(0) * problem.live
    total = lam.sum(-1)
    gap = proof.gap.clamp_min(ROUNDING)
    asked = asked & problem.live & gap.isfinite().unsqueeze(-1)
    pulled = problem.pull(lam)
    inactive = torch.zeros_like(asked)
    active = asked & (lam >= (gap.sqrt() * total).unsqueeze(-1))
    rest = (asked & ~active.any(-1, keepdim=True)).nonzero()
    for pairs in rest.split(max(1, _CHUNK // problem.A.columns)) if len(rest) else ():
        b, k = pairs.unbind(-1)
        rows = problem.A.take(b).take_rows(k.unsqueeze(-1)).view_as(pulled[b])
        inactive[b, k] = _least_value(rows, pulled[b], total[b], proof.upper[b], norm) > 1
    return active, inactive


def _least_value(a: Tensor, s: Tensor, total: Tensor, upper: Tensor, norm: Norm) -> Tensor:
    """The largest t total - upper ||t s - a||_* over a grid of t, less its rounding, (K,)."""
    best = torch.full_like(total, -math.inf)
    for exponent in range(-2, 27):
        t = norm.dual(a) * 10 ** (exponent / 2) / norm.dual(s)
        first, second = t * total, upper * norm.dual(t[:, None, None] * s - a)
        best = torch.maximum(best, first - second - ROUNDING * (first + second))
    return best


def _lp(x: Tensor, p: float) -> Tensor:
    """`lp_norm` of (B, a, c), for p = inf too, and without what autograd costs."""
    size = x.abs()
    largest = size.amax((-2, -1))
    if p == math.inf:
        return largest
    scale = largest.where(largest > 0, 1.0)
    return scale * power(size / scale[:, None, None], p).sum((-2, -1)) ** (1 / p)
