"""Diagnostics of a descent path: its limit direction, its rate, and the tokens it attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mirrorhead.geometry import Norm, PNorm, as_norm
from mirrorhead.geometry._choice import norm_of
from mirrorhead.geometry._powers import check_p
from mirrorhead.margin import MarginSolution
from mirrorhead.paths.descent import RULES, Path, title
from mirrorhead.tokens import LocalOptimality, constants_at, locally_optimal


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """A path compared with the max-margin solution of the tokens it selected, in one norm.

    divergence: D(W_mm, W(k)) of the directions, (records, ...); NaN where W(k) is zero. It is that
        of `PNorm(2)` for a norm that is no potential.
    share: the margin of W(k) over its norm, relative to the largest possible, (records, ...): 1 in
        the direction of the solution, negative where other tokens are selected.
    norm: ||W(k)||, (records, ...).
    mass: attention on the tokens selected at the end, (records, ..., n).
    optimality: whether those tokens are locally optimal, and why not; with the solution.
    rate: the slope of log D against log ||W|| over the last decade of the norm, (...).
    growth: the slope of ||W(k)|| against log k over the last decade of steps, (...). Under the
        constant rule it settles (Theorem 2's proof); the others grow like a power of k.
    in_cone: whether W(k) lies in the cone C_mu0,R of (5b) with the R of Lemma 17, (records, ...);
        False where the tokens have no solution, or one that is not locally optimal. None for other
        norms than p-norms with 1 < p < inf, which have no such cones.
    """

    divergence: Tensor
    share: Tensor
    norm: Tensor
    mass: Tensor
    optimality: LocalOptimality
    rate: Tensor
    growth: Tensor
    in_cone: Tensor | None
    path: Path = field(repr=False)

    @property
    def solution(self) -> MarginSolution:
        return self.optimality.solution

    def __repr__(self) -> str:
        optimal, undecided = self.optimality.optimal, int(self.optimality.undecided.sum())
        open_cases = f" ({undecided} undecided)" if undecided else ""
        norm, rate = self.solution.geometry, f"rate {_median(self.rate):.2f}"
        # The theorem covers two rules, in p-norms.
        if self.path.geometry == norm and isinstance(norm, PNorm) and self.path.rule in RULES[:2]:
            p = norm.p
            rate += f" (Theorem 4: {theorem_rate(p):g}, often seen: {observed_rate(p):g})"
        return (
            f"Diagnostics({title(norm)}, divergence {_median(self.divergence[-1]):.1e},"
            f" share {_median(self.share[-1]):.4f},"
            f" norm {_median(self.norm[-1]):.3g}, mass {float(self.mass[-1].min()):.6f},"
            f" locally optimal {int(optimal.sum())} of {optimal.numel()}{open_cases},"
            f" {rate})"
        )


def diagnose(path: Path, tol: float = 1e-9, geometry: float | Norm | None = None) -> Diagnostics:
    """Compare a path of one head with the max-margin solution of its own tokens.

    Scores are those of the head at the end, where it was trained (lp-JointGD).

    Args:
        tol: the certified gap of the solution.
        geometry: the norm of the solution; by default that of the path, the `limit` of a potential.
            Paths of factors W = K Q' need it: for p = 2 it is `Schatten(1)`.

    >>> from mirrorhead.synthetic import random_problem
    >>> from mirrorhead.paths.descent import descend
    >>> diagnose(descend(random_problem(trials=3), geometry=2, steps=1000))
    Diagnostics(p=2, divergence 6.0e-03, share 0.9039, norm 89.6, mass 1.000000,
        locally optimal 3 of 3, rate -1.95 (Theorem 4: -1, often seen: -2))
    """
    if not isinstance(path, Path):
        raise TypeError(f"path must come from descend, got {type(path).__name__}")
    problem = path.problem
    if problem.heads is not None or problem.classes is not None:
        raise ValueError("diagnose is for one head and labels +-1; use divergence_to for others")
    if path.K is not None and geometry is None:
        raise ValueError(
            "geometry must be given for a path of factors W = K Q', which tends to another norm's"
            " solution: Schatten(1) for p = 2"
        )
    if path.v is not None:
        problem = problem.with_head(path.v[-1])
    own = norm_of(path.geometry) if geometry is None else as_norm(geometry, "geometry")
    optimality = locally_optimal(problem, path.tokens, own, tol)
    solution = optimality.solution
    divergence = path.divergence_to(solution).where(solution.optimal, torch.nan)
    norm, in_cone = own.norm(path.W, (-2, -1)), None
    if isinstance(own, PNorm) and 1 < own.p < math.inf:
        cone = constants_at(problem, path.tokens, solution)
        in_cone = (divergence <= cone.mu_0) & (norm >= cone.R_mu())  # NaN is not
    return Diagnostics(
        divergence=divergence,
        share=path.margin / norm * solution.norm,
        norm=norm,
        mass=selected_mass(path),
        optimality=optimality,
        rate=fitted_slope(norm, divergence),
        growth=log_growth(path.steps, norm),
        in_cone=in_cone,
        path=path,
    )


def selected_mass(path: Path) -> Tensor:
    """Attention on the tokens selected at the end, at every record: (records, ..., n)."""
    tokens = path.tokens.unsqueeze(-1)
    return torch.stack([path.problem.attention(W).gather(-1, tokens).squeeze(-1) for W in path.W])


def theorem_rate(p: float) -> float:
    """The exponent of Theorem 4's bound D = O(||W||^r), r = -min(1, p-1), up to log factors.

    The theorem counts steps k of the constant rule, along which ||W|| grows like log k.
    """
    return -min(1.0, check_p(p) - 1)


def observed_rate(p: float) -> float:
    """The exponent that paths show: that of the squared bound, D ~ ||W||^(-2 min(1, p-1))."""
    return 2 * theorem_rate(p)


def fitted_slope(x: Tensor, y: Tensor, decades: float = 1.0) -> Tensor:
    """The least-squares slope of log y against log x over the last `decades` of x, (...).

    x and y are (records, ...); records with x or y not positive and finite are left out. NaN
    where fewer than three records remain.

    >>> x = torch.logspace(0, 4, 50, dtype=torch.float64)
    >>> fitted_slope(x, x**-2.0).round(decimals=9)
    tensor(-2., dtype=torch.float64)
    """
    good = (x > 0) & (y > 0) & x.isfinite() & y.isfinite()
    log_x = x.where(good, 1).log()
    log_y = y.where(good, 1).log()
    newest = log_x.where(good, -torch.inf).amax(0)
    used = good & (log_x >= newest - decades * torch.log(torch.tensor(10.0, dtype=x.dtype)))
    count = used.sum(0)
    weight = used.to(x.dtype) / count.clamp_min(1)
    dx = log_x - (weight * log_x).sum(0)
    dy = log_y - (weight * log_y).sum(0)
    slope = (weight * dx * dy).sum(0) / (weight * dx * dx).sum(0)
    return slope.where(count >= 3, torch.nan)


def log_growth(steps: Tensor, norm: Tensor) -> Tensor:
    """The slope of ||W(k)|| against log k over the last decade of steps, (...)."""
    used = (steps >= steps[-1] / 10) & (steps > 0)
    norm = norm[used]
    log_k = steps[used].double().log().reshape(-1, *(1,) * (norm.dim() - 1))
    dk = log_k - log_k.mean(0)
    return (dk * norm).sum(0) / (dk * dk).sum(0)


def _median(x: Tensor) -> float:
    """The median of the values that are not NaN."""
    return float(x.flatten().nanmedian())
