"""What experiments on the bias of optimizers share: the runs, the heat map, and extrapolation.

Learning rates are chosen from one grid by the training loss, on `PILOT` trials of other seeds and
with a tenth of the steps: the smallest median of its logarithm. Shares take no part in the choice.
All rates decay as 1 / sqrt(1 + k / 100).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead import MarginProfile, OptimizerPath, follow
from mirrorhead.bias._trainer import MakeOptimizer
from mirrorhead.paths.descent import recorded_steps
from mirrorhead_lab.experiments.bias_optimizers import candidates, norms_named, predicted
from mirrorhead_lab.experiments.experiment import Result, TrialSettings
from mirrorhead_lab.plots import Figure, legend_below, panels

PILOT, PILOT_SEED = 5, 1_000_000
#: A share above this counts as the whole margin, one whose limit is below OTHER as another limit.
REACHED, OTHER = 0.98, 0.95

#: Trials and their first seed -> a problem for `follow`, and where it starts.
MakeProblem = Callable[[int, int], tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class BiasSettings(TrialSettings):
    """optimizers, norms: by name; steps; rates: the grid of learning rates; gradient: what `follow`
    hands over; batch: samples for each step, 0 for all; code: hashes of optimizers of one's own."""

    optimizers: tuple[str, ...]
    norms: tuple[str, ...] = ("l1", "l1.5", "l2", "l3", "linf", "nuclear", "spectral")
    steps: int = 10_000
    rates: tuple[float, ...] = (0.01, 0.03, 0.1)
    gradient: str = "direction"
    batch: int = 0
    code: tuple[str, ...] = ()

    @property
    def records(self) -> list[int]:
        """The steps at which shares are measured."""
        return [k for k in sorted(recorded_steps(self.steps, 6)) if k >= min(10, self.steps)]


def run_all(settings: BiasSettings, make: MakeProblem) -> dict[str, Tensor]:
    """shares: (trials, optimizers, records, norms); gaps: the largest of their certificates,
    (trials,); losses: logarithms at the end, and rates, (trials, optimizers)."""
    norms, shares, losses, rates = norms_named(settings.norms), [], [], []
    gaps = torch.zeros(settings.trials, dtype=torch.float64)
    for name in settings.optimizers:
        rate, path = best_run(settings, make, name)
        profile = path.profile(norms, records=True)
        shares.append(profile.shares.transpose(0, 1))
        gaps = torch.maximum(gaps, _largest_gap(profile))
        losses.append(path.log_loss[-1])
        rates.append(torch.full((settings.trials,), rate, dtype=torch.float64))
    return {
        "shares": torch.stack(shares, 1),
        "gaps": gaps,
        "losses": torch.stack(losses, 1),
        "rates": torch.stack(rates, 1),
    }


def best_run(
    settings: BiasSettings, make: MakeProblem, name: str, batch: int | None = None
) -> tuple[float, OptimizerPath]:
    """Return the learning rate that trains best, and a path with it; NaN for an own rate."""
    options: dict[str, Any] = {
        "gradient": settings.gradient,
        "batch": batch or settings.batch or None,
    }
    found = candidates(name, settings.rates)
    rate = next(iter(found))
    if len(found) > 1:
        pilot = {
            lr: _pilot_loss(make, one, max(settings.steps // 10, 10), options)
            for lr, one in found.items()
        }
        rate = min(pilot, key=lambda lr: pilot[lr])
    problem, start = make(settings.trials, settings.first)
    return rate, _followed(problem, start, found[rate], settings.steps, settings.records, options)


def _pilot_loss(make: MakeProblem, one: MakeOptimizer, steps: int, options: Any) -> float:
    try:
        path = _followed(*make(PILOT, PILOT_SEED), one, steps, [steps], options)
    except FloatingPointError:
        return math.inf
    return float(path.log_loss[-1].median())


def _followed(
    problem: Any, start: Any, one: MakeOptimizer, steps: int, record: list[int], options: Any
) -> OptimizerPath:
    return follow(
        problem, one, steps, schedule=lambda k: (1 + k / 100) ** -0.5, init=start, record=record,
        progress=False, **options,
    )  # fmt: skip


def _largest_gap(profile: MarginProfile) -> Tensor:
    gaps = profile.gaps.where(profile.gaps.isfinite(), 0.0)
    return gaps.amax((0, -1))


def at_end(result: Result[Any]) -> np.ndarray:
    """Return the median shares at the end, (optimizers, norms)."""
    return np.nanmedian(result["shares"][:, :, -1], 0)


def best_counts(result: Result[Any]) -> np.ndarray:
    """Return in which share of the trials each norm is the best of an optimizer."""
    shares = np.nan_to_num(result["shares"][:, :, -1], nan=-np.inf)
    best = shares.argmax(-1)  # (trials, optimizers)
    return np.stack([(best == k).mean(0) for k in range(shares.shape[-1])], -1)


def limit_of(shares: np.ndarray, steps: Sequence[int]) -> float:
    """Return where a curve of shares tends to, or NaN where that cannot be said.

    With the shares a, b, c at a hundredth, a tenth and all of the steps, 1 - share = e + C / t^s
    gives the limit c + (c - b) r / (1 - r) with r = (c - b) / (b - a). It needs 0 < r < 1, steps
    that shrink.

    >>> t = np.array([100, 1000, 10000])
    >>> round(limit_of(0.9 - t**-0.5, t), 6)
    0.9
    """
    last = steps[-1]
    a, b, c = np.interp(np.log([last / 100, last / 10, last]), np.log(steps), shares)
    if abs(c - b) < 2e-3:  # it has stopped
        return float(c)
    r = (c - b) / (b - a) if b != a else math.inf
    limit = float(c + (c - b) * r / (1 - r)) if 0 < r < 0.9 else math.nan
    return limit if limit <= 1.02 else math.nan  # no share is above 1


def tendency(shares: np.ndarray, steps: Sequence[int]) -> str:
    """Say whether a curve of shares has reached 1, is slow, has another limit, or cannot tell."""
    if shares[-1] >= REACHED:
        return "reached"
    limit = limit_of(shares, steps)
    if math.isnan(limit) or OTHER <= limit < REACHED:
        return "not decided"
    return "slow" if limit >= REACHED else "another limit"


def tendencies(result: Result[Any], norms: Sequence[str]) -> list[str]:
    """Return the tendency of each optimizer in the norm that is named for it, "" for none."""
    settings = result.settings
    found = []
    for k, norm in enumerate(norms):
        if norm not in settings.norms:
            found.append("")
            continue
        curve = np.nanmedian(result["shares"][:, k, :, settings.norms.index(norm)], 0)
        found.append(tendency(curve, settings.records))
    return found


def heat_map(axis: Any, shares: np.ndarray, rows: Sequence[str], norms: Sequence[str]) -> None:
    """Draw medians of shares, (optimizers, norms), with the best norm of each row in a frame."""
    from matplotlib.patches import Rectangle

    axis.imshow(np.clip(shares, 0, 1), cmap="Blues", vmin=0.3, vmax=1.15, aspect="auto")
    for i, row in enumerate(shares):
        best = int(np.nanargmax(row)) if np.isfinite(row).any() else -1
        for j, share in enumerate(row):
            words = f"{share:.3f}".removeprefix("0") if np.isfinite(share) else "–"
            colour = "white" if share > 0.85 else "#2b303b"
            weight = "bold" if j == best else "normal"
            axis.text(
                j, i, words, ha="center", va="center", fontsize=8.5, color=colour, weight=weight
            )
        if best >= 0:
            frame = {"fill": False, "edgecolor": "#D55E00", "linewidth": 1.8}
            axis.add_patch(Rectangle((best - 0.48, i - 0.46), 0.96, 0.92, **frame))
    axis.set_xticks(range(len(norms)), norms)
    axis.set_yticks(range(len(rows)), [short(row) for row in rows])
    axis.set(xlabel="norm", ylabel="optimizer")
    axis.grid(False)


def map_alone(result: Result[Any]) -> Figure:
    """Draw the heat map alone: the picture that `mirrorhead bias` writes."""
    rows = result.settings.optimizers
    figure, axes = panels(1, height=1.2 + 0.27 * len(rows))
    heat_map(axes[0], shares_of(result), rows, result.settings.norms)
    return figure


def shares_of(result: Result[Any]) -> np.ndarray:
    """Return the medians at the end, of a network those of the largest margin that was found."""
    if "shares" in result.arrays:
        return at_end(result)
    margins = result["margins"][:, :, -1]
    return np.median(margins / margins.max(1, keepdims=True), 0)


def map_and_curves(result: Result[Any], named: Sequence[str] | None = None) -> Figure:
    """Draw the heat map, and the shares in the named norms (by default theory's) against steps."""
    from matplotlib.figure import Figure as NewFigure

    settings = result.settings
    rows, norms = settings.optimizers, settings.norms
    named = [predicted(name) for name in rows] if named is None else named
    figure = NewFigure(figsize=(8, 1.6 + 0.27 * len(rows) + 3.2), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=(0.27 * len(rows) + 0.8, 3))
    heat_map(axes[0], at_end(result), rows, norms)
    axes[0].set_title("Share of the largest margin in each norm, median of the trials")
    for k, (name, norm) in enumerate(zip(rows, named, strict=True)):
        best = norm if norm in norms else norms[int(np.nan_to_num(at_end(result)[k]).argmax())]
        curve = np.nanmedian(result["shares"][:, k, :, norms.index(best)], 0)
        style = ("-", "--", ":", "-.")[k // 7 % 4]
        axes[1].plot(settings.records, curve, style, label=f"{short(name)}, {best}")
    axes[1].set(xscale="log", xlabel="step", ylabel="share", ylim=(0, 1.02))
    legend_below(figure, axes[1], columns=4)
    return figure


def short(name: str) -> str:
    """Return the name of an optimizer as figures have it: the function, without its module."""
    return name.rpartition(":")[2]
