"""Which margin does each optimizer maximise in one-layer attention? The heat map of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from mirrorhead_lab.experiments.bias_optimizers import KNOWN, predicted
from mirrorhead_lab.experiments.bias_problems import attention
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

#: Row descent has a norm of its own, and ASGD is SGD.
ALL = tuple(name for name in KNOWN if name not in ("row descent", "ASGD"))
#: Those of the demonstration.
SOME = (
    *("SGD", "SGD, momentum", "Adam", "RMSprop", "Adagrad", "Muon", "coordinate descent"),
    *("sign descent", "spectral descent", "MirrorDescent 1.5"),
    "MirrorDescent 3",
)


def run(settings: BiasSettings) -> dict[str, Tensor]:
    """As `run_all`, on one-layer attention from W = 0."""
    return run_all(settings, attention)


def verdict(result: Result[BiasSettings]) -> Verdict:
    """Of the optimizers for which theory names a norm: the claim holds if that norm has the largest
    share of all norms in nine of ten trials, for every one of them; it does not hold if for some
    optimizer another norm has it in nine of ten. Otherwise it is not decided."""
    return judge_diagonal(result)


def judge_diagonal(result: Result[BiasSettings]) -> Verdict:
    """Judge whether each optimizer comes nearest to the norm that theory names for it."""
    settings, counts, shares = result.settings, best_counts(result), at_end(result)
    words, own, other, exceptions = [], [], [], []
    for k, name in enumerate(settings.optimizers):
        norm = predicted(name)
        if norm not in settings.norms:
            continue
        j = settings.norms.index(norm)
        own.append(counts[k, j])
        other.append(np.delete(counts[k], j).max())
        words.append(f"{name} {shares[k, j]:.3f} of {norm}")
        if own[-1] < 0.9:
            exceptions.append(f"{name} comes nearest to {norm} in {own[-1]:.0%} of the trials only")
    measured = f"median share of the named norm's largest margin after {settings.steps:,} steps: "
    measured += "; ".join(words)
    if not own:
        return judge("no optimizer here has a norm that theory names", None, "Nothing to judge.")
    as_claimed: bool | None = True if min(own) >= 0.9 else False if max(other) >= 0.9 else None
    remark = "; ".join(exceptions) + "." if exceptions else ""
    return judge(measured, as_claimed, remark)


def draw(result: Result[Any]) -> Figure:
    """The heat map, and the share of each optimizer's own norm against steps."""
    return map_and_curves(result)


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="Attention: which margin each optimizer maximises",
    claim="An optimizer that theory ties to a norm on linear data (Adam: the maximum norm, Muon: "
    "the spectral norm, mirror descent: the norm of its potential) comes nearer to that norm's "
    "max-margin direction than to any other's, in one-layer attention too.",
    equation=r"\frac{\min_{i,t} (x_{i\alpha_i} - x_{it})^\top W z_i}{\lVert W \rVert} \Big/ "
    r"\frac{1}{\lVert W_{\mathrm{mm}} \rVert} \to 1",
    quick=BiasSettings(trials=20, optimizers=SOME, steps=1000),
    full=BiasSettings(trials=100, optimizers=ALL, steps=10_000),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("shares", "rates"),
    extent=("steps",),
    chunk=50,
)
