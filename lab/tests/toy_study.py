"""A study of one's own, for tests of the engine: estimate the mean of a few draws.

A method shrinks the mean towards 0 by a share, which tuning chooses on validation draws.

    TOY_NAP   seconds that a run takes
    TOY_FAIL  a share whose runs raise
    TOY_LOG   a file that gets a line for each run: which data it read
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from msgspec import Struct

from mirrorhead_lab.studies.claims import Claim, Comparison, Measure
from mirrorhead_lab.studies.study import Method, Study, Trial


class Errors(Struct, frozen=True, omit_defaults=True):
    validation: float
    test: float | None = None


class Draws:
    """Draws of three sets; each reading is noted."""

    def __init__(self, task: str) -> None:
        self.at = 30.0 if task == "far" else 0.1

    def part(self, name: str, seed: int) -> np.ndarray:
        if "TOY_LOG" in os.environ:
            with Path(os.environ["TOY_LOG"]).open("a") as file:
                print(name, file=file)
        start = {"train": 0, "validation": 100, "test": 200}[name]
        return self.at + np.random.default_rng(start + seed).normal(size=20)


def run(trial: Trial, draws: Draws, folder: Path) -> Errors:
    time.sleep(float(os.environ.get("TOY_NAP", "0")))
    share = trial.setting["share"]
    if share == float(os.environ.get("TOY_FAIL", "nan")):
        raise ArithmeticError(f"a share of {share} is a bad one")
    found = (1 - share) * draws.part("train", trial.seed).mean()

    def error(name: str) -> float:
        return float(abs(found - draws.part(name, trial.seed).mean()))

    return Errors(error("validation"), error("test") if trial.final else None)


TEST = Measure("test error", lambda run: run.test, higher=False)
STUDY = Study(
    name="toy",
    title="Toy: does shrinking help?",
    methods={
        "mean": Method(({"share": 0.0},)),
        "shrunk": Method(({"share": 0.1}, {"share": 0.5}, {"share": 0.9})),
    },
    tasks=("near", "far"),
    seeds=(1, 2, 3),
    tuning_seed=0,
    measured=Errors,
    load=lambda task, folder: Draws(task),
    run=run,
    score=lambda measured: -measured.validation,
    about="Means of 20 draws.",
    claims=(
        Claim(
            "toy-far",
            "Shrinking is worse where the mean is far from 0",
            "Far from 0, the plain mean has a smaller test error than the shrunk one.",
            (Comparison(TEST, "mean on far", "shrunk on far"),),
        ),
    ),
)
