"""Reading attention: of one text with its prediction, over layers (rollout), and its entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mirrorhead_lab.models.attention_maps import all_rows, attention_maps, evaluating
from mirrorhead_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLASSES = ("negative", "positive")


@dataclass(frozen=True, eq=False)
class AttentionReading:
    """The attention of a model on one text, and its prediction.

    Args:
        tokens: [CLS] first, [SEP] last.
        maps: attention, (layers, heads, T, T); rows sum to 1.
        rollout: (T, T); see `rollout`.
        predicted: the name of the predicted class.
        probability: of that class.
        left_out: number of tokens beyond the model's length, which it does not see.
    """

    tokens: tuple[str, ...]
    maps: Tensor
    rollout: Tensor
    predicted: str
    probability: float
    left_out: int

    def weights(self, layer: int = -1, head: int | None = None) -> Tensor:
        """Return the attention of one layer, (T, T): the mean over heads, or one head."""
        chosen = self.maps[layer]
        return chosen.mean(dim=0) if head is None else chosen[head]


def read_attention(
    model: nn.Module, tokenizer: Tokenizer, text: str, classes: Sequence[str] = CLASSES
) -> AttentionReading:
    """Run a model on one text and read its attention; the text is cut at max_length tokens.

    >>> from mirrorhead_lab.datasets.encoded import wordpiece
    >>> from mirrorhead_lab.models import TextClassifier, TextSettings
    >>> tokenizer = wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "film"])
    >>> model = TextClassifier(TextSettings(vocabulary=6, dim=8, hidden=16, layers=2, heads=4))
    >>> seen = read_attention(model, tokenizer, "A film")
    >>> seen.tokens, seen.maps.shape
    (('[CLS]', 'a', 'film', '[SEP]'), torch.Size([2, 4, 4, 4]))
    """
    found = tokenizer.encode(text)
    if len(found.ids) <= 2:
        raise UserError(f"a text must have at least one word, got {text!r}")
    ids = torch.tensor([found.ids])
    with all_rows(model):
        maps = attention_maps(model, ids)
    with evaluating(model), torch.no_grad():
        probabilities = model(ids)[0].double().softmax(dim=0)
    best = int(probabilities.argmax())
    predicted = classes[best], float(probabilities[best])
    left_out = sum(len(part.ids) - 2 for part in found.overflowing)
    tokens = tuple(found.tokens)
    return AttentionReading(tokens, torch.cat(maps), rollout(maps)[0], *predicted, left_out)


def rollout(maps: Sequence[Tensor]) -> Tensor:
    """Return attention rollout (Abnar and Zuidema 2020): how much each token reaches each other.

    R = B_L ... B_1 with B_l = (A_l + I) / 2, where A_l is the mean over heads and I the residual
    connection. (b, T, T); rows sum to 1.

    Args:
        maps: of every layer, first to last, with all rows; see `all_rows`.
    """
    result = None
    for weights in maps:
        if weights.shape[-2] != weights.shape[-1]:
            raise ValueError(
                "maps must have a row for every token; read them under all_rows(model)"
            )
        mean = weights.mean(dim=1)
        step = (mean + torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)) / 2
        result = step if result is None else step @ result
    if result is None:
        raise ValueError("maps must have at least one layer")
    return result


def normalized_entropy(weights: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return -sum_t a_t log a_t / log T of each row of attention: 1 if flat, 0 if one-hot.

    Args:
        weights: (..., T), rows that sum to 1.
        seen: True where a token may be seen, broadcast to `weights`; T is their number.
            A row that may see one token alone is one-hot: 0.

    >>> normalized_entropy(torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]]))
    tensor([1., 0.])
    """
    entropy = 0 - torch.special.xlogy(weights, weights).sum(dim=-1)
    if seen is None:
        seen = torch.ones_like(weights, dtype=torch.bool)
    count = seen.expand_as(weights).sum(dim=-1)
    return torch.where(count > 1, entropy / count.clamp(min=2).to(weights).log(), 0)
