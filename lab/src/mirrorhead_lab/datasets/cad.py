"""Counterfactual pairs (Kaushik et al. 2020): reviews, and the least edits that flip their labels.

cad-imdb/{train,dev,test}_paired.tsv has label, text, pair number; the original comes first, its
revision second. Originals are reviews of IMDb's *train* split: exclude them from training
(`without`) before scoring on them. Licence: Apache-2.0.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mirrorhead_lab.datasets.sources import Folder, locate, publish, published_sha256
from mirrorhead_lab.datasets.texts import (
    Texts,
    check_content,
    check_count,
    check_split,
    label_number,
    read_text,
)
from mirrorhead_lab.runtime.errors import DataError

PAIRS = {"train": 1_707, "dev": 245, "test": 488}

publish(
    "cad",
    "cad-imdb",
    "https://raw.githubusercontent.com/acmi-lab/counterfactually-augmented-data/master/sentiment/combined/paired/",
    """
    train_paired.tsv 3179425 7ac50ca3d70890f80e11ee59955cdbfc43f26b5078d0603717817ab224d2af18
    dev_paired.tsv 466175 4c2d8a70cbce23eba27fb1f0bb5043cf044811912435cf8d10c3ea6fc7a51363
    test_paired.tsv 907811 9534b20850205c59015b313983cae7afb31c54c04ffcbd19cea7f1bce5011275
    """,
)


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
    split: str, folder: Folder = None, *, download: bool = False, partial: bool = False
) -> Pairs:
    """Pairs of one split ("train", "dev" or "test"); arguments as in `load_imdb`.

    Two pairs (one in train, one in test) have the same text twice: no edit to be found there.
    """
    check_split(split, PAIRS)
    path = locate("cad", folder, download=download) / f"{split}_paired.tsv"
    # Lines end with \n alone, and tabs only separate: no quoting rule of csv is needed to cut.
    text = read_text(path)
    header, *lines = text.rstrip("\n").split("\n")
    if header.rstrip("\r").split("\t") != ["Sentiment", "Text", "batch_id"]:
        raise DataError(f"{path}: the first line should be Sentiment, Text, batch_id")
    rows = [_pair_row(f"{path}, line {number}", line) for number, line in enumerate(lines, start=2)]
    if len(rows) % 2:
        raise DataError(f"{path}: {len(rows)} rows cannot be pairs")
    originals, revisions = rows[::2], rows[1::2]
    for number, ((a, _, one), (b, _, two)) in enumerate(zip(originals, revisions, strict=True), 1):
        if one != two or a == b:
            raise DataError(
                f"{path}: pair {number} (lines {2 * number} and {2 * number + 1}) should have"
                f" one number and two labels, got {one}, {two} and {a}, {b}"
            )
    check_count(f"pairs in {path}", len(originals), PAIRS[split], partial)
    check_content(path, text.encode(), published_sha256("cad", path.name), partial)
    sides = []
    for side in (originals, revisions):
        labels = np.array([label for label, _, _ in side], dtype=np.int64)
        names = tuple(f"{split}/{pair}" for _, _, pair in side)
        sides.append(Texts(tuple(text for _, text, _ in side), labels, names))
    return Pairs(*sides)


def _pair_row(where: str, line: str) -> tuple[int, str, str]:
    cells = line.rstrip("\r").split("\t")
    if len(cells) != 3:
        raise DataError(f"{where}: expected 3 columns, got {len(cells)}")
    label, text, pair = cells
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1].replace('""', '"')
    number = label_number(where, label, ("Negative", "Positive"))
    if not text.strip():
        raise DataError(f"{where}: the review is empty")
    return number, text, pair


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
