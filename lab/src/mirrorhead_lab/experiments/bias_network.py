"""A two-layer network: does the margin of an optimizer's norm grow once the data are fitted?

The margin in a norm is min y f(x) / ||weights||^2, since f is homogeneous of degree 2. No solver
certifies the largest one; the heat map has shares of the largest margin that any optimizer here
found in the same trial.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead import OptimizerPath, PNorm, Schatten
from mirrorhead_lab.experiments.bias_problems import TwoLayers, network
from mirrorhead_lab.experiments.bias_runs import BiasSettings, best_run, heat_map, short
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure
from mirrorhead_lab.verdicts import Verdict, judge

INF = float("inf")
#: The norm of each layer, and of the numbers of both layers.
NORMS = {
    "l1": (PNorm(1), PNorm(1)),
    "l2": (PNorm(2), PNorm(2)),
    "linf": (PNorm(INF), PNorm(INF)),
    "largest l1": (PNorm(1), PNorm(INF)),
    "largest spectral": (Schatten(INF), PNorm(INF)),
}
#: Steepest descent in a norm, layer by layer, is so in the largest of the layers' norms.
OWN = {
    "SGD": "l2",
    "sign descent": "linf",
    "coordinate descent": "largest l1",
    "spectral descent": "largest spectral",
}


def run(settings: BiasSettings) -> dict[str, Tensor]:
    """margins: of the norms, divided by the squared norm, (trials, optimizers, records, norms)."""
    found = []
    for name in settings.optimizers:
        _, path = best_run(settings, network, name)
        found.append(margins_of(path, settings.norms).transpose(0, 1))
    return {"margins": torch.stack(found, 1)}


def margins_of(path: OptimizerPath, norms: tuple[str, ...]) -> Tensor:
    """Return min y f / ||weights||^2 in each norm, (records, trials, norms)."""
    problem: Any = path.problem
    assert isinstance(problem, TwoLayers)
    least = problem.margins(path.weights).amin(-1)
    layers = path.weights["first"], path.weights["second"]
    sizes = []
    for each, both in (NORMS[name] for name in norms):
        sizes.append(both.norm(torch.stack([each.norm(w, (-2, -1)) for w in layers], -1), -1))
    return least.unsqueeze(-1) / torch.stack(sizes, -1) ** 2


def verdict(result: Result[BiasSettings]) -> Verdict:
    """From the first record with a positive margin to the last: the claim holds if the margin of
    the optimizer's own norm is larger at the end in 95 % of the trials, for each optimizer. A
    fall by more than 1 % of its highest value so far is counted in the remark."""
    settings, words, rises, falls = result.settings, [], [], []
    for k, name in enumerate(settings.optimizers):
        if name not in OWN:
            continue
        curve = result["margins"][:, k, :, settings.norms.index(OWN[name])]  # (trials, records)
        fitted = curve > 0
        first = fitted.argmax(1)
        done = fitted[:, -1]
        start = np.take_along_axis(curve, first[:, None], 1)[:, 0]
        rises.append(float((curve[:, -1] > start)[done].mean()) if done.any() else 0.0)
        highest = np.maximum.accumulate(np.where(fitted, curve, 0.0), 1)
        fell = ((curve < 0.99 * highest) & (np.arange(curve.shape[1]) > first[:, None])).any(1)
        falls.append(f"{name} {fell.mean():.0%}")
        gain = f", {np.median((curve[:, -1] / start)[done]):.2f} times" if done.any() else ""
        words.append(f"{name} ({OWN[name]}) grows in {rises[-1]:.0%}{gain}")
    if not rises:
        return judge("no optimizer here is steepest descent in a norm", None, "Nothing to judge.")
    measured = f"margin after {settings.steps:,} steps against the first fit: {'; '.join(words)}"
    remark = f"It falls by more than 1 % somewhere on the way in: {', '.join(falls)}. "
    remark += "The steps are not small: rates are chosen by the training loss."
    return judge(measured, min(rises) >= 0.95, remark)


def draw(result: Result[Any]) -> Figure:
    """Shares of the largest margin found, and the own norm's margin against steps."""
    from matplotlib.figure import Figure as NewFigure

    settings, margins = result.settings, result["margins"]
    rows = settings.optimizers
    figure = NewFigure(figsize=(8, 2.0 + 0.27 * len(rows) + 3.0), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=(0.27 * len(rows) + 1.2, 3))
    shares = margins[:, :, -1] / margins[:, :, -1].max(1, keepdims=True)
    heat_map(axes[0], np.median(shares, 0), rows, settings.norms)
    axes[0].set_title("Share of the largest margin found in each norm, median (no certificate)")
    for k, name in enumerate(rows):
        best = settings.norms[int(np.median(shares[:, k], 0).argmax())]
        norm = OWN.get(name, best)
        curve = np.median(margins[:, k, :, settings.norms.index(norm)], 0)
        axes[1].plot(settings.records, curve / abs(curve[-1]), label=f"{short(name)}, {norm}")
    axes[1].set(xscale="log", xlabel="step", ylabel="margin, relative to the end", ylim=(-0.5, 1.2))
    axes[1].legend()
    return figure


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="Two layers: margins grow once the data are fitted",
    claim="On a homogeneous network, steepest descent in a norm increases the margin of that norm "
    "from the moment when the training data are fitted (arXiv 2410.22069).",
    equation=r"\gamma(k) = \min_i \frac{y_i f(x_i; \theta_k)}{\lVert \theta_k \rVert^2}"
    r"\text{ grows}",
    quick=BiasSettings(trials=20, optimizers=tuple(OWN), norms=tuple(NORMS), steps=500),
    full=BiasSettings(
        trials=100, optimizers=(*OWN, "Adam", "Signum", "Muon"), norms=tuple(NORMS), steps=10_000
    ),
    run=run,
    draw=draw,
    verdict=verdict,
    extent=("steps",),
    chunk=50,
)
