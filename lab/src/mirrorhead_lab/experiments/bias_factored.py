"""Attention with W = K Q' under several optimizers: the norm of W = K Q' that fits best.

Gradient descent is known to go to the nuclear norm. The limit of the others is an open question;
norms between, Schatten-p and lp, are candidates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mirrorhead_lab.experiments.bias_problems import factored
from mirrorhead_lab.experiments.bias_runs import (
    BiasSettings,
    at_end,
    best_counts,
    map_and_curves,
    run_all,
)
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure
from mirrorhead_lab.verdicts import Verdict, judge

OPTIMIZERS = (
    "SGD",
    "SGD, momentum",
    "Adam",
    "Signum",
    "Muon",
    "MirrorDescent 1.5",
    "MirrorDescent 3",
)
NORMS = ("l1", "l1.5", "l2", "l3", "linf", "nuclear", "Schatten 1.5", "Schatten 3", "spectral")


def run(settings: BiasSettings) -> dict[str, Tensor]:
    """As `run_all`, for the factors K and Q from normal starts of scale .1."""
    return run_all(settings, factored)


def verdict(result: Result[BiasSettings]) -> Verdict:
    """The claim is about "SGD" alone, gradient descent: it holds if the nuclear norm is the best of
    all norms in nine of ten trials, and not if another one is. The remark names the best norm of
    each of the others, where one is best in nine of ten trials and its median share at least .9."""
    settings, counts, shares = result.settings, best_counts(result), at_end(result)
    words, claimed = [], None
    for k, name in enumerate(settings.optimizers):
        j = int(counts[k].argmax())
        fits = counts[k, j] >= 0.9 and shares[k, j] >= 0.9
        sure = "" if fits else " (no norm fits)"
        words.append(
            f"{name} {settings.norms[j]} {shares[k, j]:.3f}, best in {counts[k, j]:.0%}{sure}"
        )
        if name == "SGD":
            nuclear = settings.norms.index("nuclear")
            claimed = True if counts[k, nuclear] >= 0.9 else False if counts[k, j] >= 0.9 else None
    measured = f"best norm after {settings.steps:,} steps, median share: {'; '.join(words)}"
    remark = "Theory names a norm for gradient descent alone; the others are an open question."
    return judge(measured, claimed, remark)


def draw(result: Result[Any]) -> Figure:
    """The heat map, and the share of the best norm against steps."""
    return map_and_curves(result, [""] * len(result.settings.optimizers))


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="W = K Q': which margin each optimizer maximises",
    claim="Gradient descent on the factors of W = K Q' comes nearest to the nuclear norm's "
    "max-margin direction of all norms.",
    equation=r"W = K Q^\top: \quad \frac{m(W)}{\lVert W \rVert_*} \Big/ "
    r"\frac{1}{\lVert W_{\mathrm{mm}} \rVert_*} \to 1",
    quick=BiasSettings(trials=20, optimizers=OPTIMIZERS, norms=NORMS, steps=500),
    full=BiasSettings(trials=100, optimizers=OPTIMIZERS, norms=NORMS, steps=10_000),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("shares", "rates"),
    extent=("steps",),
    chunk=50,
)
