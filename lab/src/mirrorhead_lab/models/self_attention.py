"""Multi-head self-attention, for all rows or for the first ones alone, and dropout for a CPU.

torch draws one random number for each entry that it may drop, which takes longer than the matrix
products of a narrow model. Here one 64-bit number decides for four entries, 16 bits each, and the
backward pass keeps a byte for each entry instead of a float.

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

    query is (b, heads, rows, d); key and value are (b, heads, T, d); mask is (b, 1, 1, T), True
    where a token may be seen, one at least in each text; scale is 1 / sqrt(d) if None.
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


class SelfAttention(nn.Module):
    """softmax(Q K' / sqrt(d)) V for each head, then one linear map of all heads together.

    Query, key and value are three matrices, as in the paper's Figure 8; heads are slices of their
    rows. Training sets a share `dropout` of the weights to 0. Only the last map may have a bias.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide dim, got {heads} heads and dim {dim}")
        self.heads = heads
        self.dropout = dropout
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, rows: int | None = None) -> Tensor:
        """x: (b, T, dim); mask: (b, 1, 1, T), True where a token may be seen; -> (b, rows, dim).

        With `rows`, only the first `rows` tokens have queries; all tokens have keys and values.
        """
        if rows == 1:
            return self._first_row(x, mask)
        weights = torch.cat([self.query.weight, self.key.weight, self.value.weight])
        q, k, v = self._split(F.linear(x, weights)).chunk(3, dim=1)
        q = q[:, :, :rows]
        if self._drops(x):
            return self._join(dropped_attention(q, k, v, mask, self.dropout))
        return self._join(F.scaled_dot_product_attention(q, k, v, mask, self._share))

    def _first_row(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the first row alone, without computing keys and values.

        q' (W_k x_t) = (W_k' q)' x_t, and a mean of W_v x_t is W_v times the mean of x_t.
        """
        q = self._split(self.query(x[:, :1]))  # (b, heads, 1, d)
        to_key, to_value = (m.weight.unflatten(0, (self.heads, -1)) for m in (self.key, self.value))
        q, scale = q @ to_key, q.shape[-1] ** -0.5  # (b, heads, 1, dim)
        x = x[:, None].to(q.dtype)  # which autocast may have changed
        if self._drops(x):  # all heads look at the same, as rows of one head would
            q = q.transpose(1, 2)
            mean = dropped_attention(q, x, x, mask, self.dropout, scale).transpose(1, 2)
        else:
            fused, share = F.scaled_dot_product_attention, self._share
            mean = fused(q, x, x, mask, share, scale=scale, enable_gqa=True)
        return self._join(mean @ to_value.mT)

    @property
    def _share(self) -> float:
        return self.dropout if self.training else 0.0

    def _drops(self, x: Tensor) -> bool:
        """Whether weights are dropped where torch's fused attention cannot do it."""
        return self._share > 0 and x.device.type == "cpu" and not torch.compiler.is_compiling()

    def _split(self, x: Tensor) -> Tensor:
        """(b, T, n d) -> (b, n, T, d), d = dim / heads."""
        return x.unflatten(-1, (-1, self.query.out_features // self.heads)).transpose(1, 2)

    def _join(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))
