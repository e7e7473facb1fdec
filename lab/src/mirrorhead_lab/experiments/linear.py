r"""lp-GD on linear classifiers: attention with one token (references [50, 51] of the paper).

With T = 1 attention has nothing to select, W has no gradient, and lp-JointGD is lp-GD on the linear
classifier v: it should tend to the lp-SVM. The paper calls its rate for attention "similar to that
of GD in linear binary classification", which is compared here as well: the slope of log D against
the logarithm of the norm, for v with T = 1 and for W with T = 8, each with the normalised rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import PNorm, attention_svm, descend, svm
from mirrorhead.paths.diagnostics import fitted_slope
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import PathSettings, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, divergence_panels, legend_below, median_band
from mirrorhead_lab.verdicts import Verdict, judge, listed


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """n samples in d dimensions; steps and lr of each path; tol: the certified gap."""

    n: int = 12
    d: int = 20
    steps: tuple[int, ...] = (6000, 12_000, 12_000)
    lr: tuple[float, ...] = (0.1, 0.3, 10.0)
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p "linear p", D of v, and "attention p", D of W, (trials, records). margin: that of
    v at the end over the largest one; slopes: of log D against the log of the norm, linear and
    attention, (trials, exponents, 2)."""
    linear = random_problem(settings.trials, settings.n, 1, settings.d, settings.first)
    attention = random_problem(settings.trials, first=settings.first)
    rows = []
    for p, steps, lr in zip(settings.p, settings.steps, settings.lr, strict=True):
        path = descend(linear, p, steps, lr, joint=True, progress=False)
        best = svm(linear.X.squeeze(-2), linear.y, p, settings.tol)
        assert path.v is not None
        last = path.v[-1]
        margin = (linear.y * (linear.X.squeeze(-2) @ last.unsqueeze(-1)).squeeze(-1)).amin(-1)
        D = path.head_divergence_to(best)
        other = descend(attention, p, steps, lr, progress=False)
        solution = attention_svm(attention.X, attention.z, other.tokens, p, settings.tol)
        D_attention = other.divergence_to(solution)
        norms = PNorm(p).norm(path.v, -1), PNorm(p).norm(other.W, (-2, -1))
        slopes = fitted_slope(norms[0], D), fitted_slope(norms[1], D_attention)
        row = {"linear": D[1:].T, "attention": D_attention[1:].T, "slopes": torch.stack(slopes, -1)}
        rows.append(row | {"margin": margin / PNorm(p).norm(last, -1) * best.norm})
    return joined(settings.p, rows, "linear", "attention")


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if v has nearly the largest margin, and D falls as fast for W as for v."""
    settings, margin = result.settings, result["margin"]
    linear, attention = np.moveaxis(np.nanmedian(result["slopes"], 0), -1, 0)
    ends = [np.median(D[:, -1]) for D in result.each("linear")]
    near = bool((margin.min(0) > 0.98).all())
    return judge(
        f"p = {listed(settings.p, 'g')}: v has at least {listed(margin.min(0), '.4f')} of the "
        f"largest margin, D to the lp-SVM is {listed(ends, '.1e')} (median); the slope of log D "
        f"against the log of the norm is {listed(linear, '.2f')} for v and "
        f"{listed(attention, '.2f')} for the W of attention",
        near and bool((np.abs(linear - attention) < 0.5).all()),
    )


def draw(result: Result[Settings]) -> Figure:
    """The divergence of v, with one token, and of W, with eight, against the step."""
    settings = result.settings
    figure, axes = divergence_panels(settings.p, ylabel="divergence to the SVM")
    for axis, p, records in zip(axes, settings.p, settings.records, strict=True):
        for name, label in (("linear", "linear classifier v"), ("attention", "attention W")):
            median_band(axis, records[1:], result[f"{name} {p:g}"], label=label)
    legend_below(figure, axes[0], columns=2)
    return figure


EXPERIMENT = Experiment(
    group="The theory",
    title="The special case of one token: linear classifiers",
    claim="Mirror descent on a linear classifier tends to the max-margin classifier of its norm, "
    "and its direction converges as fast as that of attention does.",
    equation=r"\frac{v(k)}{\lVert v(k) \rVert_p} \to \frac{v_{\mathrm{mm}}}{\lVert v_{\mathrm{mm}} "
    r"\rVert_p}, \quad v_{\mathrm{mm}} = \mathrm{argmin}_v \lVert v \rVert_p \;\text{ with }\; y_i "
    r"x_i^\top v \geq 1",
    quick=Settings(trials=10, steps=(800, 1500, 1500)),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    extent=("steps",),
)
