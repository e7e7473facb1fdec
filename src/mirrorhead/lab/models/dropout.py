"""Dropout that does not dominate a step on a CPU.

torch draws one random number for each entry, which takes longer than the matrix products of a
narrow model. Here one 64-bit number decides for four entries, 16 bits each, and the backward
pass keeps a byte for each entry instead of a float.

torch's fused attention knows no dropout on a CPU: it forms the weights of the whole batch, several
times over. In `dropped_attention` one text is done after the other, in memory that stays in the
cache, and the backward pass computes a text's weights again. A byte for each weight is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    share: float,
    scale: float | None = None,
) -> Tensor:
    """D(softmax(Q K' scale)) V, where D sets a random `share` of the weights to 0: `dropout`.

    Args:
        query: (b, heads, rows, d).
        key, value: (b, heads, T, d).
        mask: (b, 1, 1, T), True where a token may be seen, one at least in each text.
        share: above 0 and below 1.
        scale: 1 / sqrt(d) if None.
    """
    dropped, gain = levels_dropped(share)
    keep = kept(torch.Size([*query.shape[:-1], key.shape[-2]]), dropped)
    return attention_keeping(query, key, value, mask, keep, gain, scale)


def attention_keeping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor,
    gain: float,
    scale: float | None = None,
) -> Tensor:
    """The same with the weights to `keep`, (b, heads, rows, T), and what multiplies them."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    hidden = query.new_zeros(len(query), 1, key.shape[-2])
    if mask is not None:
        hidden.masked_fill_(~mask[:, 0], -math.inf)
    return _Attention.apply(query, key, value, hidden, keep.view(torch.uint8), gain, scale)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        hidden, keep, gain, scale = rest
        ctx.save_for_backward(query, key, value, hidden, keep)
        ctx.gain, ctx.scale = gain, scale
        b, heads, rows, _ = query.shape
        out = query.new_empty(b, rows, heads, value.shape[-1]).transpose(1, 2)
        for q, k, v, h, m, o in zip(query, key, value, hidden, keep, out, strict=True):
            w = torch.baddbmm(h, q, k.mT, alpha=scale).softmax(dim=-1)  # (heads, rows, T)
            o.copy_(w.mul_(m) @ v)
        return out.mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, hidden, keep = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]
        parts = zip(query, key, value, hidden, keep, gradient * ctx.gain, *grads, strict=True)
        for q, k, v, h, m, g, dq, dk, dv in parts:
            w = torch.baddbmm(h, q, k.mT, alpha=ctx.scale).softmax(dim=-1)
            dw = (g @ v.mT).mul_(m)
            ds = torch._softmax_backward_data(dw, w, -1, w.dtype).mul_(ctx.scale)
            dq.copy_(ds @ k)
            dk.copy_(ds.mT @ q)
            dv.copy_(w.mul_(m).mT @ g)
        return *grads, None, None, None, None
