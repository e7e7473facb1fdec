"""Multi-head self-attention, for all rows or for the first ones alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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

        With `rows`, only the first so many tokens look around; all of them are looked at.
        """
        out = F.scaled_dot_product_attention(
            self._split(self.query(x[:, :rows])),
            self._split(self.key(x)),
            self._split(self.value(x)),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, heads, T, dim / heads)
