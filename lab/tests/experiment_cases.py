"""Every experiment at a size that takes moments, and its verdicts on changed results."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from mirrorhead_lab.experiments import load
from mirrorhead_lab.experiments.experiment import Experiment, Result


def quick(name: str, **changes: Any) -> Any:
    return replace(load(name).quick, **changes)


SHORT = (60, 60, 60)
TINY: dict[str, Any] = {
    "example-1": quick("example-1", steps=50),
    "example-2": quick("example-2", steps=SHORT),
    "figure-4": quick("figure-4", trials=3, steps=SHORT, patience=2),
    "figure-5": quick("figure-5", trials=3, steps=SHORT),
    "initialization": quick(
        "initialization",
        trials=3,
        steps=(40, 40, 40),
        patience=2,
        starts=(("normal", 0.0), ("normal", 1.0), ("rank-one", 0.1)),
    ),
    "normalization": quick("normalization", trials=3, normalized=SHORT, constant=200),
    "theorem-1": quick("theorem-1", trials=3, p=(2.0,), radii=(1.0, 3.0, 10.0), starts=2),
    "theorem-2": quick("theorem-2", trials=3, steps=60, normalized_steps=60),
    "lemmas": quick("lemmas", trials=3, steps=10),
    "theorem-3": quick("theorem-3", trials=3, constant=5, normalized=60),
    "theorem-4": quick("theorem-4", trials=3, p=(1.5, 2.0, 3.0), steps=SHORT, lr=(1.0, 3.0, 100.0)),
    "theorem-5": quick("theorem-5", p=(2.0,), radii=(1.0, 30.0), starts=2, steps=(300,)),
    "feasibility": quick("feasibility", trials=3, sizes=((3, 4), (2, 3))),
    "linear": quick("linear", trials=3, steps=SHORT),
    "joint": quick("joint", trials=3, p=(2.0,), steps=(60,), lr=(0.1,), samples=20),
    "starts": quick("starts", trials=3, steps=SHORT, fresh=20),
    "cones": quick("cones", trials=3, p=(1.75, 3.0), steps=(100, 100)),
    "acceleration": quick("acceleration", trials=3, p=(2.0, 5.0), steps=(60, 60), lr=(0.1, 1.0)),
    **{
        f"bias-{name}": quick(
            f"bias-{name}",
            trials=3,
            steps=40,
            optimizers=("SGD", "Adam", "Adagrad", "Muon"),
            norms=("l2", "linf", "nuclear", "spectral"),
            rates=(0.03, 0.1),
        )
        for name in ("attention", "factored", "linear")
    },
    "bias-network": quick("bias-network", trials=3, steps=40, rates=(0.1,)),
    "bias-batches": quick("bias-batches", trials=3, steps=40, rates=(0.1,)),
    "bias-rates": quick("bias-rates", trials=3, steps=40),
    "bias-potentials": quick("bias-potentials", trials=3, steps=40),
    "bias-hybrid": quick("bias-hybrid", trials=3, steps=40, game=50),
    "two-heads": quick("two-heads", trials=3, steps=SHORT),
    "three-classes": quick("three-classes", trials=3, steps=SHORT),
    "two-layers": quick("two-layers", trials=3, steps=SHORT),
    "choose-geometry": quick(
        "choose-geometry",
        trials=3,
        kinds=("sparse entries", "dense"),
        n=(8, 12),
        d=5,
        T=3,
        geometries=("p = 1.1", "p = 2"),
        fresh=40,
    ),
}


@cache
def tiny(name: str) -> tuple[Experiment[Any], Result[Any]]:
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
    return experiment.verdict(replace(result, arrays={**result.arrays, **changed})).word
