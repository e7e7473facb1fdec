"""The interior point method in C, for problems whose systems are small enough to factor.

native/margin.c holds all steps of one problem; torch calls would take most of a small problem's
time. It takes BLAS and LAPACK from scipy, at the addresses that scipy gives to Cython. Where the
C library is missing, or a problem is large or on a GPU, `_interior_point.py` takes the same steps
in torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from mirrorhead import native
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._linear_systems import DENSE_LIMIT, system_kind
from mirrorhead.margin._newton_step import Schedule

AT_ONCE = 64  # problems in one call


class Verdict(IntEnum):
    """How a run ended: `enum verdict` of native/margin.c."""

    INCONCLUSIVE = 0
    SOLVED = 1
    INFEASIBLE = 2
    LOST = 3  # overflow before any point was found


@dataclass(frozen=True)
class RowDropping:
    """When rows are dropped, and which."""

    below: float  # only once the gap is below this,
    ratio: float  # those with u / lam above this times their entry of diag(A diag(h) A'),
    most_kept: float  # if at most this fraction remains


class _Rule(ctypes.Structure):
    """`struct rule` of native/margin.c."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("factor", "threshold", "floor", "infeasible")),
        *((name, ctypes.c_double) for name in ("narrow_below", "loose", "worth")),
        ("iterations", ctypes.c_int64),
    ]


@dataclass(frozen=True, eq=False)
class KernelResult:
    """Where the runs of a batch ended; w, lam and gap say nothing where the verdict is LOST."""

    w: Tensor  # (B, N)
    lam: Tensor  # (B, m)
    gap: Tensor  # (B,)
    verdict: Tensor  # (B,), values of `Verdict`
    iterations: Tensor  # (B,)


def can_solve(A: ConstraintMatrix, schedule: Schedule) -> bool:
    """Whether the kernel is available and solves problems of this size on this device."""
    small = A.rows <= DENSE_LIMIT and system_kind(A, schedule.dense_limit) == "rows"
    return small and A.left.device.type == "cpu" and _solver() is not None


def solve(
    A: ConstraintMatrix,
    b: Tensor,
    p: float,
    tol: float,
    schedule: Schedule,
    start: tuple[Tensor, Tensor] | None,
    infeasible: float,
    dropping: RowDropping,
) -> KernelResult:
    """Solve the problems of a batch one after the other."""
    solve_margins = _solver()
    assert solve_margins is not None, "call can_solve first"
    B, n, R, a = A.left.shape
    c = A.right.shape[2]
    data = [x.contiguous() for x in (A.left, A.right, b)]
    w = b.new_zeros(B, A.columns) if start is None else start[0].clone()
    lam = torch.zeros_like(b) if start is None else start[1].clone()
    gap = b.new_empty(B)
    verdict, iterations = (torch.empty(B, dtype=torch.int64) for _ in range(2))
    rule = _Rule(
        schedule.factor,
        schedule.threshold,
        schedule.floor,
        infeasible,
        dropping.below,
        dropping.ratio,
        dropping.most_kept,
        schedule.iterations,
    )
    tensors = (*data, w, lam, gap, verdict, iterations)
    with _blas().limit(limits=1):  # on such sizes more threads wait for each other
        for i in range(0, B, AT_ONCE):  # between calls Ctrl-C is heard
            parts = [x[i : i + AT_ONCE] for x in tensors]
            pointers, sizes = [x.data_ptr() for x in parts], (len(parts[0]), n, R, a, c)
            warm = start is not None
            if solve_margins(*pointers, *sizes, p, tol, warm, ctypes.byref(rule)):
                raise MemoryError("no memory for the working space of one problem")
    return KernelResult(w, lam, gap, verdict, iterations)


@functools.cache
def _solver() -> Callable[..., int] | None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    use_lapack = native.function("use_lapack", [pointer] * 3)
    solve_margins = native.function(
        "solve_margins",
        [*[pointer] * 8, *[size] * 5, number, number, ctypes.c_int, ctypes.POINTER(_Rule)],
    )
    routines = [
        _address("scipy.linalg.cython_blas", "dgemm"),
        _address("scipy.linalg.cython_lapack", "dpotrf"),
        _address("scipy.linalg.cython_lapack", "dpotrs"),
    ]
    if use_lapack is None or None in routines:
        return None
    use_lapack(*routines)
    return solve_margins


@functools.cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries of this process, whose threads torch's number does not reach."""
    return ThreadpoolController().select(user_api="blas")


def _address(module: str, name: str) -> int | None:
    """Where one of scipy's BLAS and LAPACK routines is, from the capsule that Cython reads.

    None where its integers are not of 32 bits, as the kernel's are.
    """
    capsule = importlib.import_module(module).__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature = name_of(capsule)
    return pointer_of(capsule, signature) if b"int *" in signature else None
