"""Sparsity of weights, and pruning of the smallest ones (Figure 8)."""

from __future__ import annotations

import copy
import math
import re

import torch
from torch import Tensor, nn

#: The paper's threshold: weights of this size and above are shown in Figure 8. And the width of
#: its models.
LARGE, WIDTH = 0.06, 384


def large_from(width: int) -> float:
    """Return the size from which a weight counts as large in a model of this width.

    Initial weights are uniform within 1/sqrt(width). At the paper's width all of them are below
    its threshold, so Figure 8 counts weights that training made large. The same threshold would
    lie among the initial weights of a narrower model, so it is scaled as they are.

    >>> large_from(384), round(large_from(64), 3)
    (0.06, 0.147)
    """
    return LARGE * math.sqrt(WIDTH / width)


def attention_weights_by_kind(model: nn.Module) -> dict[str, Tensor]:
    """All weights of the query, key and value maps of a model, flat, over its layers.

    They are found by name: ...query.weight, ...key.weight and ...value.weight, as in the models
    here and in BERT.
    """
    found: dict[str, list[Tensor]] = {"key": [], "query": [], "value": []}
    for name, param in model.named_parameters():
        match = re.search(r"\b(key|query|value)\.weight$", name)
        if match:
            found[match[1]].append(param.detach().flatten())
    if not all(found.values()):
        raise ValueError("the model has no parameters named query, key and value .weight")
    return {kind: torch.cat(parts) for kind, parts in found.items()}


def count_large(weights: Tensor, threshold: float = LARGE) -> int:
    """How many weights are at least `threshold` in size."""
    return int((weights.abs() >= threshold).sum())


def gini(weights: Tensor) -> float:
    """Gini index of the sizes: 0 if all are equal, near 1 if a few have everything.

    With a_(1) <= ... <= a_(n):  G = 1 - 2 sum_i a_(i) / sum(a) (n - i + 1/2) / n.

    >>> round(gini(torch.tensor([1.0, 1.0, 1.0, 1.0])), 6), gini(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    (0.0, 0.75)
    """
    sizes = _sizes(weights).sort().values
    n = len(sizes)
    rank = torch.arange(1, n + 1, dtype=sizes.dtype, device=sizes.device)
    share = sizes / sizes.sum()
    return float(1 - 2 * (share * (n - rank + 0.5) / n).sum())


def hoyer(weights: Tensor) -> float:
    """Hoyer's measure, (sqrt(n) - ||w||_1 / ||w||_2) / (sqrt(n) - 1): 0 if flat, 1 if one-hot.

    >>> hoyer(torch.tensor([0.0, -3.0, 0.0, 0.0])), hoyer(torch.tensor([2.0, -2.0, 2.0, 2.0]))
    (1.0, 0.0)
    """
    sizes = _sizes(weights)
    if len(sizes) < 2:
        raise ValueError("weights must have at least 2 entries")
    root = len(sizes) ** 0.5
    return float((root - sizes.sum() / sizes.norm()) / (root - 1))


def pruned(model: nn.Module, share: float) -> nn.Module:
    """A copy of the model in which the smallest `share` of every weight matrix is 0.

    Vectors (gains and biases) are left as they are.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be from 0 to below 1, got {share}")
    small = copy.deepcopy(model)
    with torch.no_grad():
        for param in small.parameters():
            if param.ndim >= 2:
                # By rank, not by a threshold: equal weights must not go all together.
                order = param.abs().flatten().argsort(stable=True)
                param.view(-1)[order[: int(share * param.numel())]] = 0
    return small


def _sizes(weights: Tensor) -> Tensor:
    """Absolute values in float64, largest 1: no power of them overflows."""
    sizes = weights.detach().double().abs().flatten()
    if not sizes.isfinite().all():
        raise ValueError("weights must be finite")
    if not (sizes > 0).any():
        raise ValueError("weights must not be all zero")
    return sizes / sizes.max()
