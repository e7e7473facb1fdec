"""Example 1 (Figures 2 and 3): which problem has the solution that the paper prints?

Two samples with z_i = x_i1, the first token selected. The matrices of the example are not
legible in every copy; they can be read with or without a token at the origin:

    with:     X_1 = (5, 0), (0, 0), (0, 1)     X_2 = -X_1
    without:  X_1 = (5, 0), (0, 1)             X_2 = -X_1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mirrorhead.experiments.base import Result, TrialSettings, Verdict, experiment, judge
from mirrorhead.margin import attention_svm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "example-1"
TITLE = "Example 1: the printed solution"
CLAIM = "The l3 max-margin matrix of Example 1 is (0.03846, 0; -0.00769, 0)."
FIXED_TRIALS = True

PRINTED = ((0.03846, 0.0), (-0.00769, 0.0))
READINGS = {
    "with the token (0, 0)": ((5.0, 0.0), (0.0, 0.0), (0.0, 1.0)),
    "without it": ((5.0, 0.0), (0.0, 1.0)),
}


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents to solve for, 3 among them; tol: the certified gap."""

    p: tuple[float, ...] = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
    tol: float = 1e-12


QUICK = Settings(trials=1)
FULL = QUICK


@experiment(NAME)
def run(settings: Settings) -> dict[str, Tensor]:
    """W: (1, readings, exponents, 2, 2), the certified solutions."""
    W = [[_solve(tokens, p, settings.tol) for p in settings.p] for tokens in READINGS.values()]
    return {"W": torch.stack([torch.stack(row) for row in W]).unsqueeze(0)}


def verdict(result: Result[Settings]) -> Verdict:
    """The printed matrix against the solutions for p = 3, and for which p it is right."""
    W = torch.from_numpy(result["W"][0])  # (readings, exponents, 2, 2)
    distance = (W - torch.tensor(PRINTED, dtype=W.dtype)).abs().amax((-2, -1))
    exponents = result.settings.p
    at = exponents.index(3.0)
    near = distance < 1e-5
    fits = [
        f"p = {exponents[k]:g} {reading}"
        for row, reading in zip(near, READINGS, strict=True)
        for k in row.nonzero().flatten().tolist()
    ]
    solutions = "; ".join(
        f"{reading} ({W[k, at, 0, 0]:.5f}, 0; {W[k, at, 1, 0]:.5f}, 0)"
        for k, reading in enumerate(READINGS)
    )
    return judge(
        CLAIM,
        f"p = 3: {solutions}",
        bool(near[:, at].any()),
        f"The printed matrix is the solution for {' and '.join(fits) or 'no p tried'}.",
    )


def draw(result: Result[Settings]) -> Figure:
    """W11 and W21 against p, both readings, with the printed values."""
    from matplotlib.figure import Figure

    W, exponents = result["W"][0], result.settings.p
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    for column, (title, axis) in enumerate(zip(("W11", "W21"), _axes(figure), strict=True)):
        for row, reading in enumerate(READINGS):
            axis.plot(exponents, W[row, :, column, 0], marker="o", label=reading)
        axis.plot(3, PRINTED[column][0], "kx", markersize=9, label="printed, for p = 3")
        axis.set(xlabel="exponent p", ylabel=title, title=title)
    figure.axes[0].legend()
    return figure


def _axes(figure: Figure) -> Any:
    return figure.subplots(1, 2)


def _solve(tokens: tuple[tuple[float, float], ...], p: float, tol: float) -> Tensor:
    first = torch.tensor(tokens, dtype=torch.float64)
    X = torch.stack([first, -first])  # (2, T, 2)
    chosen = torch.zeros(2, dtype=torch.long)
    solution = attention_svm(X, X[:, 0], chosen, p, tol=tol)
    if not solution.check(X, X[:, 0], chosen):
        raise ArithmeticError(f"the solution for p = {p:g} does not check: {solution}")
    return solution.W
