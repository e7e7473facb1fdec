"""What a Newton step computes with: tensors for a batch, numpy's vectors for a single problem.

Vectors are tensors (B, N) with scalars (B, 1), or arrays (N,) with scalars of numpy. A call of
numpy costs a third of one of torch, and most of the time of a small problem goes into calls.
Sums, products and comparisons read the same in both; the rest goes by the names below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Vector = Any  # Tensor (B, N) or ndarray (N,)
Scalar = Any  # Tensor (B, 1) or np.float64


@dataclass(frozen=True)
class Arithmetic:
    dot: Callable[[Vector, Vector], Scalar]
    total: Callable[[Vector], Scalar]
    least: Callable[[Vector], Scalar]
    most: Callable[[Vector], Scalar]
    muladd: Callable[[Vector, Any, Any], Vector]  # (x, y, z) -> x + y z
    at_least: Callable[[Any, float], Any]
    at_most: Callable[[Any, float], Any]
    maximum: Callable[[Any, Any], Any]
    where: Callable[[Scalar, Any, Any], Any]
    any: Callable[[Scalar], bool]
    exp: Callable[[Any], Any]
    expm1: Callable[[Any], Any]
    log: Callable[[Any], Any]
    abs: Callable[[Any], Any]
    sign: Callable[[Any], Any]
    ones_like: Callable[[Any], Any]
    copysign: Callable[[Any, Any], Any]


BATCH = Arithmetic(
    dot=lambda x, y: (x * y).sum(-1, keepdim=True),
    total=lambda x: x.sum(-1, keepdim=True),
    least=lambda x: x.amin(-1, keepdim=True),
    most=lambda x: x.amax(-1, keepdim=True),
    muladd=torch.addcmul,
    at_least=torch.clamp_min,
    at_most=torch.clamp_max,
    maximum=torch.maximum,
    where=torch.where,
    any=lambda x: bool(x.any()),
    exp=torch.exp,
    expm1=torch.expm1,
    log=torch.log,
    abs=torch.abs,
    sign=torch.sign,
    ones_like=torch.ones_like,
    copysign=torch.copysign,
)

SINGLE = Arithmetic(
    dot=np.dot,
    total=np.add.reduce,
    least=np.minimum.reduce,
    most=np.maximum.reduce,
    muladd=lambda x, y, z: x + y * z,
    at_least=np.maximum,
    at_most=np.minimum,
    maximum=np.maximum,
    where=lambda condition, x, y: x if condition else y,
    any=bool,
    exp=np.exp,
    expm1=np.expm1,
    log=np.log,
    abs=np.abs,
    sign=np.sign,
    ones_like=np.ones_like,
    copysign=np.copysign,
)
