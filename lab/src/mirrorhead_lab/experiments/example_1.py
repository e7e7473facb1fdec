"""Example 1 (Figures 2 and 3): two samples in the plane, and the solution that the paper prints.

Two samples with y_1 = 1, y_2 = -1 and z_i = x_i1, the first token selected. The matrices of the
example are not legible in every copy; they can be read with or without a token at the origin:

    with:     X_1 = (5, 0), (0, 0), (0, 1)     X_2 = -X_1
    without:  X_1 = (5, 0), (0, 1)             X_2 = -X_1

Figure 2 shows how W separates the selected tokens, Figure 3 how the margin of the labels, that
of the lp-SVM, depends on the tokens. The example names no head; here v is the lp-SVM of the
selected tokens, (1/5, 0), under which they have the highest scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mirrorhead import AttentionProblem, attention_svm, descend, svm
from mirrorhead.paths.descent import direction_divergence, recorded_steps
from mirrorhead.synthetic import example_1
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, legend_below, panels
from mirrorhead_lab.verdicts import Verdict, judge

PRINTED = ((0.03846, 0.0), (-0.00769, 0.0))
TOKENS = ((5.0, 0.0), (0.0, 0.0), (0.0, 1.0))
READINGS = {"with the token (0, 0)": (True, True, True), "without it": (True, False, True)}
CHOICES = ((0, 0), (0, 2), (2, 0), (2, 2), (0, 1))  # of the tokens of the two samples


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents to solve for, 3 among them; tol: the certified gap; steps: of the descent at
    p = 3; lr."""

    p: tuple[float, ...] = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
    tol: float = 1e-12
    steps: int = 20_000
    lr: float = 0.1


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """W: (1, readings, exponents, 2, 2), the certified solutions; path: W(k) of normalised
    descent from 0 at p = 3, (1, readings, records, 2, 2), and divergence, (1, readings,
    records); margin: 1/||v||_3 for each choice of tokens, 0 where they do not separate the
    labels, (1, choices)."""
    # The readings are two trials; a mask takes the token (0, 0) away in the second.
    mask = torch.tensor(list(READINGS.values())).unsqueeze(1).expand(2, 2, 3)
    one = example_1()
    X, z, y, v = (torch.stack([x, x]) for x in (one.X, one.z, one.y, one.v))
    problem = AttentionProblem(X, z, y, v, mask=mask)
    data = (problem.X, problem.z, torch.zeros(2, 2, dtype=torch.long))
    solutions = [attention_svm(*data, p, settings.tol, mask=problem.mask) for p in settings.p]
    for solution in solutions:
        if not solution.check(*data, mask=problem.mask):
            raise ArithmeticError(f"the solution for p = {solution.p:g} does not check: {solution}")
    W = torch.stack([solution.W for solution in solutions], 1)
    path = descend(problem, 3, settings.steps, settings.lr, progress=False)
    divergence = direction_divergence(3, W[:, settings.p.index(3.0)], path.W, 2)
    features = torch.stack([problem.X[0, (0, 1), choice] for choice in CHOICES])
    norms = svm(features, problem.y[0].expand(len(CHOICES), 2), 3, settings.tol).norm
    arrays = {"W": W, "path": path.W.transpose(0, 1), "divergence": divergence.T}
    return {name: x.unsqueeze(0) for name, x in {**arrays, "margin": 1 / norms}.items()}


def verdict(result: Result[Settings]) -> Verdict:
    """The printed matrix against the solutions for p = 3, and for which p it is right."""
    W, divergence, margin = (result[name][0] for name in ("W", "divergence", "margin"))
    exponents = result.settings.p
    at = exponents.index(3.0)
    near = np.abs(W - PRINTED).max((-2, -1)) < 1e-5  # (readings, exponents)
    names = [f"p = {p:g} {reading}" for reading in READINGS for p in exponents]
    fits = [name for name, fit in zip(names, near.flat, strict=True) if fit]
    shown = W[:, at, :, 0].round(5) + 0.0  # no -0
    solutions = "; ".join(
        f"{reading} ({shown[k, 0]:.5f}, 0; {shown[k, 1]:.5f}, 0), which descent approaches "
        f"to D = {divergence[k, -1]:.1e}"
        for k, reading in enumerate(READINGS)
    )
    return judge(
        f"p = 3: {solutions}. Margin of the labels: {margin[0]:.3g} for X11, X21, at most "
        f"{margin[1:].max():.3g} for other tokens",
        bool(near[:, at].any() and margin[0] > margin[1:].max()),
        f"The printed matrix is the solution for {' and '.join(fits) or 'no p tried'}.",
    )


def draw(result: Result[Settings]) -> Figure:
    """Figure 2, the solutions against p, the descent to them, and Figure 3."""
    exponents, tokens, W = result.settings.p, np.array(TOKENS), result["W"][0]
    x = sorted(recorded_steps(result.settings.steps))
    figure, axes = panels(2, rows=2, height=6)
    (plane, solutions), (descent, margins) = axes
    plane.plot(*tokens.T, "o", color="k", label="X1")
    plane.plot(*-tokens.T, "s", color="k", fillstyle="none", label="X2")
    for k, reading in enumerate(READINGS):
        own = W[k, exponents.index(3.0)]
        normal = own @ tokens[0]  # W z_1, and W z_2 = -W z_1
        middle = normal * (normal @ tokens[0] - 0.5) / (normal @ normal)
        along = np.array([-normal[1], normal[0]]) / np.linalg.norm(normal)
        # The lines half-way between the selected tokens and the others.
        line = np.stack([middle - 3 * along, middle + 3 * along])
        for sign, label in ((1, reading), (-1, "_")):
            plane.plot(*(sign * line.T), "--", color=f"C{k}", label=label)
        size = (9, 5)[k]  # with the token all solutions are the same point
        solutions.plot(*W[k, :, :, 0].T, "o-", color=f"C{k}", markersize=size)
        path = result["path"][0, k]
        descent.plot(x, path[:, 1, 0] / path[:, 0, 0], color=f"C{k}")
        descent.axhline(own[1, 0] / own[0, 0], color="k", linestyle=":")
    for p, point in zip(exponents, W[1, :, :, 0], strict=True):
        solutions.annotate(f"{p:g}", point, (6, -4), textcoords="offset points", fontsize="small")
    solutions.plot(*np.array(PRINTED)[:, 0], "kx", markersize=10, label="printed for p = 3")
    choices = [f"X1{a + 1}, X2{b + 1}" for a, b in CHOICES]
    bars = margins.barh(choices, result["margin"][0], color="C2", height=0.6)
    margins.bar_label(bars, fmt="%.3g", padding=3)
    margins.invert_yaxis()
    margins.grid(visible=False)
    for axis in (solutions, margins):
        axis.margins(x=0.12)
    plane.set(xlabel="first coordinate", ylabel="second coordinate", ylim=(-3.2, 3.2))
    plane.set_title("Figure 2: lines that cut off X11, X21")
    solutions.set(xlabel="W11", ylabel="W21", title="Solutions for the exponents p")
    descent.set(xscale="log", xlabel="step", ylabel="W21 / W11")
    descent.set_title("Descent at p = 3 to its solutions (dots)")
    margins.set(xlabel="margin of the labels, p = 3", title="Figure 3: margin by selected tokens")
    legend_below(figure, plane, solutions, columns=5)
    return figure


EXPERIMENT = Experiment(
    group="The paper's figures",
    title="Example 1: the printed solution",
    claim="For the two samples of Example 1, the max-margin matrix in the 3-norm is the one that "
    "the paper prints, and the tokens $x_{11}$ and $x_{21}$ give the labels the largest margin.",
    equation=r"W_{\mathrm{mm}} = \mathrm{argmin}_W \lVert W \rVert_3 \;\text{ with }\; (x_{i1} - "
    r"x_{it})^\top W z_i \geq 1 \;=\; \begin{pmatrix} 0.03846 & 0 \\ -0.00769 & 0 \end{pmatrix}",
    quick=Settings(trials=1, steps=2000),
    full=Settings(trials=1),
    run=run,
    draw=draw,
    verdict=verdict,
    fixed_trials=True,
)
