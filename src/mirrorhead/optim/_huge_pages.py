"""Zeros for the state of large parameters, in huge pages where the system has them.

Memory is handed out page by page, when it is first touched. In pages of 4 KB that takes several
times as long as the step itself; in pages of 2 MB it is faster.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor, nn

from mirrorhead.optim._param_state import has_values

_LEAST_BYTES = 2 << 20  # a huge page
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def zeros_like_param(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros laid out and sharded like the parameter."""
    size = param.numel() * dtype.itemsize
    if (
        _ADVICE is None
        or size < _LEAST_BYTES
        or type(param) not in (Tensor, nn.Parameter)
        or param.device.type != "cpu"
        or not has_values(param)
        or not param.is_contiguous()
    ):
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros
    with suppress(OSError):  # of a kernel without huge pages: it is memory all the same
        memory.madvise(_ADVICE)
    return torch.frombuffer(memory, dtype=dtype).view(param.shape)
