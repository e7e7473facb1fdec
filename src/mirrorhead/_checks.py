"""Checks of arguments: a clear error before any work, naming the argument and what is allowed."""

from __future__ import annotations

import math
from numbers import Real
from operator import index

import torch
from torch import Tensor


def is_number(x: object) -> bool:
    """Whether x is a real number of Python or numpy; True and False are not numbers here."""
    return isinstance(x, Real) and not isinstance(x, bool)


def check_positive(name: str, value: float) -> float:
    """A finite number above 0, as a float."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number > 0, got {value!r}")
    return float(value)


def check_integer(name: str, value: int, least: int) -> int:
    """An integer of at least `least`; 2.0 and True are refused."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return number


def check_seed(seed: int) -> int:
    """A seed that torch's generators take."""
    try:
        number = index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, got {seed!r}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, got {seed!r}")
    return number


def as_tensor(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """A real tensor on the device of `like`."""
    try:
        x = torch.as_tensor(value, device=None if like is None else like.device)
        if x.is_floating_point() and not hasattr(value, "dtype"):
            x = x.new_tensor(value, dtype=torch.float64)  # lists of numbers lose no digits
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor or an array of numbers: {error}") from None
    if x.is_complex():
        raise TypeError(f"{name} must be real, got {x.dtype}")
    return x


def as_floats(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """A finite float64 tensor on the device of `like`."""
    x = as_tensor(name, value, like).to(torch.float64)
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {int((~x.isfinite()).sum())} bad entries")
    return x
