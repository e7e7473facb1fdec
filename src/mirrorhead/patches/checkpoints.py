"""Checkpoints read and written piece by piece: models, state dicts, safetensors files, folders.

A checkpoint of any size is read in pieces of 16 MiB at most, so that comparing two of them or
writing a third needs no more memory than some such pieces.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mirrorhead.patches import foreign

#: Names of dtypes in safetensors files. What is not here cannot be stored in one.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE_BYTES = 1 << 24
INDEX_FILE = "model.safetensors.index.json"

Source: TypeAlias = "nn.Module | Mapping[str, Tensor] | str | Path"
Target: TypeAlias = "nn.Module | MutableMapping[str, Tensor] | str | Path"


class PatchError(ValueError):
    """A checkpoint or patch that cannot be used; nothing was changed."""


def refuse(start: str, problems: Sequence[str]) -> None:
    """Raise a PatchError that names the first three problems and counts the rest, if any."""
    if problems:
        rest = f"; and {len(problems) - 3:,} more" if len(problems) > 3 else ""
        raise PatchError(start + "; ".join(problems[:3]) + rest)


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint says about a tensor before its numbers are read."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize

    @property
    def floating(self) -> bool:
        return DTYPES[self.dtype].is_floating_point

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Checkpoint:
    """Named tensors that can be read in pieces."""

    def __init__(self, label: str, infos: dict[str, TensorInfo], aliases: dict[str, str]) -> None:
        self.label = label  # how messages name the checkpoint
        self.infos = dict(sorted(infos.items()))
        # Names of tensors that share their memory with another (tied weights) -> the first name.
        self.aliases = aliases

    def tied(self, name: str) -> set[str]:
        """All names of the memory that a name stands for, itself included."""
        first = self.aliases.get(name, name)
        return {first, *(alias for alias, known in self.aliases.items() if known == first)}

    def same(self, name: str, other: str) -> bool:
        """Whether two names stand for one memory, or for the same bits."""
        return other in self.tied(name) or (
            self.infos[name] == self.infos[other] and self.digest(name) == self.digest(other)
        )

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The tensor's numbers in order: (position of the first, flat tensor on the CPU)."""
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """All of the tensor's numbers, flat, in memory of their own."""
        nothing = torch.zeros(0, dtype=DTYPES[self.infos[name].dtype])
        return torch.cat([nothing, *(piece for _, piece in self.pieces(name))])

    def digest(self, name: str) -> str:
        """SHA-256 of the tensor's bytes."""
        sha = hashlib.sha256()
        for _, piece in self.pieces(name):
            sha.update(raw(piece))
        return sha.hexdigest()


class MemoryCheckpoint(Checkpoint):
    """A model or a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor], label: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        infos: dict[str, TensorInfo] = {}
        aliases: dict[str, str] = {}
        first: dict[Any, str] = {}
        for name, tensor in tensors.items():
            _check_tensor(name, tensor, label)
            self.tensors[name] = tensor = tensor.detach()
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            known = first.setdefault(place if tensor.numel() else name, name)
            if known != name:
                aliases[name] = known
            infos[name] = TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape))
        super().__init__(label, infos, aliases)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        flat = self.tensors[name].reshape(-1)
        length = PIECE_BYTES // flat.element_size()
        for start in range(0, flat.numel(), length):
            yield start, flat[start : start + length].cpu()


class FileCheckpoint(Checkpoint):
    """One safetensors file, or the files of a Hugging Face folder."""

    def __init__(self, files: list[Path], label: str) -> None:
        self.files = files
        self.metadata: dict[Path, dict[str, str]] = {}
        self._places: dict[str, tuple[Path, int]] = {}  # name -> file, offset of its first byte
        infos: dict[str, TensorInfo] = {}
        for file in files:
            tensors, self.metadata[file] = read_header(file)
            for name, (info, offset) in tensors.items():
                if name in infos:
                    raise PatchError(f"{label}: tensor {name!r} is in more than one file")
                infos[name] = info
                self._places[name] = file, offset
        super().__init__(label, infos, {})

    def names_in(self, file: Path) -> list[str]:
        """Names of the tensors in one of the files, in the order of their bytes."""
        inside = [(place[1], name) for name, place in self._places.items() if place[0] == file]
        return [name for _, name in sorted(inside)]

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        info = self.infos[name]
        dtype = DTYPES[info.dtype]
        path, offset = self._places[name]
        length = PIECE_BYTES // dtype.itemsize
        with path.open("rb") as file:
            file.seek(offset)
            for start in range(0, info.size, length):
                piece = torch.empty(min(length, info.size - start), dtype=dtype)
                if file.readinto(raw(piece)) < piece.nbytes:
                    raise PatchError(f"{path} ends too early")
                yield start, piece


def open_checkpoint(source: Source, argument: str) -> Checkpoint:
    """Open a checkpoint for reading; messages name it by `argument`, such as "base"."""
    if isinstance(source, nn.Module):
        return MemoryCheckpoint(source.state_dict(keep_vars=False), argument)
    if isinstance(source, Mapping):
        return MemoryCheckpoint(source, argument)
    if not isinstance(source, str | Path):
        raise TypeError(
            f"{argument} must be a model, a state dict, or the path of a safetensors file or a"
            f" Hugging Face folder, got {type(source).__name__}"
        )
    path = Path(source)
    return FileCheckpoint(checkpoint_files(path), f"{argument} {path}")


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the file itself, or those of a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise PatchError(f"{path} does not exist")
    index, single = path / INDEX_FILE, path / "model.safetensors"
    if not index.is_file() and not single.is_file():
        raise PatchError(foreign.about_folder(path, f"{single.name} nor {INDEX_FILE}"))
    if not index.is_file():
        return [single]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (KeyError, TypeError, AttributeError):
        raise PatchError(f'{index} has no "weight_map" from tensors to files') from None
    except (OSError, ValueError, RecursionError) as error:
        raise PatchError(f"{index} cannot be read: {error}") from error
    for name in names:
        # A name with a folder in it could lead out of the checkpoint.
        if not isinstance(name, str) or Path(name).name != name:
            raise PatchError(f"{index} names {name!r}, which is not a file name")
        if not (path / name).is_file():
            raise PatchError(f"{path / name} is missing; {INDEX_FILE} names it")
    return sorted(path / name for name in names)


def read_header(path: Path) -> tuple[dict[str, tuple[TensorInfo, int]], dict[str, str]]:
    """Each tensor's dtype and shape and where its bytes start in the file; the metadata."""
    try:
        # safetensors checks the header against the file's length, overlaps and its own limits.
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        known = foreign.about_file(path)
        raise PatchError(
            known or f"{path} cannot be read as a safetensors file: {error}"
        ) from error
    metadata = header.pop("__metadata__", None) or {}
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise PatchError(f"{path}: tensor {name!r} has dtype {entry['dtype']}: not supported")
        info = TensorInfo(entry["dtype"], tuple(entry["shape"]))
        found[name] = info, 8 + length + entry["data_offsets"][0]
    return found, metadata


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers or bytes, for comparisons that know -0 from 0."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(views[tensor.element_size()])


def has_nan(tensor: Tensor) -> bool:
    """Whether one of the numbers is NaN."""
    # 8-bit floats as float32: torch compares them in no other way.
    numbers = tensor.float() if tensor.element_size() == 1 else tensor
    return tensor.is_floating_point() and bool(numbers.isnan().any())


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a flat, contiguous CPU tensor, little-endian as in the file."""
    # A tensor of one number counts as contiguous whatever its stride is.
    flat = tensor.contiguous().as_strided(tensor.shape, (1,))
    return flat.view(torch.uint8).numpy().data


def write_header(file: IO[bytes], infos: dict[str, TensorInfo], metadata: dict[str, str]) -> None:
    """Write the header of a safetensors file whose tensors will follow in the order of `infos`."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, info in infos.items():
        end = offset + info.bytes
        place = {"shape": list(info.shape), "data_offsets": [offset, end]}
        header[name] = {"dtype": info.dtype, **place}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the data to 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)


def check_room(folder: Path, needed: int) -> None:
    """Refuse before anything is written if the disk has no room for `needed` bytes."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise PatchError(f"{folder}: {needed:,} bytes are needed, {free:,} are free on the disk")


def _check_tensor(name: Any, tensor: Any, label: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{label}: {name!r} is a {type(tensor).__name__}, not a tensor")
    if tensor.device.type == "meta":
        raise PatchError(f"{label}: tensor {name!r} is on the meta device and has no numbers")
    if tensor.layout != torch.strided or type(tensor).__name__ == "DTensor":
        raise PatchError(
            f"{label}: tensor {name!r} is sparse or sharded; gather it first, as with"
            " torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)"
        )
    if tensor.dtype not in NAMES:
        raise PatchError(f"{label}: tensor {name!r} has dtype {tensor.dtype}: not supported")
