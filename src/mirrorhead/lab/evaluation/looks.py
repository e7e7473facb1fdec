"""What a model looks at in one text: tokens, every layer's attention, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mirrorhead.lab.evaluation.rollout import rollout
from mirrorhead.lab.models.maps import all_rows, attention_maps
from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLASSES = ("negative", "positive")


@dataclass(frozen=True, eq=False)
class Look:
    """One text as a model sees it.

    Args:
        tokens: [CLS] first, [SEP] last.
        maps: attention, (layers, heads, T, T); rows sum to 1.
        rollout: (T, T); see `rollout`.
        predicted: the class, in a word.
        probability: of that class.
        left_out: tokens beyond the model's length, which it does not see.
    """

    tokens: tuple[str, ...]
    maps: Tensor
    rollout: Tensor
    predicted: str
    probability: float
    left_out: int

    def weights(self, layer: int = -1, head: int | None = None) -> Tensor:
        """Of one layer, (T, T): the mean over heads, or one head."""
        chosen = self.maps[layer]
        return chosen.mean(dim=0) if head is None else chosen[head]


def look(
    model: nn.Module, tokenizer: Tokenizer, text: str, classes: Sequence[str] = CLASSES
) -> Look:
    """Read one text; longer ones are cut at the tokenizer's max_length.

    >>> from mirrorhead.lab.datasets.tokenizer import wordpiece
    >>> from mirrorhead.lab.models import TextClassifier, TextSettings
    >>> tokenizer = wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "film"])
    >>> model = TextClassifier(TextSettings(vocabulary=6, dim=8, hidden=16, layers=2, heads=4))
    >>> seen = look(model, tokenizer, "A film")
    >>> seen.tokens, seen.maps.shape
    (('[CLS]', 'a', 'film', '[SEP]'), torch.Size([2, 4, 4, 4]))
    """
    found = tokenizer.encode(text)
    if len(found.ids) <= 2:
        raise UserError(f"a text must have at least one word, got {text!r}")
    ids = torch.tensor([found.ids])
    with all_rows(model):
        maps = attention_maps(model, ids)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        probabilities = model(ids)[0].double().softmax(dim=0)
    model.train(was_training)
    best = int(probabilities.argmax())
    return Look(
        tuple(found.tokens),
        torch.cat(maps),
        rollout(maps)[0],
        classes[best],
        float(probabilities[best]),
        sum(len(part.ids) - 2 for part in found.overflowing),
    )
