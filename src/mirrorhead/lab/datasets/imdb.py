"""The Large Movie Review data set (Maas et al. 2011): 25,000 reviews to train, 25,000 to test.

The folder is as published: aclImdb/{train,test}/{neg,pos}/ID_RATING.txt. Ratings up to 4 of
10 are negative, from 7 on positive. 123 texts are in both train and test; see `splits`.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from mirrorhead.lab.datasets.sources import locate
from mirrorhead.lab.datasets.texts import (
    NEGATIVE,
    POSITIVE,
    Texts,
    check_count,
    check_split,
    read_text,
)
from mirrorhead.lab.runtime.errors import DataError

SPLITS = ("train", "test")
PER_FOLDER = 12_500
_NAME = re.compile(r"(\d+)_(\d+)\.txt")


def load_imdb(
    split: str, folder: str | Path | None = None, *, download: bool = False, partial: bool = False
) -> Texts:
    """Reviews of one split, negative ones first, each half in the order of its numbers.

    The order matters: reviews of one film are neighbours, and `film_groups` uses that.

    Args:
        split: "train" or "test".
        folder: of all data sets, or $MIRRORHEAD_DATA; aclImdb/ is in it.
        download: download the set if it is missing.
        partial: accept a part of the set.
    """
    check_split(split, SPLITS)
    root = locate("imdb", folder, download=download) / split
    texts: list[str] = []
    labels: list[int] = []
    names: list[str] = []
    for label, name in ((NEGATIVE, "neg"), (POSITIVE, "pos")):
        files = sorted(_numbered(root / name))
        check_count(f"reviews in {root / name}", len(files), PER_FOLDER, partial)
        for _, rating, path in files:
            if not (rating <= 4 if label == NEGATIVE else rating >= 7) or rating > 10:
                raise DataError(f"{path}: a rating of {rating} does not fit the folder {name}/")
            texts.append(read_text(path))
            labels.append(label)
            names.append(f"{split}/{name}/{path.name}")
    return Texts(tuple(texts), np.array(labels, dtype=np.int64), tuple(names))


def _numbered(folder: Path) -> list[tuple[int, int, Path]]:
    """Number, rating and path of every review in a folder."""
    if not folder.is_dir():
        raise DataError(f"{folder} is missing: the set is not laid out as published")
    found = []
    for path in folder.iterdir():
        if path.suffix != ".txt":
            continue
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise DataError(f"{path}: the name should be ID_RATING.txt")
        found.append((int(match[1]), int(match[2]), path))
    return found
