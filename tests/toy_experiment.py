"""An experiment for tests of the machinery: quick, seeded, and able to fail as the tests wish.

The settings say what goes wrong; nothing else does, so that the computed numbers are those of
an undisturbed run.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mirrorhead.experiments.base import Result, TrialSettings, Verdict, experiment, judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "toy"
TITLE = "A toy <experiment> & its title"
CLAIM = "Means of 64 normal numbers are within 1 of 0 <b>always</b>."
PIECE = 4
MAY_BE_NAN = ("gaps",)


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """nap: seconds a piece takes; fail, die: seeds at which it raises, or the process ends;
    log: a folder in which each piece that starts leaves a file."""

    scale: float = 1.0
    nap: float = 0.0
    fail: tuple[int, ...] = ()
    die: tuple[int, ...] = ()
    log: str = ""


QUICK = Settings(trials=10)
FULL = Settings(trials=40, scale=2.0)


@experiment(NAME)
def run(settings: Settings) -> dict[str, Tensor]:
    if settings.log:
        marker = f"{settings.first}-{os.getpid()}-{time.monotonic_ns()}"
        Path(settings.log, marker).write_text("")
    time.sleep(settings.nap)
    for seed in settings.seeds:
        if seed in settings.fail:
            raise ArithmeticError(f"seed {seed} is a bad one")
        if seed in settings.die:
            os._exit(7)
    draws = [torch.randn(64, generator=torch.Generator().manual_seed(s)) for s in settings.seeds]
    x = settings.scale * torch.stack(draws).double()  # (trials, 64)
    even = torch.tensor(list(settings.seeds)) % 2 == 0
    return {"mean": x.mean(-1), "x": x, "gaps": x[:, :2].where(even[:, None], torch.nan)}


def draw(result: Result[Settings]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    axis.hist(result["mean"], label="means")
    axis.set(xlabel="mean", ylabel="trials")
    axis.legend()
    return figure


def verdict(result: Result[Settings]) -> Verdict:
    largest = float(abs(result["mean"]).max())
    return judge(CLAIM, f"largest mean {largest:.3f} < 1", largest < 1)
