"""Any Hugging Face sequence classifier, with the interface of the models here."""

from __future__ import annotations

from torch import Tensor, nn


class HuggingFaceClassifier(nn.Module):
    """Token numbers, padded with 0, to logits, by a model of the `transformers` library.

    Args:
        model: anything that takes input_ids and attention_mask and returns `.logits`, such as
            `BertForSequenceClassification`. Its vocabulary must be the one the texts were
            encoded with, [PAD] = 0.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        pad = getattr(getattr(model, "config", None), "pad_token_id", 0)
        if pad not in (0, None):
            raise ValueError(f"model must have 0 as its padding token, it has {pad}")
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (b, T), 0 for padding -> (b, classes)."""
        return self.model(input_ids=ids, attention_mask=(ids != 0).long()).logits
