"""The normalized rule in C: hundreds of times faster than a loop of torch calls for one trial.

native/descent.c holds the whole loop. Where the C library is missing, or the problem is not of the
plain kind (one head, labels +-1, no padding, on a CPU), `descend` takes the same steps in torch.
The two agree to rounding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mirrorhead import native
from mirrorhead.losses import LOSSES
from mirrorhead.potentials import dual_exponent, inverse_exponent, snap
from mirrorhead.problem import AttentionProblem


def can_compile(problem: AttentionProblem) -> bool:
    """Whether the C loop is built and computes this kind of problem."""
    plain = problem.heads is None and problem.classes is None and problem.mask is None
    return plain and problem.X.device.type == "cpu" and _descent() is not None


class NormalizedLoop:
    """The normalized rule for one problem: `advance(u, count)` takes `count` steps from u."""

    def __init__(self, problem: AttentionProblem, p: float, lr: float) -> None:
        function = _descent()
        assert function is not None, "call can_compile first"
        self._function = function
        *_, n, T, d = problem.X.shape
        X = problem.X.reshape(-1, n, T, d)
        rows, columns = _padded(X), _padded(X.mT)
        self._data = (
            rows,
            columns,
            problem.z.reshape(-1, n, d).contiguous(),
            _padded(problem.scores().reshape(-1, n, T)),
        )
        self._sizes = (X.shape[0], n, T, d, columns.shape[-1], rows.shape[-1])
        self._rule = (lr, snap(dual_exponent(p)), inverse_exponent(p))
        self._loss = list(LOSSES).index(problem.loss_name)

    def advance(self, u: Tensor, count: int) -> Tensor:
        """u after `count` steps, in its own memory; trials one after the other."""
        transposed = u.mT.clone(memory_format=torch.contiguous_format)
        pointers = [x.data_ptr() for x in (*self._data, transposed)]
        if self._function(*pointers, *self._sizes, count, *self._rule, self._loss):
            raise MemoryError("no memory for the working space of one trial")
        return transposed.mT


def _padded(x: Tensor) -> Tensor:
    """The last dimension filled up with zeros to a multiple of four: whole vectors."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).contiguous()


@functools.cache
def _descent() -> Callable[..., int] | None:
    double, size = ctypes.c_double, ctypes.c_long
    return native.function(
        "normalized_descent",
        [*[ctypes.c_void_p] * 5, *[size] * 7, *[double] * 3, ctypes.c_int],
    )
