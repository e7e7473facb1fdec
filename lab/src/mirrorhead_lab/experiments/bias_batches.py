"""Full batches against one sample at a time, on separable data of two classes.

Gradients keep their true scale ("scaled"): a single sample's gradient is as small as its own loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead_lab.experiments.bias_optimizers import norms_named
from mirrorhead_lab.experiments.bias_problems import binary
from mirrorhead_lab.experiments.bias_runs import (
    BiasSettings,
    best_run,
    heat_map,
    tendency,
)
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, panels
from mirrorhead_lab.verdicts import Verdict, judge


@dataclass(frozen=True, kw_only=True)
class Settings(BiasSettings):
    """batches: samples for each step; 12 are all."""

    batches: tuple[int, ...] = (12, 3, 1)
    norms: tuple[str, ...] = ("l1", "l1.5", "l2", "l3", "linf")
    optimizers: tuple[str, ...] = ("Adam", "RMSprop", "Signum", "Adagrad")
    gradient: str = "scaled"

    @property
    def rows(self) -> list[tuple[str, int]]:
        """The optimizers with their batches, as the arrays have them."""
        return [(name, batch) for name in self.optimizers for batch in self.batches]


def run(settings: Settings) -> dict[str, Tensor]:
    """shares: (trials, rows, records, norms)."""
    shares = []
    for name, batch in settings.rows:
        _, path = best_run(settings, binary, name, batch)
        profile = path.profile(norms_named(settings.norms), records=True)
        shares.append(profile.shares.transpose(0, 1))
    return {"shares": torch.stack(shares, 1)}


def verdict(result: Result[Settings]) -> Verdict:
    """The claim holds if in full batches linf is the best norm of Adam, RMSprop and Signum in nine
    of ten trials, with one sample at a time it is so for Signum, and it is not for Adam (in at most
    one of ten). It does not hold if one of these is the other way in nine of ten trials; else it is
    not decided. Adagrad is only measured."""
    settings = result.settings
    shares = np.nan_to_num(result["shares"][:, :, -1], nan=-np.inf)
    linf = settings.norms.index("linf")
    best = shares.argmax(-1)
    rate = {row: float((best[:, k] == linf).mean()) for k, row in enumerate(settings.rows)}
    words = []
    for k, (name, batch) in enumerate(settings.rows):
        norm = settings.norms[int(np.bincount(best[:, k], minlength=len(settings.norms)).argmax())]
        j = settings.norms.index(norm)
        curve = np.nanmedian(result["shares"][:, k, :, j], 0)
        words.append(
            f"{name}, batch {batch}: {norm} {curve[-1]:.3f} ({tendency(curve, settings.records)}),"
            f" linf is best in {rate[name, batch]:.0%}"
        )
    all_of, single = max(settings.batches), min(settings.batches)
    wanted = [rate[name, all_of] for name in ("Adam", "RMSprop", "Signum")]
    wanted += [rate["Signum", single], 1 - rate["Adam", single]]
    claimed = True if min(wanted) >= 0.9 else False if min(wanted) <= 0.1 else None
    remark = "" if claimed is not None else "Some optimizer is at linf in part of the trials only."
    measured = f"best norm and its median share after {settings.steps:,} steps: {'; '.join(words)}"
    return judge(measured, claimed, remark)


def draw(result: Result[Any]) -> Figure:
    """The heat map."""
    settings = result.settings
    figure, axes = panels(1, height=1.4 + 0.27 * len(settings.rows))
    names = [f"{name}, batch {batch}" for name, batch in settings.rows]
    heat_map(axes[0], np.nanmedian(result["shares"][:, :, -1], 0), names, settings.norms)
    return figure


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="Batches: one sample at a time changes Adam's margin",
    claim="In full batches Adam, RMSprop and Signum come nearest to the linf margin. With one "
    "sample at a time Adam does not (arXiv 2510.26303), and Signum still does.",
    equation=r"g_k = \nabla \ell_{i_k}(W_k) \quad \text{instead of} \quad "
    r"\frac1n \sum_i \nabla \ell_i(W_k)",
    quick=Settings(trials=20, steps=1000, batches=(12, 1)),
    full=Settings(trials=100, steps=20_000),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("shares",),
    extent=("steps",),
    chunk=50,
)
