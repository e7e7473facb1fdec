"""The paper's vision transformer on CIFAR-10: pre-norm blocks, read out at a class token.

Pictures are resized to 48 x 48 and cut into patches of 4 x 4, 144 tokens; width 512, 6 blocks
of 8 heads, hidden width 512, dropout .1. As in `text`, the last block has one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorhead.lab.models.self_attention import Dropout, SelfAttention


@dataclass(frozen=True)
class ViTSettings:
    """What the transformer is made of; the defaults are the paper's."""

    side: int = 48  # pictures are resized to it
    patch: int = 4
    dim: int = 512
    hidden: int = 512
    layers: int = 6
    heads: int = 8
    dropout: float = 0.1
    classes: int = 10

    def __post_init__(self) -> None:
        for name in ("side", "patch", "dim", "hidden", "layers", "heads", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.side % self.patch:
            raise ValueError(f"patch must divide side, got {self.patch} and {self.side}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, got {self.dropout}")

    @staticmethod
    def laptop() -> ViTSettings:
        """Two narrow blocks on pictures as they are, 64 tokens."""
        return ViTSettings(side=32, dim=64, hidden=128, layers=2, heads=4)


class Block(nn.Module):
    """x <- x + attention(norm(x)), x <- x + W2 gelu(W1 norm(x)), for the first `rows` tokens."""

    def __init__(self, settings: ViTSettings) -> None:
        super().__init__()
        dim = settings.dim
        self.norm1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, settings.heads, bias=True)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, settings.hidden)
        self.down = nn.Linear(settings.hidden, dim)
        self.drop = Dropout(settings.dropout)

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        x = x[:, :rows] + self.drop(self.attention(self.norm1(x), rows=rows))
        h = self.drop(F.gelu(self.up(self.norm2(x))))
        return x + self.drop(self.down(h))


class ViT(nn.Module):
    """Pictures to class logits.

    >>> model = ViT(ViTSettings(side=8, dim=16, hidden=16, layers=2, heads=2))
    >>> model(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    def __init__(self, settings: ViTSettings) -> None:
        super().__init__()
        self.settings = settings
        tokens = 1 + (settings.side // settings.patch) ** 2
        self.patches = nn.Linear(3 * settings.patch**2, settings.dim)
        self.cls = nn.Parameter(torch.randn(settings.dim))
        self.positions = nn.Parameter(torch.randn(tokens, settings.dim))
        self.drop = Dropout(settings.dropout)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.dim)
        self.head = nn.Linear(settings.dim, settings.classes)
        #: True computes all rows of the last block too: to look at them, as nothing uses them.
        self.every_row = False

    def forward(self, pictures: Tensor) -> Tensor:
        """pictures: (b, 3, height, width) -> (b, classes)."""
        x = self.patches(self._cut(pictures))  # (b, tokens - 1, dim)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1) + self.positions
        x = self.drop(x)
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = block(x, rows=1 if i == last and not self.every_row else None)
        return self.head(self.norm(x[:, 0]))

    def _cut(self, pictures: Tensor) -> Tensor:
        """Resized pictures as patches, row by row: (b, patches, pixels of a patch x 3)."""
        side, patch = self.settings.side, self.settings.patch
        if pictures.shape[-2:] != (side, side):
            pictures = F.interpolate(pictures, (side, side), mode="bilinear", align_corners=False)
        grid = pictures.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
        # (b, 3, rows, patch, columns, patch)
        return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
