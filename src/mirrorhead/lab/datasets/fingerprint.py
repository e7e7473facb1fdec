"""A short name for a set of examples, by which a run recognises the data it was started with."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from mirrorhead._files import sha256_of
from mirrorhead.lab.datasets.batches import Examples
from mirrorhead.lab.datasets.cifar10 import Pictures
from mirrorhead.lab.datasets.encoded import Encoded

#: Examples of a user's own class that are read; all of them might take an hour to decode.
SAMPLE = 2_048
CHUNK = 64


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
    inputs = _inputs(examples)
    return found if inputs is None else f"{found}; inputs {inputs[:16]}"


def _inputs(examples: Examples) -> str | None:
    if isinstance(examples, Encoded):
        return sha256_of(np.ascontiguousarray(examples.ids).data)
    if isinstance(examples, Pictures):
        return sha256_of(np.ascontiguousarray(examples.pixels).data)
    count = min(len(examples), SAMPLE)
    chosen = np.unique(np.linspace(0, len(examples) - 1, count).round().astype(np.int64))
    parts = [chosen[i : i + CHUNK] for i in range(0, len(chosen), CHUNK)]
    with torch.random.fork_rng(devices=()):  # reading must not move the run's random numbers
        first = _read(examples, parts[:1])
        if first != _read(examples, parts[:1]):
            return None
        return _read(examples, parts)


def _read(examples: Examples, parts: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        inputs = examples.batch(part)[0].detach().cpu().contiguous()
        digest.update(f"{inputs.dtype} {tuple(inputs.shape)}\n".encode())
        digest.update(inputs.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
