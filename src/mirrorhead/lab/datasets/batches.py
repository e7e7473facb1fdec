"""The order of examples: shuffled, in batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

#: Batches that are sorted by length together: little padding, and still enough randomness.
POOL = 64


class Examples(Protocol):
    """The interface of training data: `Encoded`, `Pictures`, or a class of your own."""

    @property
    def labels(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]: ...


def epoch_batches(
    indices: np.ndarray,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    lengths: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return every index once, in batches; the order depends on the arguments alone.

    So a run that was stopped in the middle of an epoch can resume there. With
    `lengths` (of all examples), pools of 64 batches are sorted by length before they are cut
    into batches, and the batches are shuffled after.

    >>> [b.tolist() for b in epoch_batches(np.arange(5), 2, seed=0, epoch=0)]
    [[2, 4], [3, 0], [1]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(np.asarray(indices))
    if lengths is None:
        return _cut(order, batch_size)
    batches: list[np.ndarray] = []
    for pool in _cut(order, POOL * batch_size):
        batches += _cut(pool[np.argsort(lengths[pool], kind="stable")], batch_size)
    return [batches[i] for i in rng.permutation(len(batches))]


def even_batches(
    indices: np.ndarray, batch_size: int, lengths: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return every index once, sorted by length if given: the order for evaluation."""
    indices = np.asarray(indices)
    if lengths is not None:
        indices = indices[np.argsort(lengths[indices], kind="stable")]
    return _cut(indices, batch_size)


def pieces(batch: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Cut a batch into pieces of at most `tokens` tokens with padding, or of one text.

    >>> [b.tolist() for b in pieces(np.array([0, 1, 2]), np.array([5, 6, 7]), 14)]
    [[0, 1], [2]]
    """
    return _cut(batch, max(1, tokens // int(lengths[batch].max())))


def _cut(order: np.ndarray, size: int) -> list[np.ndarray]:
    return [order[i : i + size] for i in range(0, len(order), size)]
