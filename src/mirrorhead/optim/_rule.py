"""What is decided once for a parameter: the rule of its step. And the numbers of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mirrorhead.geometry._base import Norm, Potential, Separable
from mirrorhead.optim._tensors import wide_dtype

Group = dict[str, Any]  # of an optimizer's parameters


class Storage(IntEnum):
    """What is kept beside a weight between steps; native/step.c has the same values."""

    PRIMAL = 0  # nothing: the step is taken relative to w, so that a zero step changes no bit
    #: u. For p < 2 a float32 w near 0 cannot hold u (at p = 1.1, w = u^10 underflows at
    #: |u| = 1.6e-4), so the step moves u and writes w from it.
    DUAL = 1
    #: A float32 copy of a half-precision w. For p > 2 it is better than u, which underflows
    #: there (at p = 6, |w| = 1e-8 gives u = 1e-40).
    WIDE = 2
    CENTERED = 3  # u around a center w0, in units of weights


class Method(IntEnum):
    """How the direction follows from the gradients; native/step.c has the same values."""

    DESCENT = 0
    MOMENTUM = 1
    NESTEROV = 2
    ADAM = 3


class Mover(Enum):
    """What moves a parameter."""

    TORCH = "torch's own SGD or AdamW, at p = 2"
    NATIVE = "native/step.c"
    COMPILED = "torch.compile"
    PACKED = "eager torch, many tensors at a time"
    EAGER = "eager torch, one by one"


@dataclass(frozen=True)
class Rule:
    """What is fixed while a kernel runs; parameters with one rule move together."""

    psi: Potential  # with a knee, the potential whose knee is at 1
    method: Method
    storage: Storage
    dtype: torch.dtype  # of the parameter
    knee: bool = False
    stochastic: bool = False  # round bf16 at random
    norm: Norm | None = None  # move along the steepest direction of this norm

    @property
    def wide(self) -> torch.dtype:
        """The dtype to compute in."""
        return wide_dtype(self.dtype)

    @property
    def whole(self) -> bool:
        """Whether all entries of a weight are needed to move one."""
        return not isinstance(self.psi, Separable)


class Hyper(NamedTuple):
    """The numbers of one step of one tensor, in the order of struct tensor of native/step.c."""

    lr: Any  # of u: for Adam it includes the tensor's scale and the bias correction of m
    decay: Any = 0.0
    dither: Any = 0.0  # from -1/2 to 1/2; see `_moves.dithered`
    grad_scale: Any = 1.0
    momentum: Any = 0.0
    gain1: Any = 0.0  # 1 - beta1; float32 could not take it from beta1 without losing digits
    beta2: Any = 0.0
    gain2: Any = 0.0  # 1 - beta2
    eps: Any = 0.0
    root_bias: Any = 1.0  # (1 - beta2^t)^(-1/2)
    knee: Any = 0.0  # K
    dual_knee: Any = 0.0  # U = K^(p-1)
    slope: Any = 0.0  # T = K^(2-p)/(p-1)
    scale: Any = 1.0  # S of a centred weight


def fixed_numbers(group: Group) -> dict[str, float]:
    """Return the numbers of a group that its options alone decide."""
    sign = -1.0 if group["maximize"] else 1.0
    numbers = {"grad_scale": sign, "momentum": group.get("momentum", 0.0)}
    if "betas" in group:
        beta1, beta2 = group["betas"]
        # 0/0 is not a number: no gradient, no step.
        eps = max(group["eps"], torch.finfo(torch.float32).tiny)
        numbers |= {"gain1": 1 - beta1, "beta2": beta2, "gain2": 1 - beta2, "eps": eps}
    return numbers


def step_numbers(
    group: Group, rate: float, speeds: np.ndarray, counts: np.ndarray | None, centered: bool
) -> dict[str, Any]:
    """Return the numbers that change at every step, of the parameters with these speeds.

    counts: how many steps each has taken with this one, for Adam's bias corrections.
    """
    numbers: dict[str, Any] = {"lr": rate * speeds}
    numbers["decay"] = rate * group["weight_decay"] * (speeds if centered else 1.0)
    numbers["dither"] = dither_of(group["step"])
    if counts is not None:
        beta1, beta2 = group["betas"]
        numbers["lr"] = numbers["lr"] / (1 - beta1**counts)
        numbers["root_bias"] = (1 - beta2**counts) ** -0.5
    return numbers


def dither_of(step: int) -> float:
    """Return the dither of a step: evenly spread over (-1/2, 1/2), by the golden ratio."""
    return 0.998 * (math.fmod(step * 0.6180339887498949, 1.0) - 0.5)


def knee_numbers(p: float, at: float | None) -> dict[str, float]:
    """Return the numbers of a knee at |w| = `at`; none where there is none."""
    if at is None:
        return {}
    return {"knee": at, "dual_knee": at ** (p - 1), "slope": at ** (2 - p) / (p - 1)}


@dataclass(eq=False)
class Checksums:
    """Hashes of a weight's blocks as step.c wrote them, and for what they hold; see `_native`."""

    sums: Tensor | None = None
    written_for: tuple | None = None


@dataclass(eq=False)
class Record:
    """A parameter, the part of it and of its state in this process, and how it moves."""

    param: Tensor
    rule: Rule
    mover: Mover
    weight: Tensor
    stored: Tensor | None  # u, or a float32 copy of the weight; see `Storage`
    m: Tensor | None  # momentum, or first moment
    v: Tensor | None
    center: Tensor | None
    scale: Tensor | None  # S of the last step
    count: Tensor | None  # steps taken
    numbers: dict[str, float]  # those that do not change from step to step
    speed: float  # lr is multiplied by it
    checksums: Checksums
    before: Potential | None = None  # w is inverse(u) in it
    reach: float = 1.0
    match_rms: float | None = None
