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


def normalized_loop(
    problem: AttentionProblem, p: float, lr: float
) -> Callable[[Tensor, int], Tensor] | None:
    """A function of u and a count that takes so many steps of the normalized rule from u.

    None where the C loop is not built or does not compute this kind of problem.
    """
    plain = problem.heads is None and problem.classes is None and problem.mask is None
    if not (plain and problem.X.device.type == "cpu" and (descent := _descent())):
        return None
    *_, n, T, d = problem.X.shape
    X = problem.X.reshape(-1, n, T, d)
    rows, columns, scores = map(_padded, (X, X.mT, problem.scores().reshape(-1, n, T)))
    data = (rows, columns, problem.z.reshape(-1, n, d).contiguous(), scores)
    sizes = (X.shape[0], n, T, d, columns.shape[-1], rows.shape[-1])
    rule = (lr, snap(dual_exponent(p)), inverse_exponent(p))
    loss = list(LOSSES).index(problem.loss_name)

    def advance(u: Tensor, count: int) -> Tensor:
        """u after `count` steps, in its own memory; trials one after the other."""
        transposed = u.mT.clone(memory_format=torch.contiguous_format)
        pointers = [x.data_ptr() for x in (*data, transposed)]
        if descent(*pointers, *sizes, count, *rule, loss):
            raise MemoryError("no memory for the working space of one trial")
        return transposed.mT

    return advance


def _padded(x: Tensor) -> Tensor:
    """The last dimension filled up with zeros to a multiple of four: whole vectors."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).contiguous()


@functools.cache
def _descent() -> Callable[..., int] | None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
    types = [*[pointer] * 5, *[size] * 7, *[number] * 3, ctypes.c_int]
    return native.function("normalized_descent", types)
