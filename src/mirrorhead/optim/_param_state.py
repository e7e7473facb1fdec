"""One parameter as the implementations see it, and the plainest implementation, the loop."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mirrorhead.optim._formula import Hyper, UpdateRule, accumulate, move

if TYPE_CHECKING:
    from mirrorhead.optim._native import Checksums

_Key = torch._C.DispatchKey
# Where a subclass holds other tensors, or torch has not negated or filled in the numbers yet.
_ELSEWHERE = (_Key.Python, _Key.Negative, _Key.ZeroTensor)
_TENSORS = ("weight", "grad", "stored", "m", "v", "noise", "center")  # of a ParamState
_HUGE_PAGE = 2 << 20  # bytes
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


@dataclass(frozen=True)
class ParamState:
    """The weight, its gradient and its state as local, plain tensors, and how to move them."""

    rule: UpdateRule
    hyper: Hyper
    weight: Tensor
    grad: Tensor
    stored: Tensor | None  # u, or a wide copy of the weight; see `Storage`
    m: Tensor | None  # momentum, or first moment
    v: Tensor | None  # second moment
    noise: Tensor | None = None  # 16 random bits per weight, for stochastic rounding
    seed: int = 0  # of the noise
    checksums: Checksums | None = None  # of the weight as last written; see `_native`
    center: Tensor | None = None  # w0 of a centred group

    def step(self) -> bool | Tensor:
        """Move this one tensor, in eager torch. Return whether its gradient was finite."""
        rule, h = self.rule, self.hyper
        d, m, v = accumulate(rule, self.grad, self.m, self.v, h)
        w, stored = move(rule, self.weight, self.stored, d, h, self.noise)
        for old, new in ((self.weight, w), (self.stored, stored), (self.m, m), (self.v, v)):
            if old is not None and new is not None:
                old.copy_(new)
        return is_finite(self.grad)

    def check(self) -> None:
        """Raise unless all tensors fit the weight: C reads and writes memory without asking."""
        if self.rule.momentum and self.m is None:
            raise ValueError("momentum needs a buffer for each weight")
        shape, rule = tuple(self.weight.shape), self.rule
        for x in (self.grad, self.stored, self.m, self.v):
            if x is not None and x.shape != shape:
                which = "gradients and buffers must have the shape of their weight"
                raise ValueError(f"{which}, {shape}, got {tuple(x.shape)}")
            if x is not None and x is not self.grad and x.dtype != rule.wide:
                which = f"buffers of a weight in {rule.dtype} must be in {rule.wide}"
                raise ValueError(f"{which}, got {x.dtype}")

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.grad, self.stored, self.m, self.v, self.noise, self.center

    def contiguous(self) -> bool:
        """Return whether all tensors are contiguous, and so laid out alike."""
        return all(x is None or x.is_contiguous() for x in self.tensors())

    def pieces(self, size: int) -> Iterator[ParamState]:
        """Cut a flat state into states of at most `size` weights."""
        if self.weight.numel() <= size:
            yield self
            return
        cuts = (repeat(None) if x is None else x.split(size) for x in self.tensors())
        for parts in zip(*cuts, strict=False):  # `repeat` has no end; the shapes are checked
            yield self.of(parts)

    def of(self, tensors: Sequence[Tensor | None]) -> ParamState:
        return replace(self, **dict(zip(_TENSORS, tensors, strict=True)))

    def with_noise(self) -> ParamState:
        """Return the state with the noise that its rule needs, the same in every process."""
        # From a generator of its own: replicas are often seeded differently, and a run that resumes
        # should not have to restore torch's.
        if not self.rule.stochastic or self.noise is not None:
            return self
        noise = torch.zeros_like(self.weight, dtype=torch.int32)
        if has_values(noise):
            generator = torch.Generator(noise.device).manual_seed(self.seed)
            noise = torch.randint(
                0, 1 << 16, noise.shape, dtype=torch.int32, device=noise.device, generator=generator
            )
        return replace(self, noise=noise)

    def flat(self) -> ParamState | None:
        """Return the same memory as one-dimensional views, or None where that is impossible."""
        parts = self.tensors() if self.contiguous() else _in_memory_order(self.tensors())
        return None if parts is None else self.of([x if x is None else x.view(-1) for x in parts])


def _in_memory_order(parts: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
    """Return contiguous views of tensors that are all laid out alike, if they have no gaps."""
    w, g, *state, noise, center = parts
    assert w is not None and g is not None
    # These are only read: a copy will do where their layout differs.
    g, noise, center = (
        x if x is None or x.stride() == w.stride() else torch.empty_like(w, dtype=x.dtype).copy_(x)
        for x in (g, noise, center)
    )
    order, parts = _by_stride(w), (w, g, *state, noise, center)
    ordered = tuple(x if x is None else x.permute(order) for x in parts)
    return ordered if all(x is None or x.is_contiguous() for x in ordered) else None


def alike(parts: Sequence[Tensor | None]) -> bool:
    tensors = [x for x in parts if x is not None]
    if all(x.is_contiguous() for x in tensors):
        return True
    first = tensors[0]
    same = all(x.stride() == first.stride() for x in tensors)
    return same and first.permute(_by_stride(first)).is_contiguous()


def _by_stride(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def zeros_like_param(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros laid out and sharded like the parameter, in huge pages where there are any."""
    # Memory is handed out page by page, when it is first touched. In pages of 4 KB that takes
    # several times as long as the step itself; in pages of 2 MB it is faster.
    size = param.numel() * dtype.itemsize
    plain = type(param) in (Tensor, nn.Parameter) and param.device.type == "cpu"
    dense = plain and has_values(param) and param.is_contiguous()
    if _ADVICE is None or size < _HUGE_PAGE or not dense:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros
    with suppress(OSError):  # of a kernel without huge pages: it is memory all the same
        memory.madvise(_ADVICE)
    return torch.frombuffer(memory, dtype=dtype).view(param.shape)


def has_values(x: Tensor) -> bool:
    """Return False for meta and fake tensors, which have a shape and no numbers."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


def in_memory(x: Tensor) -> bool:
    """Return whether the numbers of x lie at its address, for C to read."""
    return not any(map(torch._C._dispatch_keys(x).has, _ELSEWHERE))


def readable(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient, copied to memory if the weight lies in memory and it does not."""
    if in_memory(grad) or not in_memory(weight):
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def waits(x: Tensor) -> bool:
    """Return whether to read a number of x means to wait for a device."""
    return x.device.type != "cpu"


def number(x: float | Tensor, missing: float = 1.0) -> float:
    """Return the value of a tensor of one element; `missing` for meta and fake tensors."""
    return float(x) if not isinstance(x, Tensor) or has_values(x) else missing


def is_finite(g: Tensor) -> bool | Tensor:
    """Return whether there is no inf or NaN in g; on a device as a tensor, not read yet."""
    if not has_values(g):
        return True
    if waits(g):
        return torch.isfinite(g).all()
    if g.is_contiguous() and g.dtype in (torch.float32, torch.float64):
        # A dot product is the fastest pass there is. It may overflow, so inf is checked again.
        flat = g.view(-1)
        if math.isfinite(torch.dot(flat, flat)):
            return True
    return bool(torch.isfinite(g).all())


def cleaned(grads: Sequence[Tensor]) -> tuple[list[bool | Tensor], list[Tensor]]:
    """Return which gradients are finite, and all of them with 0 for inf and NaN."""
    finite = [is_finite(g) for g in grads]
    return finite, [
        g if ok is True else g.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        for g, ok in zip(grads, finite, strict=True)
    ]
