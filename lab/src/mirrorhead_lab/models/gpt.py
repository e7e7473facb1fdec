"""A small GPT: pre-norm transformer blocks that predict the next character."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTSettings:
    """What the model is made of."""

    vocabulary: int = 96  # a line break and the printable ASCII characters
    length: int = 64  # of the context
    dim: int = 128
    layers: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got {self.dim} and {self.heads}")


class Block(nn.Module):
    """x <- x + attention(norm(x)), x <- x + W2 gelu(W1 norm(x)); no position sees a later one."""

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        dim = settings.dim
        self.heads = settings.heads
        self.norm1 = nn.LayerNorm(dim, bias=False)
        self.packed = nn.Linear(dim, 3 * dim, bias=False)  # query, key and value
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, T, dim = x.shape
        packed = self.packed(self.norm1(x)).view(b, T, 3, self.heads, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4)  # (b, heads, T, dim / heads) each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, T, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Character numbers to logits of the next character at every position.

    Matrices start as in GPT-2: N(0, 0.02), those that add to the residual stream smaller by the
    root of their number.

    >>> import torch
    >>> model = GPT(GPTSettings(vocabulary=9, length=4, dim=8, layers=1, heads=2))
    >>> model(torch.tensor([[2, 5, 6, 3]])).shape
    torch.Size([1, 4, 9])
    """

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.settings = settings
        self.tokens = nn.Embedding(settings.vocabulary, settings.dim)
        self.positions = nn.Embedding(settings.length, settings.dim)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.dim, bias=False)
        self.head = nn.Linear(settings.dim, settings.vocabulary, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 * ((2 * settings.layers) ** -0.5 if adds else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (b, T) -> (b, T, vocabulary)."""
        most = self.settings.length
        if ids.shape[1] > most:
            raise ValueError(f"ids must have at most {most} columns, got {ids.shape[1]}")
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
