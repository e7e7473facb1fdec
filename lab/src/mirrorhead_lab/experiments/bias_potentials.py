"""Mirror descent in several potentials, on linear data: only their shape at infinity counts.

The data are separable and have two classes, so that no potential changes which tokens are selected.
Each potential is followed with steps of constant length in the dual, and MirrorAdam beside it with
and without its knee: the knee is a parabola, so its limit cannot be the p-norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import (
    Centered,
    HyperbolicEntropy,
    Knee,
    MirrorAdam,
    PNorm,
    follow,
    margin_profile,
)
from mirrorhead.paths.descent import recorded_steps
from mirrorhead_lab.experiments.bias_optimizers import norms_named
from mirrorhead_lab.experiments.bias_problems import binary
from mirrorhead_lab.experiments.bias_runs import heat_map, limit_of, tendency
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, legend_below
from mirrorhead_lab.verdicts import Verdict, judge

CENTER = torch.linspace(-0.1, 0.1, 20, dtype=torch.float64)
#: Potentials, the norm of their shape at infinity, and the length of a step in the dual.
POTENTIALS = {
    "p = 1.1": (PNorm(1.1), "l1.1", 0.01),
    "p = 1.1, knee": (Knee(PNorm(1.1), at=0.1), "l2", 0.3),
    "p = 1.5": (PNorm(1.5), "l1.5", 0.1),
    "p = 1.5, knee": (Knee(PNorm(1.5), at=0.1), "l2", 0.1),
    "p = 1.5, centred": (Centered(PNorm(1.5), CENTER, 1.0), "l1.5", 0.1),
    "p = 3": (PNorm(3), "l3", 1.0),
    "hyperbolic entropy": (HyperbolicEntropy(0.01), "l1", 0.01),
}
ADAMS = {
    "MirrorAdam 1.1": (lambda w: MirrorAdam(w, 0.1, 1.1), "linf"),
    # From W = 0 the knee is gone only with a floor for the size of the weights.
    "MirrorAdam 1.1, no knee": (
        lambda w: MirrorAdam(w, 0.1, 1.1, knee=None, rms_floor=0.01),
        "l1.1",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """steps; norms: by name, in which shares are measured."""

    steps: int = 10_000
    norms: tuple[str, ...] = ("l1", "l1.1", "l1.5", "l2", "l3", "linf")

    @property
    def records(self) -> list[int]:
        """The steps at which shares are measured."""
        return [k for k in sorted(recorded_steps(self.steps, 6)) if k >= 10]


def run(settings: Settings) -> dict[str, Tensor]:
    """shares: (trials, potentials and optimizers, records, norms)."""
    problem, _ = binary(settings.trials, settings.first)
    shares = []
    for potential, _, lr in POTENTIALS.values():
        weights = torch.stack(list(_descent(problem, potential, lr, settings)))
        shares.append(_shares(problem, weights, settings))
    for make, _ in ADAMS.values():
        path = follow(
            problem,
            make,
            settings.steps,
            schedule=lambda k: (1 + k / 100) ** -0.5,
            record=settings.records,
            progress=False,
        )
        shares.append(_shares(problem, path.W, settings))
    return {"shares": torch.stack(shares, 1)}


def _descent(problem, potential, lr: float, settings: Settings):  # pyright: ignore
    """Yield W at the records of u <- u - lr g / ||g||_*, W = inverse(u)."""
    wanted, u = set(settings.records), problem.start()["W"]
    for k in range(1, settings.steps + 1):
        gradient = problem.gradients({"W": potential.inverse(u, -1)})["W"]
        u = u - lr * gradient.divided_by_dual(potential.limit)
        if k in wanted:
            yield potential.inverse(u, -1)


def _shares(problem, weights: Tensor, settings: Settings) -> Tensor:  # pyright: ignore
    norms = norms_named(settings.norms)
    profile = margin_profile(weights, problem.features, labels=problem.labels, norms=norms)
    return profile.shares.transpose(0, 1)


def verdict(result: Result[Settings]) -> Verdict:
    """Of the potentials, each with the norm of its shape at infinity: the claim holds if that
    norm has the largest median share at the end, for all of them; it does not if a curve tends to
    another limit than 1 in its norm (below .95 by extrapolation). The optimizers are in the
    remark."""
    settings, words, adams, own, limits = result.settings, [], [], [], []
    for k, (name, norm) in enumerate(_named()):
        medians = np.nanmedian(result["shares"][:, k], 0)  # (records, norms)
        curve = medians[:, settings.norms.index(norm)]
        state = tendency(curve, settings.records)
        if k < len(POTENTIALS):
            own.append(settings.norms[int(medians[-1].argmax())] == norm)
            limits.append(state)
            words.append(f"{name} {curve[-1]:.3f} of {norm} ({state})")
        else:
            parts = (
                f"{share:.2f} of {other}"
                for share, other in zip(medians[-1], settings.norms, strict=True)
            )
            adams.append(f"{name}: {', '.join(parts)}")
    measured = f"median share after {settings.steps:,} steps: {'; '.join(words)}"
    claimed = True if all(own) else False if "another limit" in limits else None
    return judge(measured, claimed, f"The optimizers have {'; '.join(adams)}.")


def _named() -> list[tuple[str, str]]:
    return [(name, one[1]) for name, one in (POTENTIALS | ADAMS).items()]


def draw(result: Result[Settings]) -> Figure:
    """The heat map, and the share in the norm at infinity against steps, with its limit."""
    from matplotlib.figure import Figure as NewFigure

    settings, named = result.settings, _named()
    figure = NewFigure(figsize=(8, 6.4), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=(2.6, 3))
    medians = np.nanmedian(result["shares"][:, :, -1], 0)
    heat_map(axes[0], medians, [name for name, _ in named], settings.norms)
    for k, (name, norm) in enumerate(named):
        curve = np.nanmedian(result["shares"][:, k, :, settings.norms.index(norm)], 0)
        (line,) = axes[1].plot(settings.records, curve, label=f"{name}, {norm}")
        limit = limit_of(curve, settings.records)
        if np.isfinite(limit):
            axes[1].plot(settings.records[-1] * 1.5, limit, "<", color=line.get_color())
    axes[1].set(xscale="log", ylim=(-0.5, 1.05), ylabel="share")
    axes[1].set_xlabel("step (the arrows: limits by extrapolation)")
    legend_below(figure, axes[1], columns=3)
    return figure


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="Potentials: only their shape at infinity counts",
    claim="The limit of mirror descent depends on the potential at infinity alone: the p-norm with "
    "a knee tends to the l2 margin, the hyperbolic entropy to that of l1 (arXiv 2406.12763).",
    equation=r"\psi_{\mathrm{knee}}(w) \sim w^2, \quad \psi_{\mathrm{entropy}}(w) \sim "
    r"|w| \log |w| \quad (|w| \to \infty)",
    quick=Settings(trials=20, steps=2000),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("shares",),
    extent=("steps",),
    chunk=50,
)
