r"""Theorem 4: how fast the direction converges, as a function of the norm.

The theorem bounds the divergence after k steps of the constant rule,

    D = O(log log k / log k) for p > 2,   O((log log k)^2 / log k) for p = 2,
    D = O(log log k / (log k)^(p-1)) for p < 2.

Along that rule ||W|| / ||W_mm|| grows like log k (experiment theorem-2), so the bound reads
b(N) = log N / N, (log N)^2 / N, log N / N^(p-1) in N = ||W|| / ||W_mm||. The normalized rule
follows the same path and reaches an N that the constant rule would need exp(N) steps for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mirrorhead import PNorm, descend, locally_optimal
from mirrorhead.paths.diagnostics import fitted_slope, observed_rate, theorem_rate
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import joined
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import COLOURS, GREY, NORM, Figure, median_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents; steps and lr of each path, so that it ends at a hundred times ||W_mm|| or
    more; tol: the certified gap of the max-margin solutions."""

    p: tuple[float, ...] = (1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
    steps: tuple[int, ...] = (5000, 20_000, 20_000, 20_000, 40_000, 100_000)
    lr: tuple[float, ...] = (0.1, 0.1, 0.1, 0.3, 30.0, 100.0)
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """For each p "norm p" (over ||W_mm||) and "divergence p", (trials, records). slope: of log D
    against log ||W|| over the last decade, excess: the same of D / b, local: whether the tokens
    are locally optimal, (trials, exponents)."""
    problem = random_problem(settings.trials, first=settings.first)
    rows = []
    for p, steps, lr in zip(settings.p, settings.steps, settings.lr, strict=True):
        path = descend(problem, p, steps, lr, progress=False)
        found = locally_optimal(problem, path.tokens, p, settings.tol)
        norm = PNorm(p).norm(path.W, (-2, -1)) / found.solution.norm  # (records, trials)
        divergence = path.divergence_to(found.solution)
        slope = fitted_slope(norm, divergence).where(found.optimal, torch.nan)
        excess = fitted_slope(norm, divergence / _bound(norm, p)).where(found.optimal, torch.nan)
        row = {"norm": norm.T, "divergence": divergence.T}
        rows.append(row | {"slope": slope, "excess": excess, "local": found.optimal})
    return joined(settings.p, rows, "norm", "divergence")


def verdict(result: Result[Settings]) -> Verdict:
    """The bound holds where D / b(N) falls; the remark says how much faster D itself falls."""
    exponents, local = result.settings.p, result["local"].sum(0)
    below = (result["excess"] < 0).sum(0)
    median = np.nanmedian(result["slope"], 0)
    seen = np.array([observed_rate(p) for p in exponents])
    near = [p for p, yes in zip(exponents, np.abs(median - seen) < 0.25, strict=True) if yes]
    return judge(
        f"p = {listed(exponents, 'g')}: median slope of log D against log ||W|| "
        f"{listed(median, '.2f')}, the theorem's {listed(map(theorem_rate, exponents), 'g')}; D "
        f"over the bound falls in {below.sum()} of {local.sum()} paths to locally optimal tokens",
        bool(local.any(0).all() and (below >= 0.95 * local).all()),
        f"What is seen is about the square of the bound, D ~ ||W||^(-2 min(1, p-1)), that is "
        f"{listed(seen, 'g')} (within 0.25 for p = {listed(near, 'g')})."
        if near
        else "",
    )


def draw(result: Result[Settings]) -> Figure:
    """D against the norm for each p; the slopes against p with the theorem's and its square."""
    exponents = result.settings.p
    figure, (left, right) = panels(2)
    grid = np.linspace(min(exponents), max(exponents), 200)
    right.plot(grid, [theorem_rate(p) for p in grid], "--", color=GREY, label="Theorem 4")
    right.plot(grid, [observed_rate(p) for p in grid], color=GREY, label="its square")
    for k, (p, colour) in enumerate(zip(exponents, COLOURS, strict=False)):
        local = result["local"][:, k]
        if not local.any():  # nothing to draw
            continue
        norm, divergence = (result[f"{name} {p:g}"][local] for name in ("norm", "divergence"))
        median_band(left, norm, divergence, color=colour, label=f"p = {p:g}")
        low, middle, high = np.nanquantile(result["slope"][:, k], (0.1, 0.5, 0.9))
        right.plot((p, p), (low, high), color=colour, linewidth=2)
        right.plot(p, middle, "o", color=colour)
    left.set(xscale="log", yscale="log", xlabel=NORM, ylabel="divergence D")
    left.set_xlim(left=1)
    right.set(xlabel="exponent p", ylabel="slope of log D against log $||W||$")
    for axis in (left, right):
        axis.legend(fontsize="small")
    return figure


def _bound(norm: torch.Tensor, p: float) -> torch.Tensor:
    """b(N) with N in place of log k, NaN for N <= 1 where its logarithm has no sense."""
    log = norm.log().where(norm > 1, torch.nan)
    return log ** (2 if p == 2 else 1) / norm ** min(1.0, p - 1)


EXPERIMENT = Experiment(
    group="The theory",
    title="Theorem 4: the rate of convergence",
    claim="After $k$ constant steps, the divergence between the direction of the weights and the "
    "max-margin direction is at most of this order. (At $p = 2$ the numerator is squared.)",
    equation=r"D = O\!\left( \frac{\log \log k}{(\log k)^{\min(1,\, p - 1)}} \right)",
    quick=Settings(trials=10, steps=(2000, 4000, 4000, 6000, 6000, 20_000)),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    may_be_nan=("slope", "excess"),  # where the tokens are not locally optimal
    extent=("steps",),
)
