"""Attention weights of any layer and head, read from outside the model.

Models here, and those of Hugging Face by default, call torch's fused attention, which never
forms the weights. `attention_maps` intercepts those calls and computes the weights from the same
queries and keys; the model and its result are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def attention_maps(
    model: nn.Module, *inputs: Any, layers: Collection[int] | None = None, **named: Any
) -> list[Tensor]:
    """Return the attention weights of each layer, (b, heads, queries, keys); rows sum to 1.

    The model runs once, with `inputs` and `named`, in evaluation mode and without gradients. The
    last layer of the models here has one query, [CLS], unless `model.every_row` is True.

    Args:
        model: of a compiled one, give the original.
        layers: which to keep, from 0; all of them if None. Others are not computed.

    >>> from mirrorhead.lab.models.text import TextClassifier, TextSettings
    >>> model = TextClassifier(TextSettings(vocabulary=9, dim=8, hidden=16, layers=2, heads=2))
    >>> first, last = attention_maps(model, torch.tensor([[2, 5, 6, 3]]))
    >>> first.shape, last.shape
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 1, 4]))
    """
    wanted = None if layers is None else set(layers)
    with evaluating(model), torch.no_grad(), _Listener(wanted) as listener:
        model(*inputs, **named)
    if listener.calls == 0:
        raise ValueError(
            "the model made no call of torch's scaled_dot_product_attention, so there is nothing"
            ' to read. Hugging Face models need attn_implementation="sdpa"; of a compiled model'
            " give the original"
        )
    if wanted is not None and not wanted <= set(range(listener.calls)):
        raise ValueError(f"layers must be from 0 to {listener.calls - 1}, got {sorted(wanted)}")
    return listener.maps


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block, the model is in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def all_rows(model: nn.Module) -> Iterator[None]:
    """Within the block, the last layer of a model here has a row for every token, not only [CLS].

    Models of Hugging Face always have all rows, and are left as they are.

    >>> from mirrorhead.lab.models.text import TextClassifier, TextSettings
    >>> model = TextClassifier(TextSettings(vocabulary=9, dim=8, hidden=16, layers=1, heads=2))
    >>> with all_rows(model):
    ...     attention_maps(model, torch.tensor([[2, 5, 6, 3]]))[0].shape
    torch.Size([1, 2, 4, 4])
    """
    if not hasattr(model, "every_row"):
        yield
        return
    switched: Any = model
    before, switched.every_row = switched.every_row, True
    try:
        yield
    finally:
        switched.every_row = before


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(Q K' scale + mask); arguments as in torch's scaled_dot_product_attention.

    Weights are those before dropout. A query that may see nothing has weights of 0.
    """
    del value, dropout_p
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale  # (..., queries, keys)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    blind = (scores == -math.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(dim=-1).masked_fill(blind, 0)


class _Listener(TorchFunctionMode):
    """Computes attention weights beside every call of the fused attention."""

    def __init__(self, wanted: set[int] | None) -> None:
        super().__init__()
        self.wanted = wanted
        self.calls = 0
        self.maps: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if self.wanted is None or self.calls in self.wanted:
                self.maps.append(attention_weights(*args, **kwargs))
            self.calls += 1
        return func(*args, **kwargs)
