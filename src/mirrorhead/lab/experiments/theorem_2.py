r"""Theorem 2: the norm of the weights grows without bound. And Remark 1: by which steps.

In units of the max-margin solution, N = ||W|| / ||W_mm||, the gradient shrinks like exp(-N)
along the path. For the constant rule N^(p-2) dN = exp(-N) dk follows, that is

    dN / d log k = 1 / (1 + (p-2) / N),      which tends to 1: N grows like log k.

The normalized rule moves the dual variable by a fixed length, so N grows like k^(1/(p-1)).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead.lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead.lab.plots import COLOURS, GREY, NORM, Figure, legend_below, median_band, panels
from mirrorhead.lab.verdicts import Verdict, judge, listed
from mirrorhead.margin import attention_svm
from mirrorhead.paths.descent import Path, descend, recorded_steps
from mirrorhead.paths.diagnostics import fitted_slope, log_growth
from mirrorhead.paths.step_size import largest_step
from mirrorhead.potentials import PNorm
from mirrorhead.synthetic import random_problem, random_weights


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


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p: "constant p" and "normalized p", the norms over ||W_mm||, and "allowed p",
    Remark 1's step along the constant path, (trials, records). growth: dN / d log k over the
    last decade of the constant rule, power: d log N / d log k of the normalized one, flips: how
    many weights changed sign, (trials, exponents)."""
    problem = random_problem(settings.trials, first=settings.first)
    init = random_weights(problem, settings.scale, settings.first)
    arrays: dict[str, Tensor] = {}
    growth, power, flips = [], [], []
    for p, lr in zip(settings.p, settings.lr, strict=True):
        with warnings.catch_warnings():
            # A step beyond Remark 1 is what "allowed" is there to show.
            warnings.filterwarnings("ignore", message="lr = .* exceeds the largest step")
            path = descend(
                problem, p, settings.steps, lr, "constant", init=init,
                record=_records(settings.steps), progress=False,
            )  # fmt: skip
        allowed = torch.stack([largest_step(problem, W, p) for W in path.W])
        solution = attention_svm(problem.X, problem.z, path.tokens, p)
        growth.append(log_growth(path) / solution.norm)
        signs = path.W.sign()
        flips.append((signs[1:] * signs[:-1] < 0).any(0).sum((-2, -1)))
        quick = descend(
            problem, p, settings.normalized_steps, settings.normalized_lr, init=init,
            record=_records(settings.normalized_steps), progress=False,
        )  # fmt: skip
        quick_norm = _relative_norm(quick)
        steps = quick.steps[1:].double().unsqueeze(-1).expand_as(quick_norm[1:])
        power.append(fitted_slope(steps, quick_norm[1:]))
        arrays |= {
            f"constant {p:g}": _relative_norm(path).T,
            f"normalized {p:g}": quick_norm.T,
            f"allowed {p:g}": allowed.where(allowed.isfinite(), torch.nan).T,
        }
    stacked = {"growth": growth, "power": power, "flips": flips}
    return arrays | {name: torch.stack(parts, 1) for name, parts in stacked.items()}


def verdict(result: Result[Settings]) -> Verdict:
    """The norm diverges if it still gains on log k, and at the rate that theory predicts."""
    settings, growth = result.settings, result["growth"]
    end = np.stack([result[f"constant {p:g}"][:, -1] for p in settings.p], 1)  # (trials, p)
    predicted = 1 / (1 + (np.array(settings.p) - 2) / np.median(end, 0))
    middle = np.median(growth, 0)
    power = np.median(result["power"], 0)
    diverges = bool((growth > 0).all() and (np.abs(middle / predicted - 1) < 0.25).all())
    unbounded = bool((result["power"] > 0).all())
    least = [np.nanmin(result[f"allowed {p:g}"], 1) for p in settings.p]  # (trials,) each
    remark = (
        f"The largest step that Remark 1 allows along the path: "
        f"{listed(map(np.median, least), '.3g')} (median over trials; least "
        f"{listed(map(np.min, least), '.2g')})."
    )
    flipped = result["flips"].T
    for p, lr, allowed, flips in zip(settings.p, settings.lr, least, flipped, strict=True):
        if p > 2 and (flips > 0).any():
            remark += (
                f" For p = {p:g} it is 0 wherever a weight is 0, and weights change sign in "
                f"{(flips > 0).sum()} of {settings.trials} trials: no constant step is allowed "
                f"there; lr = {lr:g}, above it in {(allowed < lr).sum()} trials, diverges too."
            )
    theory = 1 / (np.array(settings.p) - 1)
    return judge(
        f"p = {listed(settings.p, 'g')}: N = ||W|| / ||W_mm|| gains {listed(middle, '.2f')} for "
        f"each unit of log k (theory {listed(predicted, '.2f')}) and is "
        f"{listed(np.median(end, 0), '.1f')} after {settings.steps:,} constant steps (medians); "
        f"under the normalized rule it grows like k to the {listed(power, '.2f')} (theory "
        f"{listed(theory, '.2f')})",
        diverges and unbounded,
        remark,
    )


def draw(result: Result[Settings]) -> Figure:
    """The norm under both rules, and Remark 1's step, against the step."""
    settings = result.settings
    figure, (constant, normalized, allowed) = panels(3)
    steps, quick = _records(settings.steps)[1:], _records(settings.normalized_steps)[1:]
    for p, colour in zip(settings.p, COLOURS, strict=False):
        line = {"color": colour, "label": f"p = {p:g}"}
        median_band(constant, steps, result[f"constant {p:g}"][:, 1:], **line)
        median_band(normalized, quick, result[f"normalized {p:g}"][:, 1:], **line)
        median_band(allowed, [1, *np.add(steps, 1)], result[f"allowed {p:g}"], **line)
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


def _relative_norm(path: Path) -> Tensor:
    """||W(k)|| over that of the max-margin solution of the path's tokens, (records, trials)."""
    solution = attention_svm(path.problem.X, path.problem.z, path.tokens, path.p)
    return PNorm(path.p).norm(path.W, (-2, -1)) / solution.norm


EXPERIMENT = Experiment(
    name="theorem-2",
    title="Theorem 2 and Remark 1: the norm diverges, and the steps that are allowed",
    claim=(
        "The norm of the attention weights grows without bound, if the constant step is "
        "small enough (Remark 1)."
    ),
    equation=(r"\lVert W(k) \rVert_p \to \infty \text{ as } k \to \infty"),
    quick=Settings(trials=10, steps=5000),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    may_be_nan=("allowed 1.75", "allowed 2", "allowed 3"),  # no limit: the loss is concave there
    extent=("steps", "normalized_steps"),
)
