r"""Theorem 3 and Lemma 17 (Figure 1): paths that start inside the cone.

Theorems 2 to 4 start in C_mu,R: the direction of W(0) within mu = mu_0/3 of the max-margin
solution, and ||W(0)|| >= R = R_mu0 (`ConeConstants`). There the loss is exp(-R/||W_mm||), which is
exp(-10^9) on the paper's problems, and Remark 1 allows steps that are as large as the gradient is
small. So gradients, steps and changes of the loss are computed as logarithms (`mirrorhead.theory`).
From such a start two things are run:

    constant     a third of the largest step that Remark 1 allows: Theorem 2, Lemmas 10 to 14, 16
                 and 17 are checked at every step. The norm gains about log k, which is nothing
                 beside 10^9, so that the direction hardly moves: a rate in k cannot be seen.
    normalized   until the norm has grown several times, on problems with T = 2, whose cones are
                 wide enough to see the divergence fall in them: Theorem 3, and the rate in ||W||.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import AttentionProblem, ConeConstants, PNorm, cone_constants, descend
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.paths.diagnostics import fitted_slope, theorem_rate
from mirrorhead.paths.step_size import log_largest_step
from mirrorhead.synthetic import random_problem
from mirrorhead.theory import (
    MirrorStep,
    lemma_10,
    lemma_11,
    lemma_12,
    lemma_13,
    lemma_14,
    lemma_16,
    lemma_17,
)
from mirrorhead_lab.experiments.convergence import joined
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, legend_below, median_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed

DIMS = (-2, -1)
CHECKS = ("10", "11", "12", "13", "14", "16", "17", "Remark 1", "norm", "cone")
TOLERANCE = 1e-6  # relative
RESOLVED = 1e13  # float64 has logits of this size to 10^-3, and steps move them by a tenth


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents; constant: how many constant steps; normalized: how many normalized ones, each
    of `lr` times the norm of u(0)."""

    p: tuple[float, ...] = (1.75, 2.0, 3.0)
    constant: int = 300
    normalized: int = 40_000
    lr: tuple[float, ...] = (1e-3, 1e-3, 1e-3)


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p: "gain p", (||W(k)|| - ||W(0)||)/||W_mm|| along the constant rule, (trials,
    steps); "norm p" over ||W(0)|| and "divergence p" along the normalized one, (trials, records).
    (trials, exponents): failures of each check, (..., checks); radius, ||W(0)|| over ||W_mm||;
    inside: whether all of the normalized path is in the cone; slope of log D."""
    paper = random_problem(settings.trials, first=settings.first)
    wide = random_problem(settings.trials, n=3, T=2, d=10, first=settings.first)
    rows = []
    for p, lr in zip(settings.p, settings.lr, strict=True):
        cone, start = _start(paper, p)
        gain, failures = _constant(paper, cone, start, settings.constant)
        row = {
            "gain": gain,
            "failures": failures,
            "radius": PNorm(p).norm(start, DIMS) / cone.solution.norm,
        }
        rows.append(row | _normalized(wide, p, settings.normalized, lr))
    return joined(settings.p, rows, "gain", "norm", "divergence")


def _start(problem: AttentionProblem, p: float) -> tuple[ConeConstants, Tensor]:
    """The cone of the best tokens, and W(0): at a third of mu_0 in a random direction."""
    tokens = problem.scores().argmax(-1)
    cone, psi = cone_constants(problem, tokens, p, tol=1e-13), PNorm(p)
    best = cone.solution.W
    generator = torch.Generator().manual_seed(7)
    away = torch.randn(best.shape[1:], dtype=torch.float64, generator=generator).expand_as(best)
    low, high = torch.full_like(cone.mu_0, -40.0), torch.zeros_like(cone.mu_0)
    for _ in range(50):  # bisection of the logarithm of the length
        middle = (low + high) / 2
        W = best + middle.exp()[..., None, None] * away
        within = psi.direction_divergence(best, W, DIMS) <= cone.mu_0 / 3
        low, high = middle.where(within, low), high.where(within, middle)
    W = best + low.exp()[..., None, None] * away
    return cone, W * (1.001 * cone.R_mu() / psi.norm(W, DIMS))[..., None, None]


def _constant(
    problem: AttentionProblem, cone: ConeConstants, start: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """The gain in norm after each step, (trials, steps), and failures, (trials, checks)."""
    psi, solution, pi = PNorm(cone.solution.p), cone.solution, cone.mu_0 / 3
    log_lr = log_largest_step(problem, start, psi.p) - np.log(3)
    radius = psi.norm(start, DIMS)
    W, drop, gains = start, torch.zeros_like(radius), []
    failures = torch.zeros(len(radius), len(CHECKS), dtype=torch.long)
    for _ in range(steps):
        step = MirrorStep(problem, W, psi.p, log_lr)
        drop = drop - step.loss_change
        claims = (
            lemma_10(problem, cone, W, W),
            lemma_11(problem, cone, W, pi),
            lemma_12(step),
            lemma_13(step),
            lemma_14(step),
            lemma_16(step, solution, pi),
            lemma_17(solution, start, step.after, pi, drop),
            (log_largest_step(problem, W, psi.p), log_lr),
            (step.gain, 0 * step.gain),
        )
        holds = [
            left - right >= -TOLERANCE * torch.maximum(left.abs(), right.abs())
            for left, right in claims
        ]
        holds.append(cone.contains(step.after))
        failures += ~torch.stack(holds, -1)
        W = step.after
        gains.append((psi.norm(W, DIMS) - radius) / solution.norm)
    return torch.stack(gains, -1), failures


def _normalized(problem: AttentionProblem, p: float, steps: int, lr: float) -> dict[str, Tensor]:
    cone, start = _start(problem, p)
    psi, record, W = PNorm(p), [0, *sorted(recorded_steps(steps))], []
    size = psi.norm(start, DIMS)
    for k, own in enumerate((lr * size ** (p - 1)).tolist()):
        one, init = problem.trial(slice(k, k + 1)), start[k : k + 1]
        W.append(descend(one, p, steps, own, init=init, record=record, progress=False).W)
    W = torch.cat(W, 1)
    norm = psi.norm(W, DIMS) / size
    divergence = psi.direction_divergence(cone.solution.W.expand_as(W), W, DIMS)
    slope, inside = fitted_slope(norm[1:], divergence[1:]), cone.contains(W).all(0)
    return {"norm": norm.T, "divergence": divergence.T, "inside": inside, "slope": slope}


def verdict(result: Result[Settings]) -> Verdict:
    """Theorem 3 holds if D falls to a tenth or less while all checks of the lemmas hold."""
    settings, resolved = result.settings, result["radius"] < RESOLVED
    failures = result["failures"][resolved].sum(0)
    falls = [D[:, -1] / D[:, 0] for D in result.each("divergence")]
    grown = [np.median(norm[:, -1]) for norm in result.each("norm")]
    gains = [
        np.median(gain[:, -1][near])
        for gain, near in zip(result.each("gain"), resolved.T, strict=True)
    ]
    slope, radius = np.median(result["slope"], 0), np.median(result["radius"], 0)
    bounds = [theorem_rate(p) for p in settings.p]
    wrong = [f"{name} ({count})" for name, count in zip(CHECKS, failures, strict=True) if count]
    steps = f"{resolved.sum() * settings.constant:,}"
    return judge(
        f"p = {listed(settings.p, 'g')}: from D = mu_0/3 at {listed(radius, '.0e')} ||W_mm||, "
        f"{settings.constant} constant steps gain {listed(gains, '.2f')} ||W_mm||; Lemmas 10 to "
        f"14, 16, 17, Remark 1, a growing norm and the cone of radius mu_0 fail at "
        f"{', '.join(wrong) or 'none'} of {steps} steps ({(~resolved).sum()} starts are too far "
        f"out for float64). Normalized, with T = 2, D falls to "
        f"{listed(map(np.median, falls), '.1e')} of its start (largest "
        f"{listed(map(np.max, falls), '.1e')}) while the norm grows {listed(grown, '.0f')} times, "
        f"inside the cone in {result['inside'].sum()} of {result['inside'].size} paths",
        bool(not failures.any() and result["inside"].all() and max(map(np.max, falls)) <= 0.1),
        f"Along the constant rule the norm gains log k, so that from such a radius no rate in k "
        f"can be seen: to double the norm takes exp({radius.min():.0e}) steps. In ||W|| the slope "
        f"of log D is {listed(slope, '.2f')}; the theorem has {listed(bounds, 'g')}, the "
        f"logarithmic rate of [31] for linear classifiers -1.",
    )


def draw(result: Result[Settings]) -> Figure:
    """The gain in norm along the constant rule, and the divergence along the normalized one."""
    settings = result.settings
    figure, (left, right) = panels(2)
    steps = np.arange(1, settings.constant + 1)
    for p in settings.p:
        label = f"p = {p:g}"
        median_band(left, steps, result[f"gain {p:g}"], label=label)
        norm, D = result[f"norm {p:g}"], result[f"divergence {p:g}"]
        median_band(right, norm, D / (3 * D[:, :1]), label=label)  # it starts at mu_0 / 3
    left.set(
        xscale="log",
        xlabel="constant step k",
        ylabel=r"$(||W(k)|| - ||W(0)||) / ||W_\mathrm{mm}||$",
    )
    left.set_title("Theorem 2, from inside the cone")
    right.set(xscale="log", yscale="log", xlabel="norm $||W(k)|| / ||W(0)||$")
    right.set(ylabel=r"divergence $D / \mu_0$", title="Figure 1: inside the cone")
    right.axhline(1, color="black", linestyle=":", label="boundary of the cone")
    right.axhline(1 / 3, color="black", linestyle="--", linewidth=1, label="of the inner one")
    legend_below(figure, left, columns=3)
    right.legend(loc="lower left", fontsize="small")
    return figure


EXPERIMENT = Experiment(
    group="The theory",
    title="Theorem 3 and Lemma 17 (Figure 1): from inside the cone",
    claim="A path that starts inside the cone around a max-margin solution, far enough out and "
    "with a step that Remark 1 allows, stays in the cone of three times the radius, its norm "
    "grows, and its direction converges to that of the solution.",
    equation=r"W(0) \in C_{p, \mu_0/3, R} \;\Rightarrow\; W(k) \in C_{p, \mu_0, R}, \quad "
    r"\frac{W(k)}{\lVert W(k) \rVert_p} \to \frac{W_{\mathrm{mm}}}{\lVert W_{\mathrm{mm}} "
    r"\rVert_p}",
    quick=Settings(trials=10, constant=60, normalized=20_000),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    extent=("constant", "normalized"),
)
