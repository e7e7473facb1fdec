"""How flat attention is."""

from __future__ import annotations

import torch
from torch import Tensor


def normalized_entropy(weights: Tensor, seen: Tensor | None = None) -> Tensor:
    """-sum_t a_t log a_t / log T of each row of attention: 1 if flat, 0 if one-hot.

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
