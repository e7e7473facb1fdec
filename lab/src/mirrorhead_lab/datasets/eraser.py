"""ERASER movies (Zaidan and Eisner 2008; DeYoung et al. 2020): reviews and what people marked.

movies/{docs/,train.jsonl,val.jsonl,test.jsonl}. Words are what white space separates; a rationale
runs from `start_token` to `end_token`, exclusive. Test was marked in another way (a third of its
words, against 7 to 9 in a hundred): never pool it with the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mirrorhead_lab.datasets.sources import Folder, locate, publish
from mirrorhead_lab.datasets.texts import check_count, check_split, label_number, read_text
from mirrorhead_lab.runtime.errors import DataError

DOCUMENTS = {"train": 1_600, "val": 200, "test": 199}

publish(
    "eraser",
    "movies",
    "http://www.eraserbenchmark.com/zipped/",
    "movies.tar.gz 3899487 66e18d4e6c9df9e9f5544572b0bfe92a39673f74ecbfc3859b46cedb2f5b2dee",
)


@dataclass(frozen=True, repr=False, eq=False)
class Rationales:
    """Reviews as words, with a label each and the words that people marked."""

    words: tuple[tuple[str, ...], ...]
    labels: np.ndarray  # (n,), int64
    marked: tuple[np.ndarray, ...]  # of bool, one for each word
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        share = float(np.mean(np.concatenate(self.marked)))
        return f"Rationales({len(self):,} reviews, {share:.1%} of the words marked)"


def load_eraser(
    split: str, folder: Folder = None, *, download: bool = False, partial: bool = False
) -> Rationales:
    """Reviews of one split ("train", "val" or "test"); arguments as in `load_imdb`.

    One review of train has nothing marked, and 20 rationales of test are empty: so published.
    """
    check_split(split, DOCUMENTS)
    root = locate("eraser", folder, download=download)
    path = root / f"{split}.jsonl"
    words, labels, marked, names = [], [], [], []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            note = json.loads(line)
            name, label = note["annotation_id"], note["classification"]
            spans = [span for group in note["evidences"] for span in group]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{where}: not an annotation: {error!r}") from error
        labels.append(label_number(where, label, ("NEG", "POS")))
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{where}: {name!r} is no name of a document")
        words.append(tuple(read_text(root / "docs" / name).split()))
        marked.append(_mask(where, name, len(words[-1]), spans))
        names.append(f"{split}/{name}")
    check_count(f"reviews in {path}", len(words), DOCUMENTS[split], partial)
    return Rationales(tuple(words), np.array(labels, dtype=np.int64), tuple(marked), tuple(names))


def _mask(where: str, name: str, length: int, spans: list[Any]) -> np.ndarray:
    mask = np.zeros(length, dtype=bool)
    for span in spans:
        try:
            document, start, end = span["docid"], span["start_token"], span["end_token"]
        except (KeyError, TypeError) as error:
            raise DataError(f"{where}: not a rationale: {error!r}") from error
        whole = isinstance(start, int) and isinstance(end, int)
        if document != name or not whole or not 0 <= start <= end <= length:
            raise DataError(
                f"{where}: words {start} to {end} of {document} do not fit {name},"
                f" which has {length}"
            )
        mask[start:end] = True
    return mask
