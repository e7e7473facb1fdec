"""Certificates of margin problems, computed from the data alone.

For any w with A w >= 1 and any lam >= 0,

    sum(lam) <= <lam, A w> = <A' lam, w> <= ||A' lam||_* ||w||,

so sum(lam) / ||A' lam||_* is a lower bound of every feasible norm, whatever produced lam. And
if A' lam = 0 with lam >= 0 not zero, no w is feasible (Farkas).

The gap holds in exact arithmetic: it includes bounds of all rounding errors. A w and A' lam are
computed in float64, with the classical bound (number of terms) u |A||w|, u = 2^-53. Where this
bound matters they are computed again in doubled precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead.geometry import Norm
from mirrorhead.geometry._powers import expand, lp_norm
from mirrorhead.margin import _doubled as doubled
from mirrorhead.margin._constraints import Constraints, euclidean
from mirrorhead.margin._norm_errors import UNIT, error_of_entries, rounding, spread

# A' lam counts as zero when its norm is below this part of sum lam ||row||_2.
FARKAS = 2e-9
# Rounding errors of A w and A' lam above this part of the result call for doubled precision,
ROUGH = 1e-12
ROUGH_PART = 0.05  # and so do those above this part of the tolerance.
# Rows are looked at in parts of this many numbers.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Certificate:
    """What weights and multipliers prove about a problem; a scalar field has the batch shape.

    The best norm lies within a factor 1 + gap of `upper` and of `lower`, in exact arithmetic.
    """

    size: Tensor  # ||w||
    margin: Tensor  # the smallest (A w)_k, inf without constraints
    least: Tensor  # a lower bound of the exact margin
    upper: Tensor  # ||w|| once scaled to margin 1, inf if the margin is not positive
    dual_norm: Tensor  # ||A' lam||_*
    lower: Tensor  # sum(lam) / ||A' lam||_*
    gap: Tensor  # upper/lower - 1 and all rounding errors
    farkas: Tensor  # ||A' lam||_2 / sum(lam ||row||_2): 0 if and only if lam proves infeasibility
    values: Tensor  # (B, m), A w
    pulled: Tensor  # (B, ...), A' lam in the shape of the weights
    error: Tensor  # a bound of the dual norm of the error of `pulled`
    wobble: Tensor  # how much ||A' lam||_* may change, relatively, if each lam_k is rounded

    def gap_as_is(self) -> Tensor:
        """The gap of w as it is. W is not scaled down, so a margin above 1 increases the gap."""
        most = 2 * self.margin - self.least
        surplus = torch.where(self.margin < math.inf, most - 1, 0.0).clamp_min(0)
        return torch.where(surplus > 0, self.gap + (1 + self.gap) * surplus, self.gap)


def certify(
    problem: Constraints, w: Tensor, lam: Tensor, norm: Norm, tol: float = 0.0
) -> Certificate:
    """Evaluate weights w (B, N) and multipliers lam (B, m); negative multipliers count as 0.

    `tol` is the gap that is asked for: doubled precision is used as far as it matters to this.
    """
    A, live = problem.A, problem.live
    lam = lam.clamp_min(0) * live
    values, margin, least = _evaluate(problem, w, tol)
    pulled, s, error = _pull_back(problem, lam, norm, tol, margin > 0)
    total, size = lam.sum(-1), norm.norm(w.view_as(pulled), _dims(pulled))
    upper = torch.where(margin > 0, size / margin, math.inf)
    lower = torch.where(s > 0, total / s, 0.0)
    # Each factor as far to the wrong side as rounding can take it.
    slack = 1 + rounding(norm, problem.weights) + (A.rows + 8) * UNIT
    gap = slack * size * (s + error) / (least * total) - 1
    # A negative gap contradicts the duality of the first lines: it would prove nothing.
    gap = torch.where((least > 0) & (total > 0) & (gap >= 0), gap, math.inf)
    free = ~live.any(-1)  # without constraints W = 0 is the solution, and no other W is
    gap = torch.where(free, torch.where(size == 0, 0.0, math.inf), gap)
    mass = (lam * A.row_norms).sum(-1)
    # A row of zeros with a positive multiplier has no mass and proves infeasibility outright.
    massless = torch.where(total > 0, 0.0, math.inf)
    most = spread(norm, problem.weights)
    length = lp_norm(pulled, 2, _dims(pulled))
    farkas = torch.where(mass > 0, length / mass + error / (most * mass), massless)
    wobble = torch.where(s > 0, 2 * UNIT * most * mass / s, 0.0)
    return Certificate(
        size, margin, least, upper, s, lower, gap, farkas, values, pulled, error, wobble
    )


def _evaluate(problem: Constraints, w: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor]:
    """A w, (B, m); the margin, its smallest entry; and a lower bound of the exact margin, (B,)."""
    A, live = problem.A, problem.live
    values = A.apply(w)
    sizes = A.row_norms * euclidean(w).unsqueeze(-1)
    # Sums of a and of c terms, the difference of two tokens, and the norms themselves.
    errors = (sum(A.shape) + 4) * UNIT * sizes

    def extremes() -> tuple[Tensor, Tensor]:
        least = torch.where(live, values - errors, math.inf).amin(-1)
        return torch.where(live, values, math.inf).amin(-1), least

    margin, least = extremes()
    rough = (margin > 0) & (least < (1 - _allowed(tol)) * margin)
    index = rough.nonzero().squeeze(-1)
    if len(index):
        exact, factor = doubled.values(problem, index, w[index])
        values[index] = exact
        errors[index] = 2 * UNIT * exact.abs() + 1.01 * factor * sizes[index]
        margin, least = extremes()
    return values, margin, least


def _pull_back(
    problem: Constraints, lam: Tensor, norm: Norm, tol: float, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A' lam, (B, ...); its dual norm; and a bound of the dual norm of its error, (B,).

    Only the problems that are `wanted`, (B,) bool, are computed in doubled precision if need be.
    """
    A = problem.A
    n, R = A.left.shape[1:3]
    pulled = problem.pull(lam)
    s = norm.dual_norm(pulled, _dims(pulled))
    mass = spread(norm, problem.weights) * (lam * A.row_norms).sum(-1)
    error = (n + R + 4) * UNIT * mass
    index = (wanted & (error > _allowed(tol) * s)).nonzero().squeeze(-1)
    if len(index):
        exact, factor = doubled.pulled(problem, index, lam[index])
        pulled[index] = exact.view_as(pulled[index])
        s[index] = norm.dual_norm(pulled[index], _dims(pulled))
        # The entries are rounded to float64.
        error[index] = error_of_entries(norm, problem.weights) * s[index]
        error[index] += 1.01 * factor * mass[index]
    return pulled, s, error


def _allowed(tol: float) -> float:
    """The relative rounding error of A w and A' lam that matters to no decision."""
    return min(ROUGH, ROUGH_PART * tol)


def support_excess(problem: Constraints, lam: Tensor, proof: Certificate) -> Tensor:
    """The share of each multiplier less the slack of its constraint, (B, m): > 0 on the support."""
    share = lam / lam.sum(-1, keepdim=True).clamp_min(torch.finfo(lam.dtype).tiny)
    return torch.where(problem.live, share - (proof.values - 1), -math.inf)


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
    gap = proof.gap.clamp_min(UNIT)
    asked = asked & problem.live & gap.isfinite().unsqueeze(-1)
    inactive = torch.zeros_like(asked)
    active = asked & (lam >= (gap.sqrt() * total).unsqueeze(-1))
    rest = (asked & ~active.any(-1, keepdim=True)).nonzero()
    for pairs in rest.split(max(1, _CHUNK // problem.A.columns)) if len(rest) else ():
        b, k = pairs.unbind(-1)
        rows = problem.A.take(b).take_rows(k.unsqueeze(-1)).view(len(b), *problem.weights)
        mu = proof.pulled[b], total[b], proof.error[b]
        inactive[b, k] = _least_value(rows, *mu, proof.upper[b] * (1 + proof.gap[b]), norm) > 1
    return active, inactive


def _least_value(
    a: Tensor, s: Tensor, total: Tensor, error: Tensor, upper: Tensor, norm: Norm
) -> Tensor:
    """The largest t total - upper ||t s - a||_* over a grid of t, less its rounding, (K,)."""
    best = torch.full_like(total, -math.inf)
    lost, dims = rounding(norm, tuple(a.shape[1:])), _dims(a)
    size, length = norm.dual_norm(a, dims), norm.dual_norm(s, dims)
    for exponent in range(-2, 27):
        t = size * 10 ** (exponent / 2) / length
        first = t * total
        second = upper * norm.dual_norm(expand(t, s, dims) * s - a, dims)
        error_now = upper * (t * error + lost * size) + lost * (first + second)
        best = torch.maximum(best, first - second - error_now)
    return best


def _dims(x: Tensor) -> tuple[int, ...]:
    """The dimensions of one problem's weights in a batch of them."""
    return tuple(range(1, x.dim()))
