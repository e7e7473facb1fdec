r"""Acceleration: the same directions in a fraction of the steps.

The rule "accelerated" of `descend` is Nesterov's method on the dual of the max-margin problem,
seen through gradients of the loss alone. It chooses its own steps; the paper's normalized rule
is given several step sizes and is judged by the best of them, p by p. Both start at W(0) = 0 and
are compared with the AttSVM of the tokens that they selected themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mirrorhead import descend, locally_optimal
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import PathSettings, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import GREY, Figure, legend_below, median_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """p: exponents; steps of each path; lr: the step sizes that the normalized rule may try;
    tol: the certified gap of the max-margin solutions."""

    p: tuple[float, ...] = (1.1, 1.5, 1.75, 2.0, 3.0, 5.0)
    steps: tuple[int, ...] = (5000, 3000, 3000, 3000, 3000, 20_000)
    lr: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
    tol: float = 1e-14


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """For each p "accelerated p", the divergence to the solution of its tokens, (trials,
    records), and "normalized p", (trials, records, rates). local: whether the accelerated
    rule's tokens are locally optimal, (trials, exponents); same: whether the normalized rule
    selected them too, (trials, exponents, rates)."""
    problem = random_problem(settings.trials, first=settings.first)
    rows = []
    for p, steps in zip(settings.p, settings.steps, strict=True):
        path = descend(problem, p, steps, rule="accelerated", progress=False)
        found = locally_optimal(problem, path.tokens, p, settings.tol)
        divergences, agrees = [], []
        for lr in settings.lr:
            baseline = descend(problem, p, steps, lr, progress=False)
            own = locally_optimal(problem, baseline.tokens, p, settings.tol).solution
            divergences.append(baseline.divergence_to(own).T)
            agrees.append((baseline.tokens == path.tokens).all(-1))
        row = {
            "accelerated": path.divergence_to(found.solution).T,
            "normalized": torch.stack(divergences, -1),
            "local": found.optimal,
            "same": torch.stack(agrees, -1),
        }
        rows.append(row)
    return joined(settings.p, rows, "accelerated", "normalized")


def verdict(result: Result[Settings]) -> Verdict:
    """The goals of the claim, p by p, and that the normalized rule is nowhere near."""
    settings = result.settings
    accelerated = result.each("accelerated")  # (trials, records) each
    middle, largest = ([f(x[:, -1]) for x in accelerated] for f in (np.median, np.max))
    ends = np.stack([np.median(x[:, -1], 0) for x in result.each("normalized")])  # (p, rates)
    baselines, rates = ends.min(1), [settings.lr[k] for k in ends.argmin(1)]
    first, reached = [], []
    for p, x, divergence in zip(settings.p, settings.records, accelerated, strict=True):
        course = divergence.max(0) if p > 4 else np.median(divergence, 0)
        there = course <= _goal(p)
        reached.append(there[-1])
        first.append(f"{x[there.argmax()]:,}" if there.any() else "never")
    faster = np.array(middle) < baselines / 10
    return judge(
        f"p = {listed(settings.p, 'g')}: median D {listed(middle, '.0e')}, largest "
        f"{listed(largest, '.0e')} after {listed(settings.steps, ',')} steps, the goal reached at "
        f"step {' / '.join(first)}; the normalized rule, with the best of {len(settings.lr)} step "
        f"sizes ({listed(rates, 'g')}), comes to {listed(baselines, '.0e')}. "
        f"{result['local'].mean():.1%} of the accelerated paths are at locally optimal tokens",
        all(reached) and bool(faster.all()),
    )


def draw(result: Result[Settings]) -> Figure:
    """The divergence against the step under both rules, a panel for each p."""
    settings = result.settings
    count = len(settings.p)
    columns = 2 if count in (2, 4) else min(3, count)
    rows = -(-count // columns)
    figure, axes = panels(columns, rows, 1.2 + 2.2 * rows, sharey=True, ylabel="divergence D")
    flat = np.ravel(axes)
    for axis, p, x in zip(flat, settings.p, settings.records, strict=False):
        accelerated, normalized = result[f"accelerated {p:g}"], result[f"normalized {p:g}"]
        best = normalized[..., np.median(normalized[:, -1], 0).argmin()]
        median_band(axis, x, best, color="C1", label="normalized, the best step size")
        median_band(axis, x, accelerated, color="C0", label="accelerated")
        axis.plot(x, accelerated.max(0), ":", color="C0", linewidth=1, label="its worst trial")
        axis.axhline(_goal(p), color=GREY, linewidth=0.8, linestyle="--", label="goal")
        axis.set(xscale="log", yscale="log", xlabel="step", title=f"p = {p:g}")
    for axis in flat[count:]:
        axis.remove()
    legend_below(figure, flat[0], columns=4)
    return figure


def _goal(p: float) -> float:
    return 1e-6 if p > 4 else 1e-8


EXPERIMENT = Experiment(
    title="Acceleration: the same directions in a fraction of the steps",
    claim="Beyond the paper: the accelerated rule comes within $D = 10^{-8}$ of the max-margin "
    "direction in thousands of steps (in the median; for $p > 4$ within $10^{-6}$ in every trial).",
    equation=r"D(k) = D_{\psi_p}\!\left( \frac{W_{\mathrm{mm}}}{\lVert W_{\mathrm{mm}} "
    r"\rVert_p},\, \frac{W(k)}{\lVert W(k) \rVert_p} \right) \leq 10^{-8}",
    quick=Settings(trials=10, p=(1.1, 1.5, 2.0, 3.0, 5.0), steps=(2500, 1500, 1500, 1500, 5000)),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    extent=("steps",),
)
