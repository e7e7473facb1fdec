"""Steps by native/step.c: one pass over memory, on a CPU.

What is passed is a table with a row for each tensor, addresses and numbers, in the layout of struct
tensor of step.c. It is kept between steps, and only what changes is written again. The GIL is
released meanwhile, and torch.get_num_threads() threads share the blocks of the weights.

Edits of weights from outside are noticed by `Checksums`: a hash of the bits of each block of 4 KB
when it was last written (and of its center), compared while the block is read. Where they differ,
or where there are none yet, the weights of the block are compared one by one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead import native
from mirrorhead.geometry._powers import inverse_exponent, snap
from mirrorhead.geometry.knee import Knee
from mirrorhead.geometry.pnorm import PNorm
from mirrorhead.optim._rule import Hyper, Record, Rule
from mirrorhead.optim._tensors import in_memory, laid_out_like

BLOCK_BYTES = 4096
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_EXPONENT, _RULE = "4d3q", "6i"  # struct exponent; struct rule up to its exponents
_ROW = struct.Struct("7QqQ15d4i")  # struct tensor
_WORDS = _ROW.size // 8
_GRAD, _SEED, _NUMBERS = 1, 8, 9  # places of a row, in words of 8 bytes
_LARGEST = _NUMBERS + len(Hyper._fields)
_GRAD_DTYPE, _CHECKED, _FINITE = (2 * _WORDS - 4 + k for k in range(3))  # in words of 4


class NativeTable:
    """The table of tensors that share a rule, all in memory and each dense, as its state is."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records, self.rule = records, packed_rule(records[0].rule)
        self.weights = [record.weight for record in records]
        self.contiguous = all(weight.is_contiguous() for weight in self.weights)
        self.rows = bytearray().join(map(_row, records))
        words = np.frombuffer(self.rows, dtype=np.int64).reshape(len(records), _WORDS)
        self.words, self.doubles, self.ints = words, words.view(np.float64), words.view(np.int32)

    def step(self, grads: list[Tensor], numbers: Mapping[str, Any], seeds: Any) -> list[bool]:
        """Take the step. Return which gradients were finite."""
        quick = self.contiguous and set(map(type, grads)) == {Tensor}
        quick = quick and not any(g.is_neg() or not g.is_contiguous() for g in grads)
        addresses = [g.data_ptr() for g in grads]
        if not quick or 0 in addresses:  # such as zeros without memory
            grads = list(map(laid_out_like, grads, self.weights))
            addresses = [g.data_ptr() for g in grads]
        self.words[:, _GRAD] = addresses
        self.ints[:, _GRAD_DTYPE] = [_DTYPES[g.dtype] for g in grads]
        self.words[:, _SEED] = seeds
        for name, value in numbers.items():
            self.doubles[:, _NUMBERS + Hyper._fields.index(name)] = value
        self._call("step", self.rows, self.weights)
        self.ints[:, _CHECKED] = 1
        finite = self.ints[:, _FINITE]
        return [True] * len(finite) if finite.all() else [bool(ok) for ok in finite]

    @property
    def largest(self) -> list[float]:
        """The largest |u| of each centred tensor after the step."""
        return self.doubles[:, _LARGEST].tolist()

    def rescale(self, scales: Sequence[float]) -> None:
        """Write the weights again whose scale has changed."""
        old = self.doubles[:, _NUMBERS + Hyper._fields.index("scale")]
        changed = [i for i, (a, b) in enumerate(zip(old, scales, strict=True)) if a != b]
        old[:] = scales
        if changed:
            rows = bytearray(self.words[changed].tobytes())
            self._call("rescale", rows, [self.weights[i] for i in changed])

    def _call(self, name: str, rows: bytearray, weights: Sequence[Tensor]) -> None:
        function = _function(name)
        assert function is not None, "call serves first"
        pointer = (ctypes.c_char * len(rows)).from_buffer(rows)
        function(self.rule, pointer, len(weights), torch.get_num_threads())
        torch.autograd.graph.increment_version(weights)


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


def exponent_of(psi: Any) -> float | None:
    """Return p if step.c computes the potential: a p-norm, with or without a knee."""
    base = psi.potential if type(psi) is Knee else psi
    return base.p if type(base) is PNorm else None


def _row(record: Record) -> bytes:
    sums, valid = 0, False
    if record.stored is not None:
        sums, valid = _prepared(record)
    parts = (record.weight, None, record.stored, record.m, record.v, record.center)
    addresses = (0 if x is None else x.data_ptr() for x in parts)
    numbers = Hyper(lr=0.0, **record.numbers)
    count = record.weight.numel()
    return _ROW.pack(*addresses, sums, count, 0, *numbers, 0.0, 0, valid, 1, 0)


def _prepared(record: Record) -> tuple[int, bool]:
    """Return the address of the hashes, and whether they hold for this record."""
    checksums, stored = record.checksums, record.stored
    assert stored is not None
    blocks = -(-record.weight.nbytes // BLOCK_BYTES)
    versions = [  # torch counts edits
        (x.data_ptr(), None if x.is_inference() else x._version)
        for x in (stored, record.scale)
        if x is not None
    ]
    rule = record.rule
    written_for = (rule.psi, rule.storage, rule.dtype, record.numbers.get("knee"), blocks, versions)
    before, checksums.written_for = checksums.written_for, written_for
    if checksums.sums is None or checksums.sums.numel() != blocks:
        checksums.sums, before = torch.empty(blocks, dtype=torch.int64, device="cpu"), None
    return checksums.sums.data_ptr(), written_for == before


@functools.lru_cache(maxsize=256)
def packed_rule(rule: Rule) -> bytes:
    p = exponent_of(rule.psi)
    assert p is not None
    wide = torch.finfo(rule.wide)
    numbers = (_DTYPES[rule.dtype], rule.storage, rule.method, rule.knee, rule.stochastic, p == 2)
    exponents = (*_exponent(snap(p - 1)), *_exponent(inverse_exponent(p)))
    # |u| below which inverse(u) is subnormal.
    floor = wide.tiny ** (1 / inverse_exponent(p))
    return struct.pack(f"{_RULE}{_EXPONENT * 2}d", *numbers, *exponents, floor)


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
