"""Attention with dropout on its weights, for training on a CPU.

torch's fused attention knows no dropout there: it forms the weights of the whole batch, several
times over. Here one text is done after the other, in memory that stays in the cache, and the
backward pass computes a text's weights again. What is kept is a byte for each weight.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mirrorhead.lab.models.dropout import kept, levels_dropped


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
