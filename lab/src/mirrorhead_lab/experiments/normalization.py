r"""Normalised gradients: the same path as with a constant step, only faster?

As the step tends to 0 both rules follow du/dt = -grad L up to the speed, so they should pass the
same points. The position on the path is measured by the distance ||u(k) - u(0)||_q from the start
in the dual, where the rules take their steps; at equal positions the divergences to the
lp-AttSVM, that of the tokens which the normalised path selects in the end, are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mirrorhead import PNorm, attention_svm, largest_step
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.synthetic import random_problem, random_weights
from mirrorhead_lab.experiments.convergence import descend_anyway
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, legend_below, mean_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed

RULES = ("normalized", "constant")


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents; normalized, constant: steps by each rule, the first for each p; lr: of both;
    scale: the standard deviation of W(0); tol: the certified gap."""

    p: tuple[float, ...] = (1.75, 2.0, 3.0)
    normalized: tuple[int, ...] = (1500, 2000, 20_000)
    constant: int = 100_000
    lr: float = 0.1
    scale: float = 0.01
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """For each p and rule "distance p rule" and "divergence p rule", (trials, records); agree:
    whether the tokens at the end of the constant path are those of the normalised one at the
    record nearest in distance; covered: whether Remark 1 allows lr at the start; both (trials,
    exponents)."""
    problem = random_problem(settings.trials, first=settings.first)
    init = random_weights(problem, settings.scale, settings.first)
    arrays: dict[str, torch.Tensor] = {}
    agree, covered = [], []
    for p, steps in zip(settings.p, settings.normalized, strict=True):
        fast = descend_anyway(problem, p, steps, settings.lr, "normalized", init=init)
        slow = descend_anyway(problem, p, settings.constant, settings.lr, "constant", init=init)
        # For p > 2 Remark 1 allows next to nothing near the origin.
        covered.append(largest_step(problem, init, p) >= settings.lr)
        solution = attention_svm(problem.X, problem.z, fast.tokens, p, settings.tol)
        psi = PNorm(p)
        for path in (fast, slow):
            moved = psi.mirror(path.W) - psi.mirror(init)  # u(k) - u(0)
            arrays[f"distance {p:g} {path.rule}"] = psi.dual_norm(moved, (-2, -1)).T
            arrays[f"divergence {p:g} {path.rule}"] = path.divergence_to(solution).T
        reached = arrays[f"distance {p:g} constant"][:, -1:]
        nearest = (arrays[f"distance {p:g} normalized"] - reached).abs().argmin(1)
        there = fast.W[nearest, torch.arange(settings.trials)]
        agree.append((problem.select(there) == slow.tokens).all(-1))
    return {**arrays, "agree": torch.stack(agree, 1), "covered": torch.stack(covered, 1)}


def verdict(result: Result[Settings]) -> Verdict:
    """The claim holds if at the end of the constant path both have the same divergence within
    10 % in the median and within 25 % in nine of ten trials, and the normalised one got there in
    a tenth of the steps or fewer."""
    settings = result.settings
    ratios = np.stack([_ratios(result, p) for p in settings.p])  # (exponents, trials)
    low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95), axis=1)
    fast, slow = (
        [np.median(result[f"divergence {p:g} {rule}"][:, -1]) for p in settings.p] for rule in RULES
    )
    distance = [result[f"distance {p:g} constant"][:, -1].mean() for p in settings.p]
    steps = np.array(distance) / settings.lr
    same = (abs(middle - 1) < 0.1) & (low > 0.75) & (high < 1.25)
    measured = (
        f"p = {listed(settings.p, 'g')}: D with constant over D with normalised steps, equally far "
        f"from the start, median {listed(middle, '.3f')} (middle 90 % within {low.min():.3f} to "
        f"{high.max():.3f}), tokens there agree in {listed(result['agree'].mean(0), '.0%')}. "
        f"{settings.constant:,} constant steps come to a median D of {listed(slow, '.1e')}, as do "
        f"about {listed(steps, '.0f')} normalised ones, which end at {listed(fast, '.1e')}"
    )
    holds = bool(same.all() and (steps <= settings.constant / 10).all())
    outside = [
        f"{1 - share:.0%} of the trials at p = {p:g}"
        for p, share in zip(settings.p, result["covered"].mean(0), strict=True)
        if share < 1
    ]
    remark = f"lr is more than Remark 1 allows at the start in {', '.join(outside)}."
    return judge(measured, holds, remark if outside else "")


def draw(result: Result[Settings]) -> Figure:
    """One column for each p: divergence against steps, and against the distance travelled."""
    settings = result.settings
    figure, axes = panels(len(settings.p), rows=2, height=5.4, sharey=True, ylabel="divergence")
    for (above, below), p, steps in zip(axes.T, settings.p, settings.normalized, strict=True):
        for k, (rule, last) in enumerate(zip(RULES, (steps, settings.constant), strict=True)):
            divergence = result[f"divergence {p:g} {rule}"]
            distance = result[f"distance {p:g} {rule}"].mean(0)
            line = {"color": f"C{k}", "linestyle": ("-", "--")[k], "label": f"{rule} steps"}
            mean_band(above, sorted(recorded_steps(last)), divergence, **line)
            below.plot(distance, divergence.mean(0), **line)
        above.set(xscale="log", yscale="log", xlabel="step", title=f"p = {p:g}")
        below.set(xscale="log", yscale="log", xlabel="distance in the dual")
        below.set_xlim(left=settings.lr)
    legend_below(figure, axes[0, 0], columns=2)
    return figure


def _ratios(result: Result[Settings], p: float) -> np.ndarray:
    """D of the constant path at its end over that of the normalised one as far from the start."""
    x, far = (np.log(result[f"distance {p:g} {rule}"]) for rule in RULES)
    y, end = (np.log(result[f"divergence {p:g} {rule}"]) for rule in RULES)
    at = [np.interp(far[t, -1], x[t], y[t]) for t in range(len(x))]
    return np.exp(end[:, -1] - at)


EXPERIMENT = Experiment(
    group="The theory",
    title="Normalised gradients: the same path, faster",
    claim="Normalised gradients make descent faster and hardly change where it goes.",
    equation=r"u(k+1) = u(k) - \eta\, \frac{\nabla L(W(k))}{\lVert \nabla L(W(k)) "
    r"\rVert_{p/(p-1)}} \quad \text{instead of} \quad u(k) - \eta\, \nabla L(W(k))",
    quick=Settings(trials=8, constant=10_000),
    full=Settings(trials=50),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    extent=("normalized", "constant"),
)
