"""The same heat map on separable linear data of four classes, where the theorems are proved."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mirrorhead_lab.experiments.bias_attention import ALL, SOME, judge_diagonal
from mirrorhead_lab.experiments.bias_problems import linear
from mirrorhead_lab.experiments.bias_runs import BiasSettings, map_and_curves, run_all
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure
from mirrorhead_lab.verdicts import Verdict


def run(settings: BiasSettings) -> dict[str, Tensor]:
    """As `run_all`, on linear data of four classes."""
    return run_all(settings, linear)


def verdict(result: Result[BiasSettings]) -> Verdict:
    """The rule of `bias-attention`: the named norm is the best in nine of ten trials."""
    return judge_diagonal(result)


def draw(result: Result[Any]) -> Figure:
    """The heat map, and the share of each optimizer's own norm against steps."""
    return map_and_curves(result)


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="Linear data: which margin each optimizer maximises",
    claim="On separable data of several classes, each optimizer comes nearest to the max-margin "
    "direction of the norm that theory names (arXiv 2502.04664: steepest descent, Muon, Adam).",
    equation=r"\frac{\min_{i,k} (e_{y_i} - e_k)^\top W x_i}{\lVert W \rVert} \Big/ "
    r"\frac{1}{\lVert W_{\mathrm{mm}} \rVert} \to 1",
    quick=BiasSettings(trials=20, optimizers=SOME, steps=500),
    full=BiasSettings(trials=100, optimizers=ALL, steps=10_000),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("shares", "rates"),
    extent=("steps",),
    chunk=50,
)
