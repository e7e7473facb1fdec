"""Labelled texts, and the reading of text files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mirrorhead._files import sha256_of
from mirrorhead.lab.runtime.errors import DataError

NEGATIVE, POSITIVE = 0, 1


@dataclass(frozen=True, repr=False, eq=False)
class Texts:
    """Texts with a label (0 negative, 1 positive) and a name each.

    >>> reviews = Texts(("dull", "grand"), np.array([0, 1], np.int64), ("a", "b"))
    >>> reviews
    Texts(2 texts, 1 of them positive)
    >>> reviews.take([1]).texts
    ('grand',)
    """

    texts: tuple[str, ...]
    labels: np.ndarray  # (n,), int64
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.texts) == len(self.labels) == len(self.names):
            raise ValueError(
                f"{len(self.texts)} texts, {len(self.labels)} labels and {len(self.names)} names:"
                " there must be as many of each"
            )

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Texts({len(self):,} texts, {int(self.labels.sum()):,} of them positive)"

    def take(self, indices: Sequence[int] | np.ndarray) -> Texts:
        """Return those at the given places, in that order."""
        return Texts(
            tuple(self.texts[i] for i in indices),
            self.labels[np.asarray(indices, dtype=np.int64)],
            tuple(self.names[i] for i in indices),
        )


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a text file, which must have that encoding and must not be empty."""
    try:
        text = path.read_bytes().decode(encoding)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def check_split(split: str, allowed: Sequence[str]) -> None:
    if split not in allowed:
        raise ValueError(f"split must be one of {', '.join(allowed)}, got {split!r}")


def check_count(what: str, got: int, expected: int, partial: bool) -> None:
    """Refuse a set that is not complete, unless the caller accepts a part."""
    if got == 0 or (got != expected and not partial):
        raise DataError(
            f"{what}: found {got:,}, expected {expected:,}. The folder is not complete; unpack it"
            " again, or accept a part with partial=True (on the command line --partial)"
        )


def check_content(where: str | Path, parts: Iterable[bytes], sha256: str, partial: bool) -> None:
    """Refuse content that is not the published one, unless the caller accepts another."""
    if partial:
        return
    found = sha256_of(*parts)
    if found != sha256:
        raise DataError(
            f"{where} is not the published data: its SHA-256 is {found[:16]}..., not"
            f" {sha256[:16]}.... Replace it by a fresh copy, or accept other data with"
            " partial=True (on the command line --partial)"
        )
