"""Options of a parameter group: numbers from Python, numpy and torch, and what is refused."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mirrorhead._checks import is_number
from mirrorhead.geometry import PNorm
from mirrorhead.optim._tensors import has_values

FOREIGN = ("differentiable", "capturable")  # options of torch's optimizers that ours do not have
_NUMBERS = (
    "momentum",
    "betas",
    "eps",
    "weight_decay",
    "reach",
    "total_steps",
    "knee",
    "rms_floor",
    "match_rms",
)


def without_foreign(options: dict[str, Any]) -> None:
    """Take out options of torch's optimizers that mean nothing here; True has been refused."""
    for name in FOREIGN:
        options.pop(name, None)


def plain_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with numpy's and other real numbers as Python's own.

    Tensors of one element become numbers too, but for lr: schedulers with tensors as bounds set
    momentum and betas as tensors.
    """
    taken = {name: x for name, x in options.items() if name in _NUMBERS or is_number(x)}
    result = {**options, **{name: _plain(name, x) for name, x in taken.items()}}
    for name in ("geometry", "direction"):
        if isinstance(geometry := result.get(name), PNorm):
            result[name] = geometry.p
        elif is_number(geometry):
            result[name] = float(geometry)  # pyright: ignore[reportArgumentType]
    return result


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        numbers = [_plain(f"{name}[{i}]", x) for i, x in enumerate(value)]
        if all(one is other for one, other in zip(numbers, value, strict=True)):
            return value
        return numbers if isinstance(value, list) else tuple(numbers)
    if isinstance(value, Tensor) and value.is_floating_point() and has_values(value):
        check_one_element(name, value)
        return value.item()
    if not is_number(value) or type(value) in (int, float):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def with_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with its step counts as tensors: old ones of torch have numbers."""
    state = {index: dict(entry) for index, entry in state_dict["state"].items()}
    for index, entry in state.items():
        if "step" in entry and not isinstance(step := entry["step"], Tensor):
            if not is_number(step) or not 0 <= step < math.inf:
                raise ValueError(
                    f"state_dict holds 'step' for parameter {index}: it must be a finite number at"
                    f" least 0, got {step!r}"
                )
            entry["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return {**state_dict, "state": state}


def check_one_element(name: str, value: Tensor) -> None:
    if value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")


def check_number(name: str, value: Any, below: float = math.inf, positive: bool = False) -> None:
    """Raise unless 0 <= value < below, or 0 < value if `positive`."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= float(value) < below or (positive and value == 0):
        bound = "finite" if below == math.inf else f"less than {below:g}"
        least = "greater than 0" if positive else "at least 0"
        raise ValueError(f"{name} must be {least} and {bound}, got {value!r}")
