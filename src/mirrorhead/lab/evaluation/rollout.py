"""Attention maps, chosen from or taken together over layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pick(maps: Sequence[Tensor], layer: int = -1, heads: Sequence[int] | None = None) -> Tensor:
    """One layer of `attention_maps`, some of its heads or all: (b, heads, queries, keys).

    >>> maps = [torch.zeros(1, 4, 7, 7), torch.ones(1, 4, 1, 7)]
    >>> pick(maps, layer=0, heads=[1, 3]).shape
    torch.Size([1, 2, 7, 7])
    """
    if not -len(maps) <= layer < len(maps):
        raise ValueError(
            f"layer must be from 0 to {len(maps) - 1}, or -1 for the last, got {layer}"
        )
    chosen = maps[layer]
    if heads is None:
        return chosen
    if not heads or not all(0 <= head < chosen.shape[1] for head in heads):
        raise ValueError(
            f"heads must be some numbers from 0 to {chosen.shape[1] - 1}, got {list(heads)}"
        )
    return chosen[:, list(heads)]


def rollout(maps: Sequence[Tensor]) -> Tensor:
    """Attention rollout (Abnar and Zuidema 2020): what tokens of the text reach each token.

    R = B_L ... B_1 with B_l = (A_l + I) / 2, A_l the mean over heads: half of a token goes on
    beside the attention. (b, T, T); rows sum to 1.

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
