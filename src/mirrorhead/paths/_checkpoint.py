"""A run on disk: enough to go on bit for bit after a kill. Plain arrays, never pickle."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path as File
from typing import Any

import numpy as np
from torch import Tensor

from mirrorhead._files import write_atomically

VERSION = 1


def fingerprint(tensors: dict[str, Tensor | None], options: dict[str, Any]) -> str:
    """A hash of everything that decides a run, except its length."""
    digest = hashlib.sha256(json.dumps([VERSION, options], sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        array = np.zeros(0) if tensor is None else tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def save_checkpoint(file: str | os.PathLike[str], key: str, arrays: dict[str, np.ndarray]) -> None:
    """Write the arrays so that the file is the old one or the new one, never a part."""
    buffer = io.BytesIO()
    np.savez(buffer, key=np.array(key), **arrays)  # pyright: ignore[reportArgumentType]
    write_atomically(File(file), buffer.getvalue())


def load_checkpoint(file: str | os.PathLike[str], key: str) -> dict[str, np.ndarray] | None:
    """The arrays of that run, None where there is no file, ValueError for another run's."""
    if not os.path.exists(file):
        return None
    try:
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        found = str(arrays.pop("key"))
    except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"checkpoint {os.fspath(file)} cannot be read ({error}); delete it to start anew"
        ) from None
    if found != key:
        raise ValueError(
            f"checkpoint {os.fspath(file)} belongs to another run: other data, start, p, lr or"
            " rule. Give another file, or delete it"
        )
    return arrays
