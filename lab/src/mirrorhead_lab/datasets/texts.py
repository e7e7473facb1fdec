"""Labelled texts, the three sets of a data set, and checks of published files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from mirrorhead._files import sha256_of
from mirrorhead_lab.runtime.errors import DataError, reason

_NOT_LETTER = bytes(set(range(256)) - set(b"abcdefghijklmnopqrstuvwxyz0123456789"))


@dataclass(frozen=True, repr=False, eq=False)
class Texts:
    """Texts with the number of each one's class, and perhaps a name each.

    >>> reviews = Texts(("dull", "grand"), np.array([0, 1]))
    >>> reviews, reviews.take([1]).texts
    (Texts(2 texts of 2 classes), ('grand',))
    """

    texts: tuple[str, ...]
    labels: np.ndarray  # (n,), int64
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels) or len(self.names) not in (0, len(self.texts)):
            raise ValueError(
                f"{len(self.texts)} texts, {len(self.labels)} labels and {len(self.names)} names:"
                " there must be as many of each, or no names"
            )

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Texts({len(self):,} texts of {len(set(self.labels.tolist()))} classes)"

    def take(self, places: Sequence[int] | np.ndarray) -> Texts:
        """Return the texts at these places, in that order."""
        return Texts(
            tuple(self.texts[i] for i in places),
            self.labels[np.asarray(places, dtype=np.int64)],
            tuple(self.names[i] for i in places) if self.names else (),
        )

    def sample(self, count: int | None, seed: int = 0) -> Texts:
        """Return `count` of the texts drawn at random, or all if there are no more."""
        return self.take(np.random.default_rng(seed).permutation(len(self))[:count])


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Splits(Generic[T]):
    """The names of the classes, and the three sets: of `Texts`, or of anything with batches."""

    name: str
    classes: tuple[str, ...]
    train: T
    validation: T
    test: T


def fingerprint_of(splits: Splits[Texts]) -> str:
    """Return a hash of the classes, texts and labels: a file that was edited has another."""
    parts = (splits.train, splits.validation, splits.test)
    sets = [[part.texts, part.labels.tolist()] for part in parts]
    return sha256_of(json.dumps([splits.classes, sets]).encode())[:16]


def split_texts(
    name: str,
    classes: tuple[str, ...],
    train: Texts,
    validation: Texts | None = None,
    test: Texts | None = None,
    key: Callable[[str], bytes] | None = None,
) -> Splits[Texts]:
    """Fill in missing sets with a tenth of the training texts each, by a hash of the text.

    The split is the same on every machine, with all copies of a text on one side: those with the
    same `key`, by default `text_key`.
    """
    keys = map(key or text_key, train.texts)
    tenth = np.array([hashlib.sha256(one).digest()[0] % 10 for one in keys])
    keep = np.ones(len(train), dtype=bool)
    if validation is None:
        validation, keep = train.take(np.flatnonzero(tenth == 0)), keep & (tenth != 0)
    if test is None:
        test, keep = train.take(np.flatnonzero(tenth == 1)), keep & (tenth != 1)
    sets = train.take(np.flatnonzero(keep)), validation, test
    if not all(len(part) for part in sets):
        raise DataError(f"{name}: {len(train)} texts are too few for three sets")
    return Splits(name, classes, *sets)


def text_key(text: str) -> bytes:
    """Return what copies of a text have in common: letters and digits, in lower case.

    >>> text_key("A <br />fine film!") == text_key("a fine  film")
    True
    """
    plain = text.lower().replace("<br />", " ").encode("ascii", "ignore")
    return plain.translate(None, delete=_NOT_LETTER)


def without(reviews: Texts, others: Iterable[str]) -> np.ndarray:
    """Return the places of the reviews whose text is not among `others`.

    >>> reviews = Texts(("Dull.", "Grand!", "So so"), np.array([0, 1, 0]), ("a", "b", "c"))
    >>> without(reviews, ["grand"])
    array([0, 2])
    """
    keys = {text_key(text) for text in others}
    return np.flatnonzero([text_key(text) not in keys for text in reviews.texts])


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a text file, which must have that encoding and must not be empty."""
    try:
        text = path.read_bytes().decode(encoding)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a zero byte in the name
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def check_split(split: str, allowed: Iterable[str]) -> None:
    if split not in allowed:
        raise ValueError(f"split must be one of {', '.join(allowed)}, got {split!r}")


def check_count(what: str, got: int, expected: int, partial: bool) -> None:
    """Refuse a set that is not complete, unless the caller accepts a part."""
    if got == 0 or (got != expected and not partial):
        raise DataError(
            f"{what}: found {got:,}, expected {expected:,}. The folder is not complete; unpack it"
            " again, or accept a part with partial=True (on the command line --partial)"
        )


def check_content(where: Path, content: bytes, sha256: str, partial: bool) -> None:
    """Refuse content that is not the published one, unless the caller accepts another."""
    if not partial and (found := sha256_of(content)) != sha256:
        raise DataError(
            f"{where} is not the published data: its SHA-256 is {found[:16]}..., not"
            f" {sha256[:16]}.... Replace it by a fresh copy, or accept other data with"
            " partial=True (on the command line --partial)"
        )


def label_number(where: str, label: object, classes: Sequence[str]) -> int:
    """Return the number of a class by its name in a file."""
    if not isinstance(label, str) or label not in classes:
        raise DataError(f"{where}: the label {label!r} is not one of {list(classes)}")
    return classes.index(label)
