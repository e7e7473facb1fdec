r"""Theorem 1: the regularization path tends to the max-margin solution of the best tokens.

    W(R) = argmin L(W) subject to ||W||_p <= R,     W(R) / R -> W_mm / ||W_mm||  as R grows,

with W_mm the lp-AttSVM solution of the tokens of highest score. The radii are multiples of
||W_mm||, trial by trial; the search knows nothing else of W_mm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mirrorhead import attention_svm, globally_optimal_tokens, regularization_path
from mirrorhead.paths.diagnostics import fitted_slope
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import joined
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import GREY, Figure, median_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed, of_each


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents; radii: in units of ||W_mm||; starts: of the search for each."""

    p: tuple[float, ...] = (1.5, 1.75, 2.0, 3.0, 4.0)
    radii: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0)
    starts: int = 8


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """All (trials, exponents, radii): divergence to the max-margin solution of the best tokens;
    right: whether attention prefers those tokens; optima: how many different ends the starts
    came to; spread: of their log(L - L*)."""
    problem = random_problem(settings.trials, first=settings.first)
    tokens = globally_optimal_tokens(problem)
    multiples = torch.tensor(settings.radii, dtype=torch.float64).unsqueeze(-1)
    rows = []
    for p in settings.p:
        solution = attention_svm(problem.X, problem.z, tokens, p, tol=1e-12)
        path = regularization_path(problem, p, multiples * solution.norm, settings.starts)
        row = {
            "divergence": path.divergence_to(solution),  # (radii, trials)
            "right": (path.tokens == tokens).all(-1),
            "optima": path.optima,
            "spread": path.spread,
        }
        rows.append({name: value.T for name, value in row.items()})
    return joined(settings.p, rows)


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if the last radii have the right tokens and a divergence that falls like a power."""
    settings = result.settings
    divergence = torch.tensor(result["divergence"]).movedim(-1, 0)  # (radii, trials, exponents)
    radii = torch.tensor(settings.radii, dtype=torch.float64).reshape(-1, 1, 1)
    slope = np.median(fitted_slope(radii.expand_as(divergence), divergence), 0)
    right = result["right"][..., -1].sum(0)
    words = [listed(row, ".1e") for row in np.median(result["divergence"], 0)]
    holds = (right >= 0.95 * settings.trials) & (slope < -1)
    optima, spread = result["optima"][..., -1], np.median(result["spread"][..., -1])
    return judge(
        f"median D at R / ||W_mm|| = {listed(settings.radii, 'g')}: {of_each(settings.p, words)}. "
        f"Slopes over the last decade {listed(slope, '.2f')}; the best tokens at the last radius "
        f"in {listed(right, 'd')} of {settings.trials} trials",
        bool(holds.all()),
        f"There are many local minima: {settings.starts} starts end at {optima.mean():.1f} "
        f"different ones on average at the largest radius, the best and the worst {spread:.0f} "
        f"apart in log(L - L*) (median); the best is taken."
        if optima.max() > 1 else "",
    )  # fmt: skip


def draw(result: Result[Settings]) -> Figure:
    """The divergence against the radius; at how many different minima the starts end."""
    settings = result.settings
    figure, (left, right) = panels(2)
    for k, p in enumerate(settings.p):
        line = {"label": f"p = {p:g}", "marker": "o", "markersize": 4}
        median_band(left, settings.radii, result["divergence"][:, k], **line)
        right.plot(settings.radii, result["optima"][:, k].mean(0), **line)
    radii = np.array(settings.radii[-2:])
    end = np.median(result["divergence"][..., -1])
    left.plot(radii, 3 * end * (radii / radii[-1]) ** -2, "--", color=GREY, label="slope -2")
    label = r"radius $R / ||W_\mathrm{mm}||$"
    left.set(xscale="log", yscale="log", xlabel=label, ylabel="divergence D")
    left.legend(fontsize="small")
    right.set(xscale="log", xlabel=label, ylabel=f"minima that {settings.starts} starts find")
    right.set_ylim(bottom=0)
    return figure


EXPERIMENT = Experiment(
    group="The theory",
    title="Theorem 1: the regularization path",
    claim="The weights of norm $R$ that have the smallest loss turn, as $R$ grows, to the max- "
    "margin direction of the tokens with the highest scores.",
    equation=r"W(R) = \mathrm{argmin}_{\lVert W \rVert_p \leq R} L(W), \qquad \frac{W(R)}{R} \to "
    r"\frac{W_{\mathrm{mm}}}{\lVert W_{\mathrm{mm}} \rVert_p} \text{ as } R \to \infty",
    quick=Settings(trials=10, p=(1.75, 2.0, 3.0), starts=4),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    extent=("radii", "starts"),
)
