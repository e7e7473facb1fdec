"""Counterfactual pairs (Kaushik et al. 2020): a review, and the least edit that flips its label.

The folder is cad-imdb/{train,dev,test}_paired.tsv: label, text, pair number; the original
comes first, its revision second. Originals are reviews of IMDb's *train* split: exclude them
from training (`splits.without`) before scoring on them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mirrorhead.lab.datasets.sources import locate, published_sha256
from mirrorhead.lab.datasets.texts import (
    NEGATIVE,
    POSITIVE,
    Texts,
    check_content,
    check_count,
    check_split,
    read_text,
)
from mirrorhead.lab.runtime.errors import DataError

PAIRS = {"train": 1_707, "dev": 245, "test": 488}
_LABELS = {"Negative": NEGATIVE, "Positive": POSITIVE}


@dataclass(frozen=True, repr=False, eq=False)
class Pairs:
    """Originals and revisions, in the same order; their labels are opposite."""

    original: Texts
    revision: Texts

    def __len__(self) -> int:
        return len(self.original)

    def __repr__(self) -> str:
        return f"Pairs({len(self):,} reviews and their revisions)"


def load_cad(
    split: str, folder: str | Path | None = None, *, download: bool = False, partial: bool = False
) -> Pairs:
    """Pairs of one split ("train", "dev" or "test"); arguments as in `load_imdb`.

    Two pairs (one in train, one in test) have the same text twice: no edit to be found there.
    """
    check_split(split, tuple(PAIRS))
    path = locate("cad", folder, download=download) / f"{split}_paired.tsv"
    # Lines end with \n alone, and tabs only separate: no quoting rule of csv is needed to cut.
    text = read_text(path)
    header, *lines = text.rstrip("\n").split("\n")
    if header.rstrip("\r").split("\t") != ["Sentiment", "Text", "batch_id"]:
        raise DataError(f"{path}: the first line should be Sentiment, Text, batch_id")
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=2)]
    if len(rows) % 2:
        raise DataError(f"{path}: {len(rows)} rows cannot be pairs")
    for number, ((a, _, one), (b, _, two)) in enumerate(
        zip(rows[::2], rows[1::2], strict=True), start=1
    ):
        if one != two or a == b:
            raise DataError(
                f"{path}: pair {number} (lines {2 * number} and {2 * number + 1}) should have"
                f" one number and two labels, got {one}, {two} and {a}, {b}"
            )
    check_count(f"pairs in {path}", len(rows) // 2, PAIRS[split], partial)
    check_content(path, [text.encode()], published_sha256("cad", path.name), partial)
    return Pairs(_texts(rows[::2], split), _texts(rows[1::2], split))


def edited(original: Sequence[int], revision: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of either text are not in the other, by the longest common blocks.

    >>> edited([5, 6, 7, 8], [5, 9, 7, 8, 4])
    (array([False,  True, False, False]), array([False,  True, False, False,  True]))
    """
    masks = np.ones(len(original), dtype=bool), np.ones(len(revision), dtype=bool)
    matcher = difflib.SequenceMatcher(None, original, revision, autojunk=False)
    for block in matcher.get_matching_blocks():
        masks[0][block.a : block.a + block.size] = False
        masks[1][block.b : block.b + block.size] = False
    return masks


def _row(path: Path, number: int, line: str) -> tuple[int, str, str]:
    cells = line.rstrip("\r").split("\t")
    if len(cells) != 3:
        raise DataError(f"{path}, line {number}: expected 3 columns, got {len(cells)}")
    label, text, pair = cells
    if label not in _LABELS:
        raise DataError(f"{path}, line {number}: the label {label!r} is not one of {list(_LABELS)}")
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1].replace('""', '"')
    if not text.strip():
        raise DataError(f"{path}, line {number}: the review is empty")
    return _LABELS[label], text, pair


def _texts(rows: Sequence[tuple[int, str, str]], split: str) -> Texts:
    return Texts(
        tuple(text for _, text, _ in rows),
        np.array([label for label, _, _ in rows], dtype=np.int64),
        tuple(f"{split}/{pair}" for _, _, pair in rows),
    )
