r"""Theorem 2: the norm of the weights grows without bound. And Remark 1: by which steps.

In units of the max-margin solution, N = ||W|| / ||W_mm||, the gradient shrinks like exp(-N)
along the path. For the constant rule N^(p-2) dN = exp(-N) dk follows, that is

    dN / d log k = 1 / (1 + (p-2) / N),      which tends to 1: N grows like log k.

The normalized rule moves the dual variable by a fixed length, so N grows like k^(1/(p-1)).

The theorem is about starts in a cone around the max-margin solution, with a norm above some R. The
starts here are near 0, outside of it. So Remark 1's step is computed twice: along these paths, and
along the axis of the cone, W = N W_mm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mirrorhead import PNorm, attention_svm, largest_step
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.paths.diagnostics import fitted_slope, log_growth
from mirrorhead.synthetic import random_problem, random_weights
from mirrorhead_lab.experiments.convergence import descend_anyway, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import GREY, NORM, Figure, legend_below, median_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed

#: N where Remark 1's step is computed on the axis of the cone.
AXIS = (2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents; lr: the constant step of each; steps of the constant and of the normalized
    rule (of step size normalized_lr); scale: the standard deviation of W(0)."""

    p: tuple[float, ...] = (1.75, 2.0, 3.0)
    lr: tuple[float, ...] = (30.0, 30.0, 1.0)
    steps: int = 30_000
    normalized_steps: int = 10_000
    normalized_lr: float = 0.1
    scale: float = 0.01


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """For each p "constant p" and "normalized p", the norms over ||W_mm||, and "allowed p",
    Remark 1's step along the constant path, (trials, records); "axis p", that at `AXIS` times
    W_mm of its last tokens. growth: dN / d log k over the last decade of the constant rule, power:
    d log N / d log k of the normalized one, flips: how many weights changed sign, (trials,
    exponents)."""
    problem = random_problem(settings.trials, first=settings.first)
    init = random_weights(problem, settings.scale, settings.first)
    quick_rule = (settings.normalized_steps, settings.normalized_lr, "normalized")
    records, quick_records = _records(settings.steps), _records(settings.normalized_steps)
    rows = []
    for p, lr in zip(settings.p, settings.lr, strict=True):
        path = descend_anyway(problem, p, settings.steps, lr, "constant", init=init, record=records)
        quick = descend_anyway(problem, p, *quick_rule, init=init, record=quick_records)
        solution = attention_svm(problem.X, problem.z, path.tokens, p)
        unit = solution.norm
        quick_unit = attention_svm(problem.X, problem.z, quick.tokens, p).norm
        quick_norm = PNorm(p).norm(quick.W, (-2, -1)) / quick_unit  # (records, trials)
        times = quick.steps[1:].double().unsqueeze(-1).expand_as(quick_norm[1:])
        allowed = torch.stack([largest_step(problem, W, p) for W in path.W])
        axis = torch.stack([largest_step(problem, N * solution.W, p) for N in AXIS])
        signs = path.W.sign()
        row = {
            "constant": (PNorm(p).norm(path.W, (-2, -1)) / unit).T,
            "normalized": quick_norm.T,
            "allowed": allowed.where(allowed.isfinite(), torch.nan).T,
            "axis": axis.where(axis.isfinite(), torch.nan).T,
            "growth": log_growth(path.steps, path.norm) / unit,
            "power": fitted_slope(times, quick_norm[1:]),
            "flips": (signs[1:] * signs[:-1] < 0).any(0).sum((-2, -1)),
        }
        rows.append(row)
    return joined(settings.p, rows, "constant", "normalized", "allowed", "axis")


def verdict(result: Result[Settings]) -> Verdict:
    """The norm diverges if it still gains on log k, and at the rate that theory predicts."""
    settings, exponents = result.settings, np.array(result.settings.p)
    end = [np.median(norm[:, -1]) for norm in result.each("constant")]
    middle, power = (np.median(result[name], 0) for name in ("growth", "power"))
    predicted = 1 / (1 + (exponents - 2) / end)
    unbounded = bool((result["growth"] > 0).all() and (result["power"] > 0).all())
    least = [np.nanmin(allowed, 1) for allowed in result.each("allowed")]  # (trials,) each
    remark = (
        "The theorem is about starts in a cone, and these are near 0. "
        f"The largest step that Remark 1 allows along the path: "
        f"{listed(map(np.median, least), '.3g')} (median over trials; least "
        f"{listed(map(np.min, least), '.2g')})."
    )
    flips = (result["flips"] > 0).sum(0)
    for p, lr, allowed, trials in zip(settings.p, settings.lr, least, flips, strict=True):
        if p > 2 and trials:
            axis = np.nanmin(result[f"axis {p:g}"], 0)
            remark += (
                f" For p = {p:g} it is 0 wherever a weight is 0, and weights change sign in "
                f"{trials} of {settings.trials} trials: from these starts no constant step is "
                f"allowed, and lr = {lr:g}, above it in {(allowed < lr).sum()} trials, diverges "
                f"too. On the axis of the cone, W = N W_mm, it is at least {listed(axis)} at N = "
                f"{listed(AXIS, 'g')}."
            )
    return judge(
        f"p = {listed(settings.p, 'g')}: N = ||W|| / ||W_mm|| gains {listed(middle, '.2f')} for "
        f"each unit of log k (theory {listed(predicted, '.2f')}) and is "
        f"{listed(end, '.1f')} after {settings.steps:,} constant steps (medians); under the "
        f"normalized rule it grows like k to the {listed(power, '.2f')} (theory "
        f"{listed(1 / (exponents - 1), '.2f')})",
        unbounded and bool((np.abs(middle / predicted - 1) < 0.25).all()),
        remark,
    )


def draw(result: Result[Settings]) -> Figure:
    """The norm under both rules, and Remark 1's step, against the step."""
    settings = result.settings
    figure, (constant, normalized, allowed) = panels(3)
    steps, quick = _records(settings.steps)[1:], _records(settings.normalized_steps)[1:]
    for p in settings.p:
        label = f"p = {p:g}"
        median_band(constant, steps, result[f"constant {p:g}"][:, 1:], label=label)
        median_band(normalized, quick, result[f"normalized {p:g}"][:, 1:], label=label)
        median_band(allowed, [1, *np.add(steps, 1)], result[f"allowed {p:g}"], label=label)
    ends = np.array([steps[-1] / 100, steps[-1]])
    constant.plot(ends, 5 + np.log(ends / ends[0]), "--", color=GREY, label="growth like log k")
    constant.set(xscale="log", xlabel="step k", ylabel=NORM, title="constant rule")
    normalized.set(xscale="log", yscale="log", xlabel="step k", title="normalized rule")
    normalized.set_ylabel(NORM)
    allowed.set(xscale="log", yscale="log", xlabel="step k + 1", title="Remark 1, constant rule")
    allowed.set_ylabel("largest step allowed")
    legend_below(figure, constant, columns=4)
    return figure


def _records(steps: int) -> list[int]:
    """The start and ten records a decade: the Hessian is computed at each."""
    return [0, *sorted(recorded_steps(steps, per_decade=10))]


EXPERIMENT = Experiment(
    group="The theory",
    title="Theorem 2 and Remark 1: the norm diverges, and the steps that are allowed",
    claim="The norm of the attention weights grows without bound, if the constant step is small "
    "enough (Remark 1).",
    equation=r"\lVert W(k) \rVert_p \to \infty \text{ as } k \to \infty",
    quick=Settings(trials=10, steps=5000),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    may_be_nan=tuple(f"{name} {p}" for name in ("allowed", "axis") for p in ("1.75", "2", "3")),
    # NaN: no limit, since the loss is concave there
    extent=("steps", "normalized_steps"),
)
