"""Fingerprints of tensors that follow a change at the cost of the change.

The fingerprint of a tensor is the sum, over its entries, of a mixed (position, bits), mod 2^64,
with two different mixers:

    F(x) = sum_k mix(k, bits of x_k)        so  F(x') = F(x) - F(x at S) + F(x' at S)

if x' differs from x only at the positions S. So a sync that knows F(x) hashes what changed and
nothing else, and processes that hold shards of a tensor add up their parts.

A change of one entry always changes F, because each mixer is a bijection of the bits. Other changes
go unnoticed with a probability of about 2^-128. That is for accidents: whoever wants to forge
weights can find others with the same sums. SHA-256 has no such shortcut.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mirrorhead import native
from mirrorhead.patches.checkpoints import bits

DIGITS = 32  # of a fingerprint in hexadecimal; SHA-256 has 64
_PIECE = 1 << 15  # entries that numpy mixes at a time, in the processor's cache
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Fingerprint:
    """Two sums mod 2^64.

    >>> old, new = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0])
    >>> change = Fingerprint.of(new[1:2], 1) - Fingerprint.of(old[1:2], 1)
    >>> str(Fingerprint.of(old) + change) == str(Fingerprint.of(new))
    True
    """

    def __init__(self, one: int = 0, two: int = 0) -> None:
        self.sums = one % 2**64, two % 2**64

    @classmethod
    def of(cls, values: Tensor, positions: int | Tensor = 0) -> Fingerprint:
        """The sums of flat values: at these positions, or those from a first one on."""
        values = values.detach().cpu().contiguous()
        sums = np.zeros(2, np.uint64)
        where = positions.cpu().contiguous() if isinstance(positions, Tensor) else None
        first = 0 if isinstance(positions, Tensor) else positions
        mix = _sum_in_c()
        if mix is not None:
            places = None if where is None else where.data_ptr()
            size = values.element_size()
            mix(values.data_ptr(), values.numel(), size, first, places, sums.ctypes.data)
            return cls(*map(int, sums))
        data = bits(values).numpy().view(_UNSIGNED[values.element_size()])
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            if where is None:
                begin = first + start
                place = np.arange(begin + 1, begin + 1 + len(piece), dtype=np.uint64)
            else:
                place = where[start : start + _PIECE].numpy().view(np.uint64) + np.uint64(1)
            sums += _sums(piece.astype(np.uint64), place)
        return cls(*map(int, sums))

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """The inverse of `str`."""
        return cls(int(text[:16], 16), int(text[16:], 16))

    @classmethod
    def total(cls, parts: Iterable[Fingerprint]) -> Fingerprint:
        """The sum of several."""
        return sum(parts, cls())

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(*(a + b for a, b in zip(self.sums, other.sums, strict=True)))

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(*(a - b for a, b in zip(self.sums, other.sums, strict=True)))

    def __str__(self) -> str:
        return "".join(f"{part:016x}" for part in self.sums)


def _sums(x: np.ndarray, place: np.ndarray) -> np.ndarray:
    """What native/sync.c computes, in numpy."""
    one = _mixed(place, x, (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93), (33, 0xFF51AFD7ED558CCD),
                 (33, 0xC4CEB9FE1A85EC53), 33)  # fmt: skip
    two = _mixed(place, x, (0xA0761D6478BD642F, 0xE7037ED1A0B428DB), (30, 0xBF58476D1CE4E5B9),
                 (27, 0x94D049BB133111EB), 31)  # fmt: skip
    return np.array([one.sum(dtype=np.uint64), two.sum(dtype=np.uint64)])


def _mixed(
    place: np.ndarray,
    x: np.ndarray,
    factors: tuple[int, int],
    first: tuple[int, int],
    second: tuple[int, int],
    last: int,
) -> np.ndarray:
    z = (place * np.uint64(factors[0])) ^ (x * np.uint64(factors[1]))
    for shift, factor in (first, second):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(last))


class Changes(NamedTuple):
    """Some entries of a tensor, at ascending positions: before and after."""

    places: Tensor
    before: Tensor
    after: Tensor


def changed(now: Tensor, snapshot: Tensor) -> Changes:
    """Where flat numbers that are cast to the snapshot's dtype have other bits; on the CPU.

    A NaN that becomes another NaN by the cast is no change.
    """
    rounding = now.dtype == torch.float32 and snapshot.dtype == torch.bfloat16
    on_cpu = now.device.type == snapshot.device.type == "cpu"
    compare = _compare_in_c() if on_cpu else None
    rounding &= compare is not None
    cast = now if rounding else now.to(snapshot.dtype)
    if compare is None:
        places = (bits(cast) != bits(snapshot)).nonzero().flatten()
        found = Changes(places.cpu(), snapshot[places].cpu(), cast[places].cpu())
    else:
        cast, snapshot = cast.contiguous(), snapshot.contiguous()
        room = torch.empty(now.numel(), dtype=torch.int64)
        buffers = Changes(room, torch.empty_like(snapshot), torch.empty_like(snapshot))
        pointers = [part.data_ptr() for part in (cast, snapshot, *buffers)]
        size = snapshot.element_size()
        count = compare(*pointers[:2], now.numel(), size, int(rounding), *pointers[2:])
        found = Changes(*(part[:count].clone() for part in buffers))
    if now.dtype == snapshot.dtype or rounding:
        return found
    other = ~(found.before.float().isnan() & found.after.float().isnan())
    return Changes(*(part[other] for part in found))


@functools.cache
def _sum_in_c() -> Callable[..., Any] | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return native.function(
        "fingerprint", [pointer, number, ctypes.c_int32, number, pointer, pointer]
    )


@functools.cache
def _compare_in_c() -> Callable[..., Any] | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    sizes = [ctypes.c_int64, number, number]
    found = native.function("changed", [pointer, pointer, *sizes, pointer, pointer, pointer])
    if found is not None:
        found.restype = ctypes.c_int64
    return found
