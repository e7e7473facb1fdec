"""Many steps of a rule in one call of native/descent.c.

That is hundreds of times faster than torch for one small trial, where the time of torch is that of
its calls. The rules of `_update_rules` are the reference: both agree to rounding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mirrorhead import native
from mirrorhead.geometry import PNorm
from mirrorhead.geometry._powers import dual_exponent, inverse_exponent, snap
from mirrorhead.paths._update_rules import Accelerated, Normalized, Rule, State
from mirrorhead.problem import AttentionProblem

# Of the state of the accelerated rule, in the order of descent.c.
POINTS = ("W", "x", "z", "move", "anchor", "next_anchor")
NUMBERS = ("sum", "a", "theta", "step")

Loop = Callable[[State, int], State]


def compiled_loop(problem: AttentionProblem, rule: Rule) -> Loop | None:
    """A function of a state and a count that takes that many steps; it leaves the state alone.

    None for other rules and geometries than the p-norm's, for other problems than of one head,
    labels +-1, no padding, queries as wide as tokens, a loss that C knows, on a CPU, and without
    the library.
    """
    plain = problem.heads is None and problem.classes is None and problem.mask is None
    square = problem.X.shape[-1] == problem.z.shape[-1]
    if not (plain and square and problem.X.device.type == "cpu"):
        return None
    if problem.loss_function.native is None:
        return None
    if type(rule) is Normalized and type(rule.potential) is PNorm:
        descent = _normalized_descent()
        return descent and _normalized(descent, problem, rule.potential.p, rule.lr)
    if isinstance(rule, Accelerated) and type(rule.norm) is PNorm:
        descent = _accelerated_descent()
        return descent and _accelerated(descent, problem, rule.norm.p, rule)
    return None


def _normalized(
    descent: Callable[..., int], problem: AttentionProblem, p: float, lr: float
) -> Loop:
    steps = _steps(descent, problem, p)

    def advance(state: State, count: int) -> State:
        u = state["u"].mT.clone(memory_format=torch.contiguous_format)
        steps(count, u.data_ptr(), lr, inverse_exponent(p))
        return {"u": u.mT}

    return advance


def _accelerated(
    descent: Callable[..., int], problem: AttentionProblem, p: float, rule: Accelerated
) -> Loop:
    steps = _steps(descent, problem, p)
    floor = rule.floor(0).contiguous()

    def advance(state: State, count: int) -> State:
        points = torch.stack([state[name].mT for name in POINTS]).contiguous()
        numbers = torch.stack([state[name] for name in NUMBERS], -1).contiguous()
        before = int(state["count"])
        steps(count, points.data_ptr(), numbers.data_ptr(), floor.data_ptr(), before)
        return {
            **dict(zip(POINTS, points.mT, strict=True)),
            **dict(zip(NUMBERS, numbers.unbind(-1), strict=True)),
            "count": state["count"] + count,
        }

    return advance


def _steps(descent: Callable[..., int], problem: AttentionProblem, p: float) -> Callable[..., None]:
    """The C function with the data of the problem, which it keeps alive."""
    *_, n, T, d = problem.X.shape
    X = problem.X.reshape(-1, n, T, d)
    rows, columns, scores = map(_padded, (X, X.mT, problem.scores().reshape(-1, n, T)))
    data = (rows, columns, problem.z.reshape(-1, n, d).contiguous(), scores)
    sizes = (X.shape[0], n, T, d, columns.shape[-1], rows.shape[-1])
    loss, q = problem.loss_function.native, snap(dual_exponent(p))

    def steps(count: int, *state: Any) -> None:
        if descent(*[x.data_ptr() for x in data], *sizes, loss, count, q, *state):
            raise MemoryError("no memory for the working space of one trial")

    return steps


def _padded(x: Tensor) -> Tensor:
    """The last dimension filled up with zeros to a multiple of four: whole vectors."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).contiguous()


_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
# The data, their sizes, the loss, the count and q.
_PROBLEM = [*[_POINTER] * 4, *[_SIZE] * 6, ctypes.c_int, _SIZE, _NUMBER]


@functools.cache
def _normalized_descent() -> Callable[..., int] | None:
    return native.function("normalized_descent", [*_PROBLEM, _POINTER, _NUMBER, _NUMBER])


@functools.cache
def _accelerated_descent() -> Callable[..., int] | None:
    return native.function("accelerated_descent", [*_PROBLEM, *[_POINTER] * 3, _SIZE])
