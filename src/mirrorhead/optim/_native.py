"""The step of `_formula.py` by native/step.c: one pass over memory, on a CPU.

What is passed are addresses and numbers, in the layout of the structures in step.c. The GIL is
released meanwhile, and torch.get_num_threads() threads share the blocks of the weights.

Edits of weights from outside are noticed by `Checksums`: a hash of the bits of each block of 4 KB
when it was last written, compared while the block is read. Where they differ, or where there are
none yet, the weights of the block are compared one by one, as `UpdateRule.unedited` does it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mirrorhead import native
from mirrorhead.optim._formula import Method, Storage, UpdateRule
from mirrorhead.optim._param_state import ParamState, random_bits
from mirrorhead.potentials import inverse_exponent, snap

BLOCK_BYTES = 4096
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_STORAGES = {Storage.PRIMAL: 0, Storage.DUAL: 1, Storage.WIDE: 2}
_EXPONENT, _RULE = "3d3q", "6i"  # struct exponent; struct rule up to its exponents
_TENSOR = struct.Struct("6QqQ13d4i")
_FINITE = struct.Struct("i")
_FINITE_AT = _TENSOR.size - 8


class Checksums:
    """The hashes of one weight's blocks, and for which rule and numbers they hold."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.written_for: tuple | None = None


def serves(weight: Tensor) -> bool:
    """Return whether step.c moves this tensor: on a CPU, if the C library was built."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES and _step() is not None


def step_native(states: Sequence[ParamState]) -> list[bool]:
    """Move all tensors, which share a rule. Return which gradients were finite."""
    step = _step()
    assert step is not None, "call serves first"
    rule = states[0].rule
    finite = [True] * len(states)
    rows, alive, indices = [], [], []
    for i, state in enumerate(states):
        flat = state if state.contiguous() else state.flat()
        if flat is None:  # views with gaps
            if rule.stochastic and state.noise is None:
                state = replace(state, noise=random_bits(state.weight, state.seed))
            finite[i] = state.step()
            continue
        rows.append(_row(flat))
        alive.append(flat)  # a gradient in another layout was copied: keep the copy
        indices.append(i)
    if not rows:
        return finite
    tensors = bytearray(b"".join(rows))
    pointer = (ctypes.c_char * len(tensors)).from_buffer(tensors)
    step(_rule(rule), pointer, len(rows), torch.get_num_threads())
    torch.autograd.graph.increment_version([states[i].weight for i in indices])
    for k, i in enumerate(indices):
        finite[i] = bool(_FINITE.unpack_from(tensors, k * _TENSOR.size + _FINITE_AT)[0])
    return finite


def _row(state: ParamState) -> bytes:
    """Return struct tensor of step.c."""
    weight, hyper, stored, m, v = state.weight, state.hyper, state.stored, state.m, state.v
    sums, valid = 0, False
    if stored is not None and state.checksums is not None:
        sums, valid = _prepared(state.checksums, state)
    return _TENSOR.pack(
        weight.data_ptr(),
        state.grad.data_ptr(),
        0 if stored is None else stored.data_ptr(),
        0 if m is None else m.data_ptr(),
        0 if v is None else v.data_ptr(),
        sums,
        weight.numel(),
        state.seed,
        *hyper,
        _DTYPES[state.grad.dtype],
        valid,
        True,
        0,
    )


def _prepared(checksums: Checksums, state: ParamState) -> tuple[int, bool]:
    """Return the address of the hashes, and whether they hold for this state."""
    size = state.weight.numel() * state.weight.element_size()
    blocks = -(-size // BLOCK_BYTES)
    written_for = (state.rule.p, state.rule.storage, state.hyper.knee, state.weight.dtype, blocks)
    valid = checksums.written_for == written_for
    if checksums.sums is None or checksums.sums.numel() != blocks:
        checksums.sums = torch.empty(blocks, dtype=torch.int64, device="cpu")
    checksums.written_for = written_for
    return checksums.sums.data_ptr(), valid


@functools.lru_cache(maxsize=256)
def _rule(rule: UpdateRule) -> bytes:
    """Return struct rule of step.c."""
    if rule.method is Method.ADAM:
        method = 3
    else:
        method = 0 if not rule.momentum else 2 if rule.nesterov else 1
    numbers = (
        _DTYPES[rule.dtype],
        _STORAGES[rule.storage],
        method,
        rule.knee,
        rule.stochastic,
        rule.p == 2,
    )
    exponents = (*_exponent(snap(rule.p - 1)), *_exponent(inverse_exponent(rule.p)))
    return struct.pack(f"{_RULE}{_EXPONENT * 2}d", *numbers, *exponents, rule.dual_floor)


def _exponent(e: float) -> tuple[float, float, float, int, int, int]:
    """Return struct exponent of step.c: the value in two parts, and how to compute the power."""
    mantissa, scale = math.frexp(e)
    high = math.ldexp(round(mantissa * 4096), scale - 12)
    quarters = round(4 * e)
    if quarters != 4 * e or e >= 64:
        return e, high, e - high, 0, 0, 0
    kind = {8: 2, 40: 3, 2: 4}.get(quarters, 1)  # SQUARE, TENTH_POWER, ROOT, else PRODUCTS
    return e, high, e - high, kind, quarters // 4, quarters % 4


@functools.cache
def _step() -> Callable[..., None] | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return native.function("step", [pointer, pointer, number, number])
