"""Training data: what a run asks of them, their order in batches, and how it knows them again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mirrorhead._files import sha256_of
from mirrorhead_lab.datasets.cifar10 import Pictures
from mirrorhead_lab.datasets.encoded import Encoded

#: Batches that are sorted by length together: little padding, and still enough randomness.
POOL = 64
#: Examples of a user's own class that `fingerprint` reads; all might take an hour to decode.
SAMPLE = 2_048


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

    So a run that was stopped in the middle of an epoch can resume there. With `lengths` (of all
    examples), pools of 64 batches are sorted by length, cut into batches, and these are shuffled.

    >>> [b.tolist() for b in epoch_batches(np.arange(5), 2, seed=0, epoch=0)]
    [[2, 4], [3, 0], [1]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(np.asarray(indices))
    if lengths is None:
        return _cut(order, batch_size)
    pools = _cut(order, POOL * batch_size)
    batches = [batch for pool in pools for batch in even_batches(pool, batch_size, lengths)]
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


def fingerprint(examples: Examples) -> str:
    """Return the number of examples and hashes of their labels and lengths, and of their inputs.

    The inputs of `Encoded` and `Pictures` are hashed as a whole. Of any other class up to 2,048
    examples are read through `batch`, at equal distances from the first to the last; if reading
    them twice gives different inputs (random augmentation), inputs are left out.
    """
    content = np.asarray(examples.labels).tobytes()
    lengths = getattr(examples, "lengths", None)
    if lengths is not None:
        content += np.asarray(lengths).tobytes()
    found = f"{len(examples)} examples, {sha256_of(content)[:16]}"
    if isinstance(examples, Encoded | Pictures):
        whole = examples.ids if isinstance(examples, Encoded) else examples.pixels
        return f"{found}; inputs {sha256_of(np.ascontiguousarray(whole).data)[:16]}"
    count = min(len(examples), SAMPLE)
    chosen = np.unique(np.linspace(0, len(examples) - 1, count).round().astype(np.int64))
    parts = _cut(chosen, 64)
    with torch.random.fork_rng(devices=()):  # reading must not move the run's random numbers
        same = _read(examples, parts[:1]) == _read(examples, parts[:1])
        return f"{found}; inputs {_read(examples, parts)[:16]}" if same else found


def _read(examples: Examples, parts: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        inputs = examples.batch(part)[0].detach().cpu().contiguous()
        digest.update(f"{inputs.dtype} {tuple(inputs.shape)}\n".encode())
        digest.update(inputs.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
