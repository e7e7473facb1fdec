"""A checkpoint with a patch's values laid over it, piece by piece: the checks, a copy on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from mirrorhead._files import new_file, new_folder, sha256_of, write_json
from mirrorhead.patches import fingerprint
from mirrorhead.patches.checkpoints import (
    INDEX_FILE,
    Checkpoint,
    FileCheckpoint,
    PatchError,
    TensorInfo,
    bits,
    check_room,
    raw,
    refuse,
    write_header,
)
from mirrorhead.patches.file_format import TensorPatch
from mirrorhead.patches.fingerprint import Fingerprint
from mirrorhead.patches.model_config import Files

#: Weights in other formats, which would be stale beside the copy.
_OTHER_WEIGHTS = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors"}

Patches = Mapping[str, TensorPatch]
Step = Callable[[int], None]  # called with a number of bytes that are done


class Edit(NamedTuple):
    """What to change in a checkpoint."""

    values: Mapping[str, tuple[Tensor | None, Tensor]]  # name -> positions (None: all), values
    added: Mapping[str, TensorInfo]  # new tensors, whose content is in `values`
    removed: Collection[str]
    files: Files  # other files of the folder


def overlaid(start: int, piece: Tensor, index: Tensor | None, values: Tensor) -> Tensor:
    """A copy of the piece at `start` of a flat tensor, with the values at these positions."""
    here = _span(start, piece, index)
    if index is None:
        return values[here]
    piece = piece.clone()
    piece[index[here] - start] = values[here]
    return piece


def picked(start: int, piece: Tensor, index: Tensor | None) -> Tensor:
    """The numbers of the piece at `start` of a flat tensor that stand at these positions."""
    return piece if index is None else piece[index[_span(start, piece, index)] - start]


def _span(start: int, piece: Tensor, index: Tensor | None) -> slice:
    """Which of the ascending positions (None: all) lie in the piece."""
    ends = torch.tensor([start, start + len(piece)])
    return slice(*(ends if index is None else torch.searchsorted(index, ends)).tolist())


def digest(source: Checkpoint, name: str, like: str | None) -> str:
    """Hash of a tensor: of the kind of `like`, or SHA-256."""
    if like is not None and len(like) == fingerprint.DIGITS:
        return str(Fingerprint.total(Fingerprint.of(piece, k) for k, piece in source.pieces(name)))
    return source.digest(name)


def digests(
    source: Checkpoint, name: str, index: Tensor | None, values: Tensor, like: str | None = None
) -> tuple[str, str]:
    """Hash of a tensor as it is, and with the values in it: of the kind of `like`, or SHA-256."""
    if like is not None and len(like) == fingerprint.DIGITS:
        total = change = Fingerprint()
        for start, piece in source.pieces(name):
            here = _span(start, piece, index)
            places = start if index is None else index[here]
            total += Fingerprint.of(piece, start)
            change += Fingerprint.of(values[here], places)
            change -= Fingerprint.of(picked(start, piece, index), places)
        return str(total), str(total + change)
    plain, changed = hashlib.sha256(), hashlib.sha256()
    for start, piece in source.pieces(name):
        plain.update(raw(piece))
        changed.update(raw(overlaid(start, piece, index, values)))
    return plain.hexdigest(), changed.hexdigest()


def by_target_name(target: Checkpoint, tensors: Patches) -> dict[str, TensorPatch]:
    """The tensors by the names that the target has for them.

    Where the target has a copy for each of several tied names, all of them get the patch. Where
    they share memory there, one does.
    """
    found: dict[str, TensorPatch] = {}
    for name, patch in tensors.items():
        there = [other for other in (name, *patch.tied) if other in target.infos]
        memories = {target.aliases.get(other, other): other for other in reversed(there)}
        found |= dict.fromkeys(memories.values() or [name], patch)
    return dict(sorted(found.items()))


def check_applicable(target: Checkpoint, tensors: Patches, step: Step) -> None:
    """Raise PatchError unless every tensor is the base's, to the bit."""
    check_shapes(target, tensors)
    problems = []
    for name, patch in tensors.items():
        if patch.added:
            if patch.result not in (None, sha256_of(raw(patch.values))):
                problems.append(f"the values for {name!r} are not those that the patch names")
            continue
        found, result = digests(target, name, patch.index, patch.values, patch.base)
        if found == patch.base and patch.result not in (None, result):
            problems.append(f"the values for {name!r} do not give the result that the patch names")
        elif found != patch.base and found == patch.result:
            problems.append(f"{name!r} is already patched with this patch")
        elif found != patch.base:
            problems.append(f"{name!r} differs from the base that the patch was made for")
        step(target.infos[name].bytes)
    refuse(f"the patch does not apply to {target.label}: ", problems)


def check_revertible(target: Checkpoint, tensors: Patches, step: Step) -> None:
    """Raise PatchError unless putting the originals back gives the base, to the bit."""
    check_shapes(target, tensors)
    problems = []
    for name, patch in tensors.items():
        if name not in target.infos:  # a new tensor, which is gone already
            continue
        before = None if patch.added else patch.before()
        if not _holds(target, name, patch):
            problems.append(f"{name!r} does not hold the patch's values")
        elif before is not None and _digest_with(target, name, patch, before) != patch.base:
            problems.append(f"{name!r} was changed after it was patched, or has another base")
        step(target.infos[name].bytes)
    refuse(f"the patch cannot be reverted on {target.label}: ", problems)


def _digest_with(target: Checkpoint, name: str, patch: TensorPatch, values: Tensor) -> str:
    return digests(target, name, patch.index, values, patch.base)[1]


def check_shapes(target: Checkpoint, tensors: Patches) -> None:
    problems = []
    for name, patch in tensors.items():
        if name not in target.infos:
            if not patch.added:
                problems.append(f"it has no tensor {name!r}")
        elif target.infos[name] != patch.info:
            problems.append(f"{name!r} is {target.infos[name]} there, {patch.info} in the patch")
    for name, first in target.aliases.items():
        if name in tensors and first in tensors and not _equal(tensors[name], tensors[first]):
            problems.append(f"{name!r} and {first!r} are one tensor there, two in the patch")
    refuse(f"the patch does not fit {target.label}: ", problems)


def _equal(one: TensorPatch, other: TensorPatch) -> bool:
    """Whether two patches of tensors write the same values to the same places."""
    if one.index is None or other.index is None:
        places = one.index is other.index
    else:
        places = torch.equal(one.index, other.index)
    return places and torch.equal(bits(one.values), bits(other.values))


def _holds(target: Checkpoint, name: str, patch: TensorPatch) -> bool:
    for start, piece in target.pieces(name):
        wanted = patch.values[_span(start, piece, patch.index)]
        if not torch.equal(bits(picked(start, piece, patch.index)), bits(wanted)):
            return False
    return True


def rewrite(source: FileCheckpoint, path: Path, out: Path, edit: Edit, step: Step) -> None:
    """Write a copy of the checkpoint at `path` to `out`; it is whole or not there."""
    values, added, removed, files = edit
    others = _others(path) if path.is_dir() else []
    needed = sum(info.bytes for info in [*source.infos.values(), *added.values()])
    check_room(out.parent, needed + sum(file.stat().st_size for file in others))
    last = source.files[-1]

    def write(part: Path, file: IO[bytes]) -> None:
        names = [name for name in source.names_in(part) if name not in removed]
        new = {n: info for n, info in added.items() if part == last and n not in names}
        infos = {name: source.infos[name] for name in names} | new
        write_header(file, infos, source.metadata[part])
        for name in names:
            for start, piece in source.pieces(name):
                if name in values:
                    piece = overlaid(start, piece, *values[name])
                file.write(raw(piece))
            if name in values:
                step(source.infos[name].bytes)
        for name in new:
            file.write(raw(values[name][1]))

    if path.is_file():
        with _refused_if_taken(out), new_file(out) as file:
            write(last, file)
        return
    with _refused_if_taken(out), new_folder(out, durable=True) as folder:
        for file in others:
            place = folder / file.relative_to(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
        for name, content in files.items():
            if content is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(content)
        for part in source.files:
            with (folder / part.name).open("wb") as file:
                write(part, file)
        if (path / INDEX_FILE).is_file():
            index = json.loads((path / INDEX_FILE).read_text("utf-8"))
            places = index["weight_map"] | dict.fromkeys(added, last.name)
            index["weight_map"] = {n: file for n, file in places.items() if n not in removed}
            kept = {n: info for n, info in {**source.infos, **added}.items() if n not in removed}
            metadata = index["metadata"] if isinstance(index.get("metadata"), dict) else {}
            index["metadata"] = {**metadata, "total_size": sum(i.bytes for i in kept.values())}
            write_json(folder / INDEX_FILE, index)


@contextmanager
def _refused_if_taken(out: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise PatchError(
            f"{out} was made by another process meanwhile: it is as they made it, and nothing was"
            " written; give the path of a new file or folder"
        ) from error


def _others(path: Path) -> list[Path]:
    """What is not weights of the model: configuration, tokenizer, model card.

    The modules of a sentence-transformers model have folders with weights of their own.
    """
    try:
        entries = json.loads((path / "modules.json").read_text("utf-8"))
        modules = {path / entry["path"] for entry in entries if entry["path"]}
    except (OSError, ValueError, KeyError, TypeError):
        modules = set[Path]()
    return [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name != INDEX_FILE
        and not any(part.startswith(".") for part in file.relative_to(path).parts[:-1])  # .git
        and (file.suffix not in _OTHER_WEIGHTS or not modules.isdisjoint(file.parents))
    ]
