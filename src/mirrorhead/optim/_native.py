"""The step of `_formula.py` by native/step.c: one pass over memory, on a CPU.

What is passed are addresses and numbers, in the layout of the structures in step.c. The GIL is
released meanwhile, and torch.get_num_threads() threads share the blocks of the weights.

Edits of weights from outside are noticed by `Checksums`: a hash of the bits of each block of 4 KB
when it was last written (and of its center), compared while the block is read. Where they differ,
or where there are none yet, the weights of the block are compared one by one, as
`UpdateRule.unedited` does it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead import native
from mirrorhead.geometry._powers import inverse_exponent, snap
from mirrorhead.optim._formula import Hyper, Method, Storage, UpdateRule
from mirrorhead.optim._param_state import ParamState, in_memory

BLOCK_BYTES = 4096
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_STORAGES = {Storage.PRIMAL: 0, Storage.DUAL: 1, Storage.WIDE: 2}
_EXPONENT, _RULE = "4d3q", "6i"  # struct exponent; struct rule up to its exponents
_TENSOR = struct.Struct("7QqQ15d4i")
_RESULTS = struct.Struct("d8xi")  # `largest` and `finite` of struct tensor
_RESULTS_AT = _TENSOR.size - 24
WORDS = _TENSOR.size // 8


class Column:
    """Where numbers of struct tensor are: in words of 8 bytes, the last two in words of 4."""

    GRAD, SEED = 1, 8
    LR, DECAY, DITHER = (9 + Hyper._fields.index(name) for name in ("lr", "decay", "dither"))
    ROOT_BIAS = 9 + Hyper._fields.index("root_bias")
    CHECKED, FINITE = 2 * WORDS - 3, 2 * WORDS - 2


@dataclass(eq=False)
class Checksums:
    """The hashes of one weight's blocks, and for which rule, numbers and state they hold."""

    sums: Tensor | None = None
    written_for: tuple | None = None


def serves(weight: Tensor) -> bool:
    """Return whether step.c moves this tensor: on a CPU, if the C library was built."""
    in_c = weight.device.type == "cpu" and weight.dtype in _DTYPES and in_memory(weight)
    return in_c and _function("step") is not None


def takes_sgd(weight: Tensor) -> bool:
    """Return whether step.c takes steps of SGD as torch does, to the bit: both round once."""
    plain = weight.dtype in (torch.float32, torch.float64) and weight.is_contiguous()
    return plain and serves(weight) and _both_fuse()


@functools.cache
def _both_fuse() -> bool:
    """Return whether torch and step.c use instructions that fuse a product with a sum."""
    theirs = torch.backends.cpu.get_cpu_capability()
    return theirs in ("AVX2", "AVX512") and native.instruction_set() in ("avx2", "avx512")


def step_native(states: Sequence[ParamState]) -> list[bool]:
    """Move contiguous tensors that share a rule. Return which gradients were finite."""
    return [ok for ok, _ in call_native("step", states, [None] * len(states))]


def call_native(
    name: str, states: Sequence[ParamState], scales: Sequence[float | None]
) -> list[tuple[bool, float]]:
    """Call "step" of step.c, or "rescale" where S has changed, on contiguous states of one rule.

    `scales` are the S of centred states. Return which gradients were finite, and max |u| by state.
    """
    if not states:
        return []
    rows = packed_rows(states, scales)
    rule = packed_rule(states[0].rule, scales[0] is not None)
    call_rows(name, rule, rows, [state.weight for state in states])
    places = range(_RESULTS_AT, len(rows), _TENSOR.size)
    results = [_RESULTS.unpack_from(rows, place) for place in places]
    return [(bool(finite), largest) for largest, finite in results]


def call_rows(name: str, rule: bytes, rows: bytearray, weights: Sequence[Tensor]) -> None:
    function = _function(name)
    assert function is not None, "call serves first"
    pointer = (ctypes.c_char * len(rows)).from_buffer(rows)
    function(rule, pointer, len(weights), torch.get_num_threads())
    torch.autograd.graph.increment_version(weights)


def packed_rows(states: Sequence[ParamState], scales: Sequence[float | None]) -> bytearray:
    """Return struct tensor of step.c for each state."""
    return bytearray().join(map(_row, states, scales))


def _row(state: ParamState, scale: float | None) -> bytes:
    sums, valid = 0, False
    if state.stored is not None and state.checksums is not None:
        sums, valid = _prepared(state.checksums, state, scale)
    tensors = (state.weight, state.grad, state.stored, state.m, state.v, state.center)
    addresses = (0 if x is None else x.data_ptr() for x in tensors)
    integers = (sums, state.weight.numel(), state.seed)
    flags = (_DTYPES[state.grad.dtype], valid, True, 0)
    return _TENSOR.pack(*addresses, *integers, *state.hyper, scale or 0.0, 0.0, *flags)


def _prepared(checksums: Checksums, state: ParamState, scale: float | None) -> tuple[int, bool]:
    """Return the address of the hashes, and whether they hold for this state."""
    blocks = -(-state.weight.nbytes // BLOCK_BYTES)
    rule, stored = state.rule, state.stored
    assert stored is not None
    version = None if stored.is_inference() else stored._version  # torch counts edits of it
    numbers = (rule.p, rule.storage, state.hyper.knee, state.weight.dtype, blocks, scale)
    before, checksums.written_for = checksums.written_for, (*numbers, stored.data_ptr(), version)
    if checksums.sums is None or checksums.sums.numel() != blocks:
        checksums.sums = torch.empty(blocks, dtype=torch.int64, device="cpu")
    return checksums.sums.data_ptr(), checksums.written_for == before


@functools.lru_cache(maxsize=256)
def packed_rule(rule: UpdateRule, centered: bool) -> bytes:
    method = 0 if not rule.momentum else 2 if rule.nesterov else 1
    if rule.method is Method.ADAM:
        method = 3
    storage = 3 if centered else _STORAGES[rule.storage]
    numbers = (_DTYPES[rule.dtype], storage, method, rule.knee, rule.stochastic, rule.p == 2)
    exponents = (*_exponent(snap(rule.p - 1)), *_exponent(inverse_exponent(rule.p)))
    return struct.pack(f"{_RULE}{_EXPONENT * 2}d", *numbers, *exponents, rule.dual_floor)


def _exponent(e: float) -> tuple[float, float, float, float, int, int, int]:
    """Return struct exponent of step.c: the value in two parts, and how to compute the power."""
    lower = 2.0 ** (-64 * e) if e < 16 else 0.0
    mantissa, scale = math.frexp(e)
    high = math.ldexp(round(mantissa * 4096), scale - 12)
    quarters = round(4 * e)
    if quarters != 4 * e or e >= 64:
        return e, high, e - high, lower, 0, 0, 0
    kind = {8: 2, 40: 3, 2: 4}.get(quarters, 1)  # SQUARE, TENTH_POWER, ROOT, else PRODUCTS
    return e, high, e - high, lower, kind, quarters // 4, quarters % 4


def sum_of_squares(x: Tensor) -> float:
    """Return the sum of the squares of a contiguous tensor that `serves` accepts."""
    function, result = _function("sum_of_squares"), ctypes.c_double()
    assert function is not None, "call serves first"
    function(x.data_ptr(), ctypes.byref(result), _DTYPES[x.dtype], x.numel())
    return result.value


@functools.cache
def _function(name: str) -> Callable[..., None] | None:
    return native.function(name, [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2)
