"""Every experiment at a size that takes moments, and its verdicts on changed results."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from mirrorhead.lab.experiments import (
    acceleration,
    cones,
    example_1,
    example_2,
    figure_4,
    figure_5,
    initialization,
    load,
    normalization,
    theorem_1,
    theorem_2,
    theorem_4,
    theorem_5,
    three_classes,
    two_heads,
)
from mirrorhead.lab.experiments.base import Experiment, Result

SHORT = (60, 60, 60)
TINY: dict[str, Any] = {
    "example-1": replace(example_1.QUICK, steps=50),
    "example-2": replace(example_2.QUICK, steps=SHORT),
    "figure-4": replace(figure_4.QUICK, trials=3, steps=SHORT, patience=2),
    "figure-5": replace(figure_5.QUICK, trials=3, steps=SHORT),
    "initialization": replace(
        initialization.QUICK,
        trials=3,
        steps=(40, 40, 40),
        patience=2,
        starts=(("normal", 0.0), ("normal", 1.0), ("rank-one", 0.1)),
    ),
    "normalization": replace(normalization.QUICK, trials=3, normalized=SHORT, constant=200),
    "theorem-1": replace(theorem_1.QUICK, trials=3, p=(2.0,), radii=(1.0, 3.0, 10.0), starts=2),
    "theorem-2": replace(theorem_2.QUICK, trials=3, steps=60, normalized_steps=60),
    "theorem-4": replace(
        theorem_4.QUICK, trials=3, p=(1.5, 2.0, 3.0), steps=SHORT, lr=(1.0, 3.0, 100.0)
    ),
    "theorem-5": replace(theorem_5.QUICK, p=(2.0,), radii=(1.0, 30.0), starts=2, steps=(300,)),
    "cones": replace(cones.QUICK, trials=3, p=(1.75, 3.0), steps=(100, 100)),
    "acceleration": replace(
        acceleration.QUICK, trials=3, p=(2.0, 5.0), steps=(60, 60), lr=(0.1, 1.0)
    ),
    "two-heads": replace(two_heads.QUICK, trials=3, steps=SHORT),
    "three-classes": replace(three_classes.QUICK, trials=3, steps=SHORT),
}


@cache
def tiny(name: str) -> tuple[Experiment, Result[Any]]:
    experiment = load(name)
    return experiment, experiment.compute(TINY[name])


def doctored(name: str, **arrays: Any) -> str:
    """The word of the verdict on a tiny result in which some arrays are replaced."""
    experiment, result = tiny(name)
    changed = {
        key.replace("_", " ") if key not in result.arrays else key: np.asarray(value)
        for key, value in arrays.items()
    }
    assert changed.keys() <= result.arrays.keys()
    return experiment.verdict(replace(result, arrays={**result.arrays, **changed})).holds
