"""The patch file: how a patch is laid out in a safetensors file, and read back without trust.

docs/patches.md describes the format byte by byte. In short: one metadata entry,
"mirrorhead.patch", holds JSON with the version and one record for each tensor; the tensor "index"
holds the gaps between changed positions as LEB128 numbers; "values.DTYPE" and "originals.DTYPE"
hold the weights after and before, in the tensors' own dtypes.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from mirrorhead.patches.checkpoints import (
    DTYPES,
    FileCheckpoint,
    PatchError,
    TensorInfo,
    bits,
    has_nan,
    read_header,
)
from mirrorhead.patches.model_config import Config, checked

KEY = "mirrorhead.patch"
VERSION = 1
_PIECE = 1 << 16  # bytes of the index that are decoded at a time


@dataclass(frozen=True, eq=False)
class TensorPatch:
    """What a patch does to one tensor."""

    info: TensorInfo
    index: Tensor | None  # (count,), int64, ascending positions in the flat tensor; None: all
    values: Tensor  # (count,), what stands there after `apply`
    originals: Tensor | None  # (count,), what stands there in the base; None if not known
    #: Hash of the base's tensor: SHA-256, or a fingerprint if the patch is of a `WeightSync`. None
    #: if the base has no such tensor.
    base: str | None
    result: str | None  # the same of the patched tensor; None if not known
    #: Other names of the same tensor. A checkpoint may have one of them, or a copy for each.
    tied: tuple[str, ...] = ()

    @property
    def added(self) -> bool:
        """Whether the base has no such tensor."""
        return self.base is None

    def before(self) -> Tensor:
        """`originals`, which must be known."""
        if self.originals is None:
            raise PatchError(
                "a patch was saved without the base's values; use with_originals(base)"
            )
        return self.originals


def encode(tensors: dict[str, TensorPatch], weights: int, config: Config, originals: bool) -> bytes:
    """The bytes of a patch file. The same patch always gives the same bytes."""
    parts: dict[str, list[Tensor]] = {}
    records: list[dict[str, Any]] = []
    for name, patch in tensors.items():
        dtype = patch.info.dtype
        parts.setdefault(f"values.{dtype}", []).append(patch.values)
        if originals and patch.originals is not None:
            parts.setdefault(f"originals.{dtype}", []).append(patch.originals)
        records.append(
            {
                "name": name,
                "dtype": dtype,
                "shape": list(patch.info.shape),
                "count": None if patch.index is None else len(patch.index),
                "base": patch.base,
                "result": patch.result,
            }
            | ({"tied": list(patch.tied)} if patch.tied else {})
        )
    content = {"version": VERSION, "weights": weights, "tensors": records}
    content |= {"config": config} if config else {}
    stored = {name: torch.cat(pieces) for name, pieces in parts.items()}
    gaps = encode_gaps([patch.index for patch in tensors.values() if patch.index is not None])
    stored["index"] = torch.from_numpy(gaps)
    return save(stored, {KEY: json.dumps(content, separators=(",", ":"), ensure_ascii=False)})


def check_destination(path: Path) -> None:
    """Refuse to write a patch over anything but a patch, or into a folder that is not there."""
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    if path.is_dir():
        raise PatchError(f"file must be the path of a file, got the folder {path}")
    if path.exists() and not is_patch(path):
        raise PatchError(f"{path} exists and is not a patch: it is not overwritten")


def is_patch(path: Path) -> bool:
    """Whether this is a patch file, by its header."""
    try:
        return KEY in read_header(path)[1]
    except PatchError:
        return False


def read_hashes(path: Path) -> tuple[dict[str, str | None], dict[str, str | None], bool]:
    """The hash of each name before and after, from the header alone; whether it has originals."""
    file = FileCheckpoint([path], str(path))
    with _damage_of(path):
        records = _content(file)["tensors"]
        base: dict[str, str | None] = {}
        result: dict[str, str | None] = {}
        for record in records:
            for name in (record["name"], *record.get("tied", [])):
                _name(name, base)
                base[name], result[name] = _hash(record["base"]), _hash(record["result"])
        stored = any(name.startswith("originals.") for name in file.infos)
        return base, result, stored and None not in base.values()


def decode(path: Path) -> tuple[dict[str, TensorPatch], int, dict[str, Any]]:
    """A patch file's tensors, the number of weights of the base, and entries of config.json.

    Nothing in the file is trusted: what is allocated is at most some tens of times its length.
    """
    file = FileCheckpoint([path], str(path))
    with _damage_of(path):
        content = _content(file)
        weights = _natural(content["weights"], "weights")
        return _decoded(file, content), weights, _config(content.get("config", {}))


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Name the file in which something is malformed."""
    try:
        yield
    except (KeyError, TypeError, _Malformed) as error:
        raise PatchError(f"{path} is damaged: {error}") from error


def _content(file: FileCheckpoint) -> Any:
    """What the metadata says, in a version that this mirrorhead reads."""
    (path,) = file.files
    try:
        content = json.loads(file.metadata[path][KEY])
    except KeyError:
        raise PatchError(f"{path} is not a patch: its metadata has no {KEY!r}") from None
    except (ValueError, RecursionError) as error:
        raise PatchError(f"{path}: the metadata is not JSON: {error}") from error
    if type(content["version"]) is not int or content["version"] != VERSION:  # True is 1 too
        raise PatchError(
            f"{path} has version {content['version']!r}; this mirrorhead reads {VERSION}"
        )
    return content


class _Malformed(Exception):
    """What is wrong with a patch file; `decode` adds which file it is."""


def _decoded(file: FileCheckpoint, content: Any) -> dict[str, TensorPatch]:
    if "index" not in file.infos:
        raise _Malformed("it has no tensor 'index'")
    for name, info in file.infos.items():
        kind, _, dtype = name.partition(".")
        expected = dtype if kind in ("values", "originals") else "U8"
        if info.dtype != expected or kind not in ("values", "originals", "index"):
            raise _Malformed(f"tensor {name!r} does not belong there")
        if len(info.shape) != 1:
            raise _Malformed(f"tensor {name!r} has shape {list(info.shape)}, not one axis")
    left = {name: file.read(name) for name in file.infos}  # what has not been taken yet
    gaps = decode_gaps(left.pop("index").numpy())
    reversible = any(name.startswith("originals.") for name in left)
    tensors: dict[str, TensorPatch] = {}
    taken = 0
    for record in content["tensors"]:
        name, info = _name(record["name"], tensors), _info(record)
        index, count = None, info.size
        if record["count"] is not None:
            count = _natural(record["count"], "count")
            index = positions(gaps[taken : taken + count], info.size, name)
            taken += count
            if len(index) != count:
                raise _Malformed(f"the index ends before tensor {name!r}")
        base, result = _hash(record["base"]), _hash(record["result"])
        if base is not None and result is not None and len(base) != len(result):
            raise _Malformed(f"tensor {name!r} has hashes of two kinds")
        if base is None and index is not None:
            raise _Malformed(f"tensor {name!r} is new, but not whole")
        values = _take(left, f"values.{info.dtype}", count)
        old = base is not None and reversible
        originals = _take(left, f"originals.{info.dtype}", count) if old else None
        parts = [part for part in (values, originals) if part is not None]
        if index is None and old:  # NaN may stay as it is
            changed = bits(parts[0]) != bits(parts[1])
            parts = [part[changed] for part in parts]
        elif index is None and base is not None:
            parts = []  # what changes is not known; the hashes decide
        if any(map(has_nan, parts)):
            raise _Malformed(f"tensor {name!r} contains NaN")
        tied = tuple(_name(other, {}) for other in record.get("tied", []))
        tensors[name] = TensorPatch(info, index, values, originals, base, result, tied)
    if taken != len(gaps) or any(len(data) for data in left.values()):
        raise _Malformed("it holds more numbers than its tensors need")
    names = [*tensors, *(other for patch in tensors.values() for other in patch.tied)]
    if len(set(names)) < len(names):
        raise _Malformed("two of its tensors have the same name")
    return tensors


def encode_gaps(indices: Sequence[Tensor]) -> np.ndarray:
    """Ascending positions as LEB128 bytes: each tensor's first position, then gap - 1.

    A number below 128 takes one byte, below 16,384 two: 7 bits each, the lowest first; the
    eighth bit says that more follow.

    >>> encode_gaps([torch.tensor([3, 4, 304])]).tolist()
    [3, 0, 171, 2]
    """
    parts = [np.diff(index.numpy(), prepend=-1) - 1 for index in indices]
    gaps = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.uint64)
    lengths = np.ones(len(gaps), np.int64)
    for k in range(1, 9):
        lengths += gaps >= np.uint64(1) << np.uint64(7 * k)
    starts = np.cumsum(lengths) - lengths
    out = np.zeros(int(lengths.sum()), np.uint8)
    for k in range(int(lengths.max(initial=0))):
        here = lengths > k
        digit = (gaps[here] >> np.uint64(7 * k)) & np.uint64(0x7F)
        more = np.where(lengths[here] > k + 1, np.uint8(0x80), np.uint8(0))
        out[starts[here] + k] = digit.astype(np.uint8) | more
    return out


def decode_gaps(data: np.ndarray) -> np.ndarray:
    """The numbers in LEB128 bytes, each below 2^63."""
    values = np.zeros(np.count_nonzero(data < 0x80), np.int64)
    done = start = 0
    while start < len(data):  # in pieces, since a byte of the index takes dozens while it is read
        piece = data[start : start + _PIECE]
        last = np.flatnonzero(piece < 0x80)
        if not len(last):
            raise _Malformed("the index ends inside a number, or holds one above 2^63")
        starts = np.concatenate([[0], last[:-1] + 1])
        lengths = last - starts + 1
        if lengths.max() > 9:
            raise _Malformed("the index holds a number above 2^63")
        if np.any((lengths > 1) & (piece[last] == 0)):
            raise _Malformed("the index holds a number with needless bytes")
        numbers = values[done : done + len(last)]
        for k in range(int(lengths.max())):
            here = lengths > k
            numbers[here] |= (piece[starts[here] + k].astype(np.int64) & 0x7F) << (7 * k)
        done += len(last)
        start += int(last[-1]) + 1
    return values


def positions(gaps: np.ndarray, size: int, name: str) -> Tensor:
    """Positions from gaps, in the gaps' memory; each must be inside a tensor of `size` numbers."""
    if np.any(gaps >= size):
        raise _Malformed(f"a position in tensor {name!r} is outside of it")
    # Each gap is below 2^62 here, so a sum that overflows is below the one before it. Their
    # difference would overflow too, and be positive.
    gaps += 1
    index = np.cumsum(gaps, out=gaps)
    index -= 1
    if len(index) and (np.any(index[1:] <= index[:-1]) or index[-1] >= size):
        raise _Malformed(f"a position in tensor {name!r} is outside of it")
    return torch.from_numpy(index)


def _take(left: dict[str, Tensor], name: str, count: int) -> Tensor:
    """Take the first numbers that are left of a stored tensor."""
    if count == 0:
        return torch.zeros(0, dtype=DTYPES[name.partition(".")[2]])
    if name not in left or len(left[name]) < count:
        raise _Malformed(f"tensor {name!r} holds fewer than the {count:,} numbers that it needs")
    taken, left[name] = left[name][:count], left[name][count:]
    return taken


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise _Malformed(f"{what} is {value!r}, not a number from 0 to 2^62")
    return value


def _name(name: Any, tensors: Mapping[str, Any]) -> str:
    # Names are printed: one with an escape sequence could write anything to a terminal.
    if not isinstance(name, str) or not name.isprintable() or name in tensors:
        raise _Malformed(f"{name!r} is not a name, or is there twice")
    return name


def _info(record: Any) -> TensorInfo:
    shape = record["shape"]
    if record["dtype"] not in DTYPES or not isinstance(shape, list) or len(shape) > 64:
        raise _Malformed(f"tensor {record['name']!r} has no valid dtype and shape")
    info = TensorInfo(record["dtype"], tuple(_natural(length, "a length") for length in shape))
    _natural(info.size, "the size of a tensor")
    return info


def _config(value: Any) -> dict[str, Any]:
    try:
        return checked(value)
    except ValueError as error:
        raise _Malformed(str(error)) from error


def _hash(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}|[0-9a-f]{32}", value):
        raise _Malformed(f"{value!r} is not a SHA-256 or a fingerprint in hexadecimal digits")
    return value
