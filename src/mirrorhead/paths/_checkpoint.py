"""A descent on disk: enough to resume it bit for bit after a kill. Plain arrays, never pickle."""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from mirrorhead._files import remove_leftovers_of, sha256_of, write_atomically

VERSION = 1

Tensors = dict[str, Tensor]  # by the name of a parameter, or of a part of its state


@dataclass
class Progress:
    """How far a run has come: the step, the state of every parameter, the recorded weights."""

    step: int
    states: dict[str, Tensors]
    records: dict[int, Tensors]


def fingerprint(tensors: dict[str, Tensor], options: dict[str, Any]) -> str:
    """A hash of everything that determines a run, except its length."""
    parts = [json.dumps([VERSION, options], sort_keys=True).encode()]
    for name, tensor in sorted(tensors.items()):
        array = tensor.detach().cpu().contiguous().numpy()
        parts += [f"{name} {array.dtype} {array.shape}".encode(), array.tobytes()]
    return sha256_of(*parts)


def save_checkpoint(file: File, key: str, progress: Progress) -> None:
    """Write the progress so that the file is the old one or the new one, never a part."""
    arrays = {"key": np.array(key), "step": np.array(progress.step)}
    for name, state in progress.states.items():
        arrays |= {f"state/{name}/{part}": x.cpu().numpy() for part, x in state.items()}
    for k, weights in progress.records.items():
        arrays |= {f"record/{k}/{name}": w.cpu().numpy() for name, w in weights.items()}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    write_atomically(file, buffer.getvalue())


def load_checkpoint(file: File, key: str, start: Progress, weights: Tensors) -> Progress | None:
    """The progress of the run with this key; None where there is no file.

    `start` and `weights` show what a state and a record of this run look like. ValueError for
    the checkpoint of another run, and for a file that is no checkpoint or a damaged one: the C
    loop trusts the shapes. Nobody is told to delete it: it may be a file of their own.
    """
    # Temporary files of this checkpoint, which a killed process could not remove.
    remove_leftovers_of(file)
    if not os.path.exists(file):
        return None
    with open(file, "rb") as stream:
        arrays = _arrays(stream)
    if not {"key", "step"} <= arrays.keys():
        raise ValueError(
            f"{file} is not a checkpoint of descend, or it is damaged: give another file name"
        )
    if str(arrays.pop("key")) != key:
        raise ValueError(
            f"checkpoint {file} belongs to another run, with other data, scores, loss, start, p, lr"
            " or rule: give another file name"
        )
    try:
        return _unpack(arrays, start, weights)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"checkpoint {file} is damaged ({error}): give another file name"
        ) from None


def _arrays(stream: BinaryIO) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint; none where it is another file, or one that cannot be read."""
    try:
        # np.load would take other files for pickles, and say how to load them all the same.
        with zipfile.ZipFile(stream) as entries:
            names = [name.removesuffix(".npy") for name in entries.namelist()]
            if not {"key", "step"} <= set(names):
                return {}
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as stored:
            return {name: stored[name] for name in names}
    except (ValueError, KeyError, EOFError, OSError, RuntimeError, zipfile.BadZipFile):
        return {}


def _unpack(arrays: dict[str, np.ndarray], start: Progress, weights: Tensors) -> Progress:
    step = int(arrays.pop("step"))
    if step < 0:
        raise ValueError(f"step is {step}")
    states = {
        name: {part: _tensor(arrays, f"state/{name}/{part}", x) for part, x in state.items()}
        for name, state in start.states.items()
    }
    steps = {int(entry.split("/")[1]) for entry in arrays if entry.startswith("record/")}
    records = {
        k: {name: _tensor(arrays, f"record/{k}/{name}", x) for name, x in weights.items()}
        for k in sorted(steps)
    }
    return Progress(step, states, records)


def _tensor(arrays: dict[str, np.ndarray], name: str, like: Tensor) -> Tensor:
    if name not in arrays:
        raise ValueError(f"{name} is missing")
    x = torch.from_numpy(arrays[name])
    found, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (x, like))
    if found != expected:
        raise ValueError(f"{name} is {found} instead of {expected}")
    return x.to(like.device)
