"""Whether the state of a checkpoint is whole: a run that resumes must be the run that was saved."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mirrorhead._checks import is_number
from mirrorhead.optim._param_state import has_values
from mirrorhead.optim._sharded import local


def check_complete(owner: str, saved: dict[str, Any], needed: Collection[str]) -> None:
    """Raise if state that the next step would need is missing; without any, it is the first."""
    missing = [name for name in sorted(needed) if name not in saved]
    if saved and missing:
        raise ValueError(
            f"state_dict has no {', '.join(map(repr, missing))} for {owner}; it has"
            f" {', '.join(map(repr, sorted(saved)))}. If p, momentum, keep_dual or center was"
            " changed after the last step, load the state_dict with the old value and change it"
            " again"
        )


def check_tensor(owner: str, name: str, value: Any, param: Tensor) -> None:
    """Raise unless `value` is a tensor like the parameter whose numbers a run can have."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        given = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be a floating point tensor,"
            f" got {given}"
        )
    if value.shape != param.shape:
        raise ValueError(
            f"state_dict holds {name!r} of shape {tuple(value.shape)}"
            f" for a parameter of shape {tuple(param.shape)}"
        )
    part = local(value)
    if not has_values(part):
        return
    if name == "exp_avg_sq":  # inf follows from a gradient of 1e20, and is part of a run
        allowed, good = "at least 0", part >= 0
    else:
        allowed, good = "finite", part.isfinite()
    if not good.all():
        first = part[~good][0].item()
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be {allowed}, got {first} among its"
            " entries"
        )


def check_scalar(owner: str, name: str, value: Any) -> None:
    """Raise unless `value` is a tensor of one number that a run can have, or a plain step."""
    if isinstance(value, Tensor) and value.numel() == 1:
        if not has_values(value):
            return
        value = value.item()
    elif name != "step":
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be a tensor of one number, got a"
            f" {type(value).__name__}"
        )
    least = "greater than 0" if name == "scale" else "at least 0"
    number = float(value) if is_number(value) else math.nan
    if not 0 <= number < math.inf or (name == "scale" and number == 0):
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be a finite number {least},"
            f" got {value!r}"
        )


def placed(name: str, value: Tensor, param: Tensor) -> torch.device:
    """Return where state of one number belongs: S with the weights, the others on the CPU.

    A checkpoint loaded with map_location has them on a device, where each step would wait for them.
    """
    on_cpu = name != "scale" and value.device.type != "meta"
    return torch.device("cpu") if on_cpu else param.device
