"""Multi-head self-attention, for all rows or for the first ones alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorhead.lab.models.dropout import dropped_attention


class SelfAttention(nn.Module):
    """softmax(Q K' / sqrt(d)) V for each head, then one linear map of all heads together.

    Query, key and value are three matrices, as in the paper's Figure 8; heads are slices of
    their rows.

    Args:
        dim: of a token.
        heads: number of heads, each of dim / heads.
        dropout: share of the attention weights that training sets to 0.
        bias: whether the last linear map has one. Queries, keys and values never do.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide dim, got {heads} heads and dim {dim}")
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
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
        share = self.dropout if self.training else 0.0
        return self._join(F.scaled_dot_product_attention(q, k, v, mask, share))

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
            share = self.dropout if self.training else 0.0
            mean = F.scaled_dot_product_attention(
                q, x, x, mask, share, scale=scale, enable_gqa=True
            )
        return self._join(mean @ to_value.mT)

    def _drops(self, x: Tensor) -> bool:
        """Whether weights are dropped where torch's fused attention cannot do it."""
        on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        return self.training and self.dropout > 0 and on_cpu

    def _split(self, x: Tensor) -> Tensor:
        """(b, T, n d) -> (b, n, T, d), d = dim / heads."""
        return x.unflatten(-1, (-1, self.query.out_features // self.heads)).transpose(1, 2)

    def _join(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))
