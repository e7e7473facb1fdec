"""Steepest descent in six norms, in attention: does it reach the margin of its norm, how fast?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import margin_profile
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.bias_optimizers import norms_named
from mirrorhead_lab.experiments.bias_runs import tendency
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, panels
from mirrorhead_lab.verdicts import Verdict, judge

#: The most that log10(1 - share) may exceed a line of slope -1/2 through its value at a tenth.
SLACK = 0.05


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """norms: of the steepest descent, by name; steps; lr: of steps of length lr / sqrt(k + 1)."""

    norms: tuple[str, ...] = ("l1", "l2", "linf", "spectral", "nuclear", "rows")
    steps: int = 10_000
    lr: float = 3.0

    @property
    def records(self) -> list[int]:
        """The steps at which shares are measured."""
        return [k for k in sorted(recorded_steps(self.steps, 6)) if k >= 10]


def run(settings: Settings) -> dict[str, Tensor]:
    """shares: of the norm's largest margin, (trials, norms, records)."""
    problem = random_problem(settings.trials, first=settings.first)
    shares = []
    for norm in norms_named(settings.norms):
        W, weights = torch.zeros(problem.weight_shape).to(problem.X), []
        for k in range(settings.steps):
            W = W - settings.lr / (k + 1) ** 0.5 * problem.gradient(W).steepest(norm)
            if k + 1 in settings.records:
                weights.append(W)
        tokens = problem.select(W)
        profile = margin_profile(torch.stack(weights), problem.X, problem.z, tokens, norms=[norm])
        shares.append(profile.shares[..., 0].T)
    return {"shares": torch.stack(shares, 1)}


def verdict(result: Result[Settings]) -> Verdict:
    """The claim holds if for every norm the median share is at least .9 at the end, or tends to at
    least .98 by extrapolation, and 1 - share falls at least as 1 / sqrt(k) over the last decade."""
    settings, words, reached, fast = result.settings, [], [], []
    for k, norm in enumerate(settings.norms):
        curve = np.nanmedian(result["shares"][:, k], 0)
        state = tendency(curve, settings.records)
        ends = np.interp(
            np.log([settings.steps / 10, settings.steps]), np.log(settings.records), curve
        )
        slope = float(np.diff(np.log10(np.maximum(1 - ends, 1e-12)))[0])
        reached.append(state in ("reached", "slow") or curve[-1] >= 0.9)
        fast.append(slope <= -0.5 + SLACK or curve[-1] >= 0.999)
        words.append(f"{norm} {curve[-1]:.4f} ({state}), slope {slope:.2f}")
    measured = (
        f"median share after {settings.steps:,} steps, and slope of 1 - share over the last "
        f"decade: {'; '.join(words)}"
    )
    slow = [norm for norm, one in zip(settings.norms, fast, strict=True) if not one]
    remark = (
        f"Slower than 1/sqrt(k) in {', '.join(slow)}: the steps have a constant length."
        if slow
        else ""
    )
    if all(reached) and not slow:
        return judge(measured, True)
    return judge(measured, None if all(reached) else False, remark or "Some share stays below .9.")


def draw(result: Result[Settings]) -> Figure:
    """1 - share against steps."""
    settings = result.settings
    figure, axes = panels(1, height=3.6)
    for k, norm in enumerate(settings.norms):
        curve = np.nanmedian(result["shares"][:, k], 0)
        axes[0].plot(settings.records, np.maximum(1 - curve, 1e-9), label=norm)
    at = np.array(settings.records)
    axes[0].plot(at, (at[0] / at) ** 0.5, ":", color="#777777", label="1/sqrt(k)")
    axes[0].set(xscale="log", yscale="log", xlabel="step", ylabel="1 - share of the largest margin")
    axes[0].legend(ncols=2)
    return figure


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="Steepest descent: the margin of its own norm, and the rate",
    claim="Steepest descent in a norm goes to the max-margin direction of that norm, in attention "
    "too, with a margin that is within O(1/sqrt k) of the largest.",
    equation=r"1 - \frac{m(W_k)\, \lVert W_{\mathrm{mm}} \rVert}{\lVert W_k \rVert} = "
    r"O(k^{-1/2})",
    quick=Settings(trials=20, steps=2000),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("shares",),
    extent=("steps",),
    chunk=50,
)
