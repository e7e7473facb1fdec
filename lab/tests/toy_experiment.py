"""An experiment for tests of the machinery: quick, seeded, and able to fail as a test wishes.

What goes wrong is said in the environment and not in the settings, so that a disturbed run is
of the same settings as an undisturbed one:

    TOY_NAP   seconds that a piece takes
    TOY_FAIL  a seed whose piece raises
    TOY_DIE   a seed whose piece ends its process
    TOY_LOG   a folder in which each piece that starts leaves a file <first>-<process>-<time>
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.verdicts import Verdict, judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    scale: float = 1.0
    steps: tuple[int, ...] = (1, 10)


def run(settings: Settings) -> dict[str, Tensor]:
    if "TOY_LOG" in os.environ:
        marker = f"{settings.first}-{os.getpid()}-{time.monotonic_ns()}"
        Path(os.environ["TOY_LOG"], marker).touch()
    time.sleep(float(os.environ.get("TOY_NAP", "0")))
    if int(os.environ.get("TOY_FAIL", "-1")) in settings.seeds:
        raise ArithmeticError(f"seed {os.environ['TOY_FAIL']} is a bad one")
    if int(os.environ.get("TOY_DIE", "-1")) in settings.seeds:
        os._exit(7)
    draws = [torch.randn(64, generator=torch.Generator().manual_seed(s)) for s in settings.seeds]
    x = settings.scale * torch.stack(draws).double()  # (trials, 64)
    even = torch.tensor(list(settings.seeds)) % 2 == 0
    gaps = x[:, :2].where(even[:, None], torch.nan)
    return {"mean": x.mean(-1), "x": x, "even": even, "gaps": gaps}


def draw(result: Result[Settings]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    axis.plot(result["mean"], "o", label="one & <two>")
    axis.set(xlabel="trial", ylabel="mean")
    axis.legend()
    return figure


def verdict(result: Result[Settings]) -> Verdict:
    largest = float(abs(result["mean"]).max())
    return judge(f"largest mean {largest:.3f} < 1", largest < 1)


EXPERIMENT = Experiment(
    name="toy",
    title="A toy <experiment> & its title",
    claim="Means of 64 normal numbers are within 1 of 0 <b>always</b>.",
    quick=Settings(trials=10),
    full=Settings(trials=40, scale=2.0),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=4,
    may_be_nan=("gaps",),
)
