"""The paper's figures and theorems, each computed, drawn and judged.

NAMES lists the experiments in the order of the report. Each is the object EXPERIMENT of the module
of its name, which is imported when it is asked for, so that a list of them is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mirrorhead_lab.runtime.extensions import load_object

if TYPE_CHECKING:
    from mirrorhead_lab.experiments.experiment import Experiment

NAMES = (
    *("example-1", "example-2", "figure-4", "figure-5"),
    *("lemmas", "theorem-1", "theorem-2", "theorem-3", "theorem-4", "theorem-5"),
    *("feasibility", "cones", "initialization", "normalization", "linear", "joint"),
    *("acceleration", "starts"),
    *("bias-attention", "bias-factored", "bias-linear", "bias-network"),
    *("bias-rates", "bias-potentials", "bias-batches", "bias-hybrid"),
    *("two-heads", "three-classes", "two-layers", "choose-geometry"),  # open questions
)


def load(name: str) -> Experiment[Any]:
    """Return the experiment of that name; or your own, by the name of its module.

    >>> load("example-1").title
    'Example 1: the printed solution'
    """
    from mirrorhead_lab.experiments.experiment import Experiment

    found = load_object(name, __name__, NAMES, "EXPERIMENT", Experiment)
    if found is None:
        raise ValueError(f"there is no experiment {name!r}; there are {', '.join(NAMES)}")
    return found
