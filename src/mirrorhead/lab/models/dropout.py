"""Dropout that does not dominate a step on a CPU.

torch draws one random number for each entry, which takes longer than the matrix products of a
narrow model. Here one 64-bit number decides for four entries, 16 bits each, and the backward
pass keeps a byte for each entry instead of a float.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 2**16  # of the 16 bits that decide for an entry


def dropout(x: Tensor, share: float) -> Tensor:
    """x with a random `share` of its entries 0 and the others scaled up: E[dropout(x)] = x.

    The share is rounded to a multiple of 2^-16, and entries are scaled by what it really is. On
    other devices than the CPU, and while compiling, this is torch's own dropout.

    >>> _ = torch.manual_seed(0)
    >>> dropout(torch.ones(6), 0.5)
    tensor([0., 0., 2., 0., 0., 0.])
    """
    if share == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, share)
    dropped, scale = levels_dropped(share)
    return _Dropped.apply(x, kept(x.shape, dropped).view(torch.uint8), scale)  # pyright: ignore[reportReturnType]


def levels_dropped(share: float) -> tuple[int, float]:
    """How many of the 2^16 levels drop an entry, and what the other entries are scaled by."""
    dropped = min(max(1, round(share * _LEVELS)), _LEVELS - 1)
    return dropped, _LEVELS / (_LEVELS - dropped)


def kept(shape: torch.Size, dropped: int) -> Tensor:
    """A random mask, True for each entry with probability 1 - dropped / 2^16."""
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    levels = words.view(torch.int16)[:count]  # from -2^15 to 2^15 - 1, all alike
    return (levels >= dropped - _LEVELS // 2).view(shape)


class Dropout(nn.Module):
    """`dropout` in training, nothing in evaluation."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.share) if self.training else x

    def extra_repr(self) -> str:
        return f"share={self.share}"


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (mask,) = ctx.saved_tensors
        return (gradient * mask).mul_(ctx.scale), None, None
