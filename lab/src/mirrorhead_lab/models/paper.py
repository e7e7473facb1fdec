"""The paper's models: a text classifier, and a vision transformer on CIFAR-10.

Text: post-norm blocks as in Vaswani et al. 2017, the last layer linear in the first token, [CLS].
Sizes 3, 4 and 6 are the number of blocks and of heads in each. Width 384, hidden width 1536,
dropout .2, "no biases", GELU, no dropout after the embeddings and one logit are what the authors'
code has; positions are learned. `TextClassifier` computes the same numbers as the plain formula,
but nothing that is not used: batches are padded to their own longest text, and the last block has
a row for [CLS] alone.

Pictures: pre-norm blocks, read out at a class token. Pictures are resized to 48 x 48 and cut into
patches of 4 x 4, 144 tokens; width 512, 6 blocks of 8 heads, hidden width 512, dropout .1. The last
block has one row as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorhead_lab.models.self_attention import Dropout, SelfAttention

_ACTIVATIONS = {"gelu": F.gelu, "relu": torch.relu_}


@dataclass(frozen=True)
class TextSettings:
    """What the classifier is made of; the defaults are the paper's, at size 3."""

    vocabulary: int = 30_522
    max_length: int = 512
    dim: int = 384
    hidden: int = 1_536
    layers: int = 3
    heads: int = 3
    dropout: float = 0.2  # of what each half of a block adds
    attention_dropout: float = 0.2
    embedding_dropout: float = 0.0
    activation: Literal["gelu", "relu"] = "gelu"
    one_logit: bool = True  # of two classes: that of the first is 0
    embedding_norm: bool = False  # LayerNorm before the first block
    embedding_std: float = 1.0  # of the first embeddings, normal
    classes: int = 2

    def __post_init__(self) -> None:
        for name in ("vocabulary", "max_length", "dim", "hidden", "layers", "heads", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if self.activation not in _ACTIVATIONS:
            allowed = ", ".join(_ACTIVATIONS)
            raise ValueError(f"activation must be one of {allowed}, got {self.activation!r}")
        if not self.embedding_std > 0:
            raise ValueError(f"embedding_std must be positive, got {self.embedding_std}")

    @staticmethod
    def paper(size: int) -> TextSettings:
        """Size 3, 4 or 6 of the paper's Table 1."""
        if size not in (3, 4, 6):
            raise ValueError(f"size must be 3, 4 or 6, got {size}")
        return TextSettings(layers=size, heads=size)

    @staticmethod
    def laptop() -> TextSettings:
        """One narrow block, for epochs of less than a minute on one core."""
        return TextSettings(
            max_length=256,
            dim=64,
            hidden=256,
            layers=1,
            heads=4,
            attention_dropout=0.0,
            embedding_dropout=0.2,
            activation="relu",
            one_logit=False,
            embedding_norm=True,
            embedding_std=0.005,  # larger ones make p = 1.1 rest for an epoch
        )


class TextBlock(nn.Module):
    """x <- norm(x + attention(x)), x <- norm(x + W2 a(W1 x)), for the first `rows` tokens."""

    def __init__(self, settings: TextSettings) -> None:
        super().__init__()
        dim = settings.dim
        self.attention = SelfAttention(dim, settings.heads, settings.attention_dropout)
        self.norm1 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, settings.hidden, bias=False)
        self.down = nn.Linear(settings.hidden, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim, bias=False)
        self.drop = Dropout(settings.dropout)
        self.activation = _ACTIVATIONS[settings.activation]

    def forward(self, x: Tensor, mask: Tensor, rows: int | None = None) -> Tensor:
        x = self.norm1(x[:, :rows] + self.drop(self.attention(x, mask, rows)))
        return self.norm2(x + self.drop(self.down(self.activation(self.up(x)))))


class TextClassifier(nn.Module):
    """Token numbers to class logits.

    >>> model = TextClassifier(TextSettings(vocabulary=9, dim=8, hidden=16, layers=2, heads=2))
    >>> model(torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])).shape  # 0 is padding
    torch.Size([2, 2])
    """

    def __init__(self, settings: TextSettings) -> None:
        super().__init__()
        self.settings = settings
        self.tokens = nn.Embedding(settings.vocabulary, settings.dim)
        self.positions = nn.Embedding(settings.max_length, settings.dim)
        norm = settings.embedding_norm
        self.norm = nn.LayerNorm(settings.dim, bias=False) if norm else nn.Identity()
        self.drop = Dropout(settings.embedding_dropout)
        self.blocks = nn.ModuleList(TextBlock(settings) for _ in range(settings.layers))
        # With more classes than two there is no such thing as one logit.
        self.one_logit = settings.one_logit and settings.classes == 2
        logits = 1 if self.one_logit else settings.classes
        self.head = nn.Linear(settings.dim, logits, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=settings.embedding_std)
        #: True computes all rows of the last block too: to look at them, as nothing uses them.
        self.every_row = False

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (b, T), [CLS] first, 0 for padding -> (b, classes)."""
        most = self.settings.max_length
        if ids.shape[1] > most:
            raise ValueError(f"ids must have at most {most} columns, got {ids.shape[1]}")
        mask = (ids != 0)[:, None, None, :]
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]  # (b, T, dim)
        x = self.drop(self.norm(x))
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = block(x, mask, rows=1 if i == last and not self.every_row else None)
        logits = self.head(x[:, 0])
        return F.pad(logits, (1, 0)) if self.one_logit else logits


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


class ViTBlock(nn.Module):
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
        self.blocks = nn.ModuleList(ViTBlock(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.dim)
        self.head = nn.Linear(settings.dim, settings.classes)
        self.every_row = False  # as in `TextClassifier`

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
