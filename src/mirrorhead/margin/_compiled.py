"""The interior point methods in C, for problems whose systems are small enough to factor.

native/margin.c (p-norms) and native/cone.c (Schatten(1) and Schatten(inf)) hold all steps of one
problem; torch calls would take most of a small problem's time. They take BLAS and LAPACK from
scipy, at the addresses that scipy gives to Cython.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from mirrorhead import native
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._newton_step import Schedule, Start

# Up to this many rows, and three times as many as columns, factoring K in C is faster than what
# torch does. It is even where torch has a smaller system, that of columns.
MOST_ROWS = 1_100
# Cone programs of more rows are left to torch, which uses all threads.
MOST_CONE_ROWS = 400
AT_ONCE = 1 << 22  # problems in one call, times the entries of K


class Verdict(IntEnum):
    """How a run ended: `enum verdict` of native/margin.c."""

    INCONCLUSIVE = 0
    SOLVED = 1
    INFEASIBLE = 2
    LOST = 3  # overflow before any point was found


class Rule(ctypes.Structure):
    """`struct rule` of native/margin.c: a schedule, when it ends, and which rows it drops.

    Once the gap is below `narrow_below`, rows go with u / lam above `loose` times their entry of
    diag(A diag(h) A'), if at most the fraction `worth` remains.
    """

    _fields_ = [
        *((name, ctypes.c_double) for name in ("factor", "threshold", "floor", "infeasible")),
        *((name, ctypes.c_double) for name in ("narrow_below", "loose", "worth")),
        ("iterations", ctypes.c_int64),
    ]


def can_solve(A: ConstraintMatrix, schedule: Schedule) -> bool:
    """Whether the kernel is available and solves problems of this size on this device."""
    small = min(A.rows, A.columns) <= schedule.dense_limit
    few = A.rows <= min(3 * A.columns, MOST_ROWS)
    return small and few and A.left.device.type == "cpu" and _solver() is not None


def solve(
    A: ConstraintMatrix, b: Tensor, p: float, tol: float, rule: Rule, start: Start
) -> tuple[Tensor, ...]:
    """Solve the problems of a batch one after the other: w, lam, gap, verdict and iterations.

    The first three say nothing where the verdict, one of `Verdict`, is LOST.
    """
    solve_margins = _solver()
    assert solve_margins is not None, "call can_solve first"
    B, n, R, a = A.left.shape
    data = [x.contiguous() for x in (A.left, A.right, b)]
    w = b.new_zeros(B, A.columns) if start is None else start[0].clone()
    lam = torch.zeros_like(b) if start is None else start[1].clone()
    gap = b.new_empty(B)
    verdict, iterations = (torch.empty(B, dtype=torch.int64) for _ in range(2))
    tensors = (*data, w, lam, gap, verdict, iterations)
    some = min(64, max(1, AT_ONCE // A.rows**2))
    sizes = (n, R, a, A.right.shape[2])
    _call(solve_margins, tensors, some, *sizes, p, tol, start is not None, ctypes.byref(rule))
    return w, lam, gap, verdict, iterations


def solve_cones(
    A: ConstraintMatrix, b: Tensor, point: tuple[Tensor, ...], summed: bool, *rule: float
) -> tuple[Tensor, ...] | None:
    """Solve Schatten(1) (`summed`) or Schatten(inf): w, lam, gap, iterations; None if it cannot.

    point: x, z, u and lam of `_conic.py`; rule: tol, the most iterations, and the most of them
    without progress.
    """
    function = _cones()
    if function is None or A.rows > MOST_CONE_ROWS or A.left.device.type != "cpu":
        return None
    data = [x.contiguous() for x in (A.left, A.right, b, *point[:3])]
    lam, w, gap = point[3].clone(), b.new_zeros(A.batch, A.columns), b.new_empty(A.batch)
    iterations = torch.empty(A.batch, dtype=torch.int64)
    sizes = (*A.left.shape[1:], A.right.shape[2])
    _call(function, (*data, lam, w, gap, iterations), 64, *sizes, summed, *rule)
    return w, lam, gap, iterations


def _call(function: Callable[..., int], tensors: tuple[Tensor, ...], some: int, *rest: Any) -> None:
    """Call a kernel on `some` problems at a time: between the calls Ctrl-C is heard."""
    with _blas().limit(limits=1):  # on such sizes more threads wait for each other
        for i in range(0, len(tensors[0]), some):
            parts = [x[i : i + some] for x in tensors]
            if function(*(x.data_ptr() for x in parts), len(parts[0]), *rest):
                raise MemoryError("no memory for the working space of one problem")


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
# In the order of `struct lapack` in native/lapack.h.
_ROUTINES = {
    "cython_blas": ("dgemm", "dtrsm"),
    "cython_lapack": ("dpotrf", "dpotrs", "dsyev", "dgesdd"),
}


@functools.cache
def _solver() -> Callable[..., int] | None:
    number, rule = ctypes.c_double, ctypes.POINTER(Rule)
    types = [*[_POINTER] * 8, *[_SIZE] * 5, number, number, ctypes.c_int, rule]
    return native.function("solve_margins", types) if _lapack_is_known() else None


@functools.cache
def _cones() -> Callable[..., int] | None:
    types = [*[_POINTER] * 10, *[_SIZE] * 5, ctypes.c_int, ctypes.c_double, _SIZE, _SIZE]
    return native.function("solve_cones", types) if _lapack_is_known() else None


@functools.cache
def _lapack_is_known() -> bool:
    use_lapack = native.function("use_lapack", [_POINTER])
    routines = [_address(module, name) for module, names in _ROUTINES.items() for name in names]
    if use_lapack is None or None in routines:
        return False
    use_lapack((_POINTER * len(routines))(*routines))
    return True


@functools.cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries of this process, whose threads torch's number does not reach."""
    return ThreadpoolController().select(user_api="blas")


def _address(module: str, name: str) -> int | None:
    """Where a routine of scipy is; None if its integers are not of 32 bits, like the kernel's."""
    capsule = importlib.import_module(f"scipy.linalg.{module}").__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature = name_of(capsule)
    return pointer_of(capsule, signature) if b"int *" in signature else None
