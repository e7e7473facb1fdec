"""Tensors as memory: flat views, zeros in huge pages, and which numbers can be read at no cost."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_Key = torch._C.DispatchKey
# Where a subclass holds other tensors, or torch has not negated or filled in the numbers yet.
_ELSEWHERE = (_Key.Python, _Key.Negative, _Key.ZeroTensor)
_HUGE_PAGE = 2 << 20  # bytes
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute and keep state in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def flat(tensors: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Return the same memory as one-dimensional views, in one order, or None if there are gaps."""
    kept = [x for x in tensors if x is not None]
    if not all(x.is_contiguous() for x in kept):
        if not alike(kept):
            return None
        order = _by_stride(kept[0])
        tensors = [x if x is None else x.permute(order) for x in tensors]
    return [x if x is None else x.view(-1) for x in tensors]


def laid_out_like(x: Tensor, weight: Tensor) -> Tensor:
    """Return x, in a copy if its numbers do not lie in memory as those of the weight do."""
    if in_memory(x) and x.stride() == weight.stride():
        return x
    if not in_memory(weight):
        return x
    return torch.empty_like(weight, dtype=x.dtype).copy_(x)


def alike(parts: Sequence[Tensor | None]) -> bool:
    """Return whether all tensors have their numbers in the same order, without gaps."""
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
