"""A copy of a checkpoint on disk with some numbers replaced, written piece by piece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from torch import Tensor

from mirrorhead._files import new_file, new_folder, write_json
from mirrorhead.patches.checkpoints import (
    INDEX_FILE,
    FileCheckpoint,
    TensorInfo,
    check_room,
    raw,
    read_metadata,
    write_header,
)
from mirrorhead.patches.overlay import overlaid

#: Weights in other formats, which would be stale beside the copy.
_OTHER_WEIGHTS = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors"}

Values = Mapping[str, tuple[Tensor | None, Tensor]]  # name -> positions (None: all), values


def rewrite(
    source: FileCheckpoint,
    path: Path,
    out: Path,
    values: Values,
    added: Mapping[str, TensorInfo],
    removed: Sequence[str],
    step: Callable[[int], None],
) -> None:
    """Write a copy of the checkpoint at `path` to `out`; it is whole or not there.

    Args:
        source: the checkpoint at `path`, a file or a folder.
        path, out: what to copy and where to; `out` does not exist.
        values: what replaces numbers of the source's tensors, and the content of new ones.
        added: new tensors, which go into the last file.
        removed: tensors to leave out.
        step: called with the number of bytes of each replaced tensor.
    """
    others = _others(path) if path.is_dir() else []
    needed = sum(info.bytes for info in [*source.infos.values(), *added.values()])
    check_room(out.parent, needed + sum(file.stat().st_size for file in others))
    last = source.files[-1]
    if path.is_file():
        with new_file(out) as file:
            _write_file(source, last, file, values, added, removed, step)
        return
    with new_folder(out, durable=True) as folder:
        for file in others:
            place = folder / file.relative_to(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        for part in source.files:
            new = added if part == last else {}
            with (folder / part.name).open("wb") as file:
                _write_file(source, part, file, values, new, removed, step)
        if (path / INDEX_FILE).is_file():
            index = json.loads((path / INDEX_FILE).read_text("utf-8"))
            places = {n: file for n, file in index["weight_map"].items() if n not in removed}
            places |= dict.fromkeys(added, last.name)
            index["weight_map"] = places
            size = sum(
                info.bytes
                for name, info in {**source.infos, **added}.items()
                if name not in removed
            )
            metadata = index.get("metadata")
            index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {
                "total_size": size
            }
            write_json(folder / INDEX_FILE, index)


def _write_file(
    source: FileCheckpoint,
    part: Path,
    file: IO[bytes],
    values: Values,
    added: Mapping[str, TensorInfo],
    removed: Sequence[str],
    step: Callable[[int], None],
) -> None:
    names = [name for name in source.names_in(part) if name not in removed]
    new = {name: info for name, info in added.items() if name not in names}
    infos = {name: source.infos[name] for name in names} | new
    write_header(file, infos, read_metadata(part))
    for name in names:
        for start, piece in source.pieces(name):
            if name in values:
                piece = overlaid(start, piece, *values[name])
            file.write(raw(piece))
        if name in values:
            step(source.infos[name].bytes)
    for name in new:
        file.write(raw(values[name][1]))


def _others(path: Path) -> list[Path]:
    """What is not weights of the model: configuration, tokenizer, model card.

    The modules of a sentence-transformers model have folders with weights of their own.
    """
    modules = _module_folders(path)
    return [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name != INDEX_FILE
        and not any(part.startswith(".") for part in file.relative_to(path).parts[:-1])  # .git
        and (file.suffix not in _OTHER_WEIGHTS or any(m in modules for m in file.parents))
    ]


def _module_folders(path: Path) -> set[Path]:
    try:
        modules = json.loads((path / "modules.json").read_text("utf-8"))
        return {path / module["path"] for module in modules if module["path"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
