"""The constraints of a run in the form that its steps compute with.

A batch is computed by tensors. A single small problem is computed by numpy, but for the linear
systems: its vectors and torch's share their memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead.margin.arithmetic import BATCH, SINGLE, Arithmetic, Scalar, Vector
from mirrorhead.margin.operator import Blocks
from mirrorhead.margin.step import Factors, Maps, Point
from mirrorhead.margin.systems import System

# A single problem with at most this many rows and columns is computed by numpy.
ALONE = 1 << 14


@dataclass(frozen=True, eq=False)
class Rows:
    """The constraints A w >= b of a run: all of a problem's, or those that still matter."""

    A: Blocks
    b: Tensor  # (B, m)
    inverse: Tensor  # (B, m), 1 / b
    padding: Tensor  # (B, m), inf on padding, else 0
    place: Tensor  # (B, m), the number of each row among all of the problem's

    @staticmethod
    def of(A: Blocks, b: Tensor) -> Rows:
        padding = torch.zeros_like(b).masked_fill_(b < 0, math.inf)
        return Rows(A, b, 1 / b, padding, torch.arange(A.rows, device=b.device).expand_as(b))

    def take(self, keep: Tensor) -> Rows:
        rest = (self.b, self.inverse, self.padding, self.place)
        return Rows(self.A.take(keep), *(x[keep] for x in rest))

    def narrow(self, index: Tensor, flat: Tensor) -> Rows:
        """Those named by index (B, n, fewer), which counts within each block, or by flat."""
        rest = (self.b, self.inverse, self.padding, self.place)
        return Rows(self.A.narrow(index), *(x.gather(1, flat) for x in rest))

    def margin(self, w: Tensor) -> Tensor:
        """The smallest (A w)_k / b_k, (B, 1)."""
        ratio = torch.addcmul(self.padding, self.A.apply(w), self.inverse)
        return ratio.amin(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Form:
    """The rows and the system of a run in the form that the steps compute with."""

    ops: Arithmetic
    A: Maps
    b: Vector
    inverse: Vector
    padding: Vector
    system: Factors

    @staticmethod
    def of(rows: Rows, system: System) -> Form:
        A, b, inverse, padding = rows.A, rows.b, rows.inverse, rows.padding
        if A.batch > 1 or A.rows + A.columns > ALONE or A.left.device.type != "cpu":
            return Form(BATCH, A, b, inverse, padding, system)
        b, inverse, padding = (x[0].numpy() for x in (b, inverse, padding))
        return Form(SINGLE, _Alone(A), b, inverse, padding, _AloneSystem(system))

    def hold(self, x: Point) -> Point:
        """A point of tensors in this form."""
        if self.ops is BATCH:
            return x
        return x.map(self.array, lambda v: np.float64(v.item()))

    def array(self, v: Tensor) -> Vector:
        return v if self.ops is BATCH else v[0].numpy()

    def tensors(self, x: Point) -> Point:
        """The inverse of `hold`."""
        return x if self.ops is BATCH else x.map(_tensor, lambda v: _tensor(v[None]))

    def gap(self, x: Point) -> Scalar:
        """The gap at the exponent of the moment."""
        ops = self.ops
        margin = ops.least(ops.muladd(self.padding, x.aw, self.inverse))
        return gap_of(ops, x.log_dual_norm, ops.dot(self.b, x.lam), margin)


def gap_of(ops: Arithmetic, log_dual_norm: Scalar, pairing: Scalar, margin: Scalar) -> Scalar:
    """||s||_q / <b, lam> bounds the margin of every w of norm 1, and `margin` is that of this w."""
    return ops.expm1(log_dual_norm - ops.log(pairing * ops.at_least(margin, 0)))


class _Alone:
    """A single problem's A on vectors of numpy."""

    def __init__(self, A: Blocks) -> None:
        self.left, self.right = A.left[0].numpy(), A.right[0].numpy()  # (n, R, a), (n, c)

    def apply(self, w: Vector) -> Vector:
        image = self.right @ w.reshape(self.left.shape[2], -1).T  # (n, a): W right_i
        return np.matmul(self.left, image[:, :, None]).reshape(-1)

    def adjoint(self, lam: Vector) -> Vector:
        n, R, _ = self.left.shape
        pulled = np.matmul(lam.reshape(n, 1, R), self.left)[:, 0]  # (n, a)
        return (pulled.T @ self.right).reshape(-1)


@dataclass(frozen=True, eq=False)
class _AloneSystem:
    """A single problem's system on vectors of numpy."""

    system: System

    def factor(self, h: Vector, e: Vector, tol: float) -> Callable[..., Vector]:
        solve = self.system.factor(_tensor(h), _tensor(e), tol)
        return lambda r, guess, tol: solve(
            _tensor(r), None if guess is None else _tensor(guess), tol
        ).numpy()[0]


def _tensor(x: Vector) -> Tensor:
    """A vector of a single problem, with the dimension of a batch."""
    return torch.from_numpy(x[None])
