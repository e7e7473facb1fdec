"""The optimizers and norms that experiments on bias compare, by the names they have in settings.

An optimizer is a function from parameters and a learning rate. One of your own is named
package.module:function; a function that takes only parameters keeps its own learning rate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from mirrorhead import Grouped, MirrorAdam, MirrorDescent, Norm, PNorm, Schatten, SteepestDescent
from mirrorhead._files import sha256_of
from mirrorhead.bias._trainer import MakeOptimizer

NORMS: dict[str, Norm] = {
    "l1": PNorm(1),
    "l1.1": PNorm(1.1),
    "l1.5": PNorm(1.5),
    "l2": PNorm(2),
    "l3": PNorm(3),
    "linf": PNorm(math.inf),
    "nuclear": Schatten(1),
    "Schatten 1.5": Schatten(1.5),
    "Schatten 3": Schatten(3),
    "spectral": Schatten(math.inf),
    "rows": Grouped(1, dim=0),
}

Make = Callable[[Any, float], torch.optim.Optimizer]


class Known(NamedTuple):
    """An optimizer, and the norm whose margin theory says that it maximises on linear data."""

    make: Make
    norm: str = ""


def _steepest(norm: str, momentum: float = 0.0) -> Known:
    return Known(lambda w, lr: SteepestDescent(w, lr, NORMS[norm], momentum=momentum), norm)


KNOWN: dict[str, Known] = {
    "SGD": Known(lambda w, lr: torch.optim.SGD(w, lr), "l2"),
    "SGD, momentum": Known(lambda w, lr: torch.optim.SGD(w, lr, momentum=0.9), "l2"),
    "Adam": Known(lambda w, lr: torch.optim.Adam(w, lr), "linf"),  # AdamW without decay
    "Adam, b1 = 0": Known(lambda w, lr: torch.optim.Adam(w, lr, betas=(0.0, 0.9)), "linf"),
    "AMSGrad": Known(lambda w, lr: torch.optim.Adam(w, lr, amsgrad=True)),
    "Adamax": Known(lambda w, lr: torch.optim.Adamax(w, lr)),
    "NAdam": Known(lambda w, lr: torch.optim.NAdam(w, lr)),
    "RAdam": Known(lambda w, lr: torch.optim.RAdam(w, lr)),
    "RMSprop": Known(lambda w, lr: torch.optim.RMSprop(w, lr), "linf"),
    "Adagrad": Known(lambda w, lr: torch.optim.Adagrad(w, lr)),
    "Adadelta": Known(lambda w, lr: torch.optim.Adadelta(w, lr)),
    "Adafactor": Known(lambda w, lr: torch.optim.Adafactor(w, lr, weight_decay=0.0)),
    "Rprop": Known(lambda w, lr: torch.optim.Rprop(w, lr)),
    "ASGD": Known(lambda w, lr: torch.optim.ASGD(w, lr), "l2"),
    "Muon": Known(lambda w, lr: torch.optim.Muon(w, lr, weight_decay=0.0), "spectral"),
    "coordinate descent": _steepest("l1"),
    "sign descent": _steepest("linf"),
    "Signum": _steepest("linf", 0.9),
    "spectral descent": _steepest("spectral"),
    "nuclear descent": _steepest("nuclear"),
    "row descent": _steepest("rows"),
    "MirrorDescent 1.5": Known(lambda w, lr: MirrorDescent(w, lr, 1.5), "l1.5"),
    "MirrorDescent 3": Known(lambda w, lr: MirrorDescent(w, lr, 3.0), "l3"),
    "MirrorAdam 1.5": Known(lambda w, lr: MirrorAdam(w, lr, 1.5)),
    "MirrorAdam, no knee": Known(lambda w, lr: MirrorAdam(w, lr, 1.5, knee=None)),
}


def predicted(name: str) -> str:
    """Return the norm that theory names for an optimizer, "" where it names none."""
    return KNOWN[name].norm if name in KNOWN else ""


def candidates(name: str, rates: tuple[float, ...]) -> dict[float, MakeOptimizer]:
    """Return an optimizer with each of the learning rates; NaN stands for its own rate."""
    make: Any = KNOWN[name].make if name in KNOWN else own_optimizer(name)
    parameters = list(inspect.signature(make).parameters.values())
    needed = [one for one in parameters if one.default is inspect.Parameter.empty]
    if len(needed) > 1 or "lr" in [one.name for one in parameters]:
        key = "lr" if "lr" in [one.name for one in parameters[1:]] else needed[1].name
        return {lr: partial(make, **{key: lr}) for lr in rates}
    return {math.nan: make}


def own_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the function that package.module:function names."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"there is no optimizer {name!r}; there are {', '.join(KNOWN)}, and your own as"
            " package.module:function"
        )
    found: Any = import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {attribute!r}")
        found = getattr(found, part)
    if callable(found):
        return cast("Callable[..., torch.optim.Optimizer]", found)
    raise TypeError(f"{name} is not a function, but {found!r}")


def source_hash(name: str) -> str:
    """Return a hash of the file of an own optimizer: results of other code are computed again."""
    file = inspect.getsourcefile(inspect.unwrap(own_optimizer(name)))
    return "" if file is None else sha256_of(Path(file).read_bytes())[:16]


def norms_named(names: tuple[str, ...]) -> list[Norm]:
    """Return the norms of these names."""
    unknown = [name for name in names if name not in NORMS]
    if unknown:
        raise ValueError(f"there is no norm {unknown[0]!r}; there are {', '.join(NORMS)}")
    return [NORMS[name] for name in names]
