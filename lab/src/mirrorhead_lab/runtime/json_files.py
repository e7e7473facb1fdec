"""JSON files as typed classes; the error for a damaged file names it and the place in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mirrorhead_lab.runtime.errors import RunError

T = TypeVar("T")


def read_json(path: Path, kind: type[T], remedy: str = "") -> T:
    """Decode a file as `kind`, a dataclass, a msgspec.Struct or any type that msgspec knows.

    Args:
        remedy: what the user can do about a damaged file; ends the error message.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "numbers.json"
    ...     _ = path.write_text("[1, 2]")
    ...     read_json(path, list[int])
    [1, 2]
    """
    content = read_bytes(path)
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise RunError(f"{path} is damaged: {error}{remedy and f'. {remedy}'}") from error


def read_json_lines(path: Path, kind: type[T]) -> list[T]:
    """Decode every line of a file that `append_json_line` wrote, none if it is not there.

    A last line that was cut short by a kill is left out.
    """
    found: list[T] = []
    lines = read_bytes(path).splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except (ValueError, RecursionError) as error:
            if line.endswith(b"\n"):
                raise RunError(f"{path} is damaged in line {number}: {error}") from error
    return found


def append_json_line(path: Path, content: Any) -> None:
    """Append a line and wait until it is on the disk; a last line that was cut is removed first.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "runs.jsonl"
    ...     _ = path.write_text('[1]\\n[2')
    ...     append_json_line(path, [3])
    ...     read_json_lines(path, list[int])
    [[1], [3]]
    """
    line = json.dumps(content, sort_keys=True, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # else leave the length alone: another process may be appending
            file.truncate(whole)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_bytes(path: Path) -> bytes:
    """Read a file; a RunError names it if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


def from_plain(value: Any, kind: type[T], where: str) -> T:
    """Convert dictionaries and lists to `kind`; `where` names the file in the error."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except ValueError as error:
        raise RunError(f"{where} is damaged: {error}") from error
