"""Read JSON files into typed classes; the error for a damaged file names it and the place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mirrorhead.lab.runtime.errors import RunError

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
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise RunError(f"{path} is damaged: {error}{remedy and f'. {remedy}'}") from error


def from_plain(value: Any, kind: type[T], where: str) -> T:
    """Convert dictionaries and lists to `kind`; `where` names the file in the error."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except ValueError as error:
        raise RunError(f"{where} is damaged: {error}") from error
