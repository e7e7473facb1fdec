"""The paper's figures and theorems, each computed, drawn and judged.

An experiment is a module of this folder with the names that `experiments.base` lists; ORDER has
them as the report shows them. They are imported when asked for, so that a list of them is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mirrorhead.lab.experiments.base import Experiment

ORDER = (
    "example-1",
    "example-2",
    "figure-4",
    "figure-5",
    "theorem-1",
    "theorem-2",
    "theorem-4",
    "theorem-5",
    "cones",
    "initialization",
    "normalization",
    "acceleration",
    "two-heads",
    "three-classes",
)


def load(name: str) -> Experiment:
    """The experiment of that name; or your own, by the name of its module.

    >>> load("example-1").title
    'Example 1: the printed solution'
    """
    from mirrorhead.lab.experiments.base import Experiment

    module = f"{__name__}.{name.replace('-', '_')}" if name in ORDER else name
    unknown = ValueError(f"there is no experiment {name!r}; there are {', '.join(ORDER)}")
    if not module or module.startswith("."):
        raise unknown
    try:
        return Experiment.of(import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise unknown from None
