"""The paper's text classifier: post-norm transformer blocks, read out at [CLS].

The paper says: as in Vaswani et al. 2017, the last layer linear in the first token, [CLS].
Sizes 3, 4 and 6 are the number of blocks and of heads in each. Width 384, hidden width 1536,
dropout .2 and "no biases" are the authors' settings; positions are learned. `TextClassifier`
computes the same numbers as the plain formula, but nothing that is not used: batches are
padded to their own longest text, and the last block has a row for [CLS] alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mirrorhead.lab.models.self_attention import Dropout, SelfAttention


@dataclass(frozen=True)
class TextSettings:
    """What the classifier is made of; the defaults are the paper's, at size 3."""

    vocabulary: int = 30_522
    max_length: int = 512
    dim: int = 384
    hidden: int = 1_536
    layers: int = 3
    heads: int = 3
    dropout: float = 0.2  # of embeddings and of what each half of a block adds
    attention_dropout: float = 0.2
    embedding_norm: bool = False  # LayerNorm before the first block
    embedding_std: float = 1.0  # of the first embeddings, normal
    classes: int = 2

    def __post_init__(self) -> None:
        for name in ("vocabulary", "max_length", "dim", "hidden", "layers", "heads", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
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
            embedding_norm=True,
            embedding_std=0.005,  # larger ones make p = 1.1 rest for an epoch
        )


class Block(nn.Module):
    """x <- norm(x + attention(x)), x <- norm(x + W2 relu(W1 x)), for the first `rows` tokens."""

    def __init__(self, settings: TextSettings) -> None:
        super().__init__()
        dim = settings.dim
        self.attention = SelfAttention(dim, settings.heads, settings.attention_dropout)
        self.norm1 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, settings.hidden, bias=False)
        self.down = nn.Linear(settings.hidden, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim, bias=False)
        self.drop = Dropout(settings.dropout)

    def forward(self, x: Tensor, mask: Tensor, rows: int | None = None) -> Tensor:
        x = self.norm1(x[:, :rows] + self.drop(self.attention(x, mask, rows)))
        return self.norm2(x + self.drop(self.down(self.up(x).relu_())))


class TextClassifier(nn.Module):
    """Token numbers to class logits.

    >>> import torch
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
        self.drop = Dropout(settings.dropout)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.head = nn.Linear(settings.dim, settings.classes, bias=False)
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
        return self.head(x[:, 0])
