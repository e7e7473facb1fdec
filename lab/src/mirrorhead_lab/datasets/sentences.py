"""Short labelled texts: SST-2, TREC, Subj and CR as Kim (2014) packaged them, or one's own file.

SST-2 has its published split. TREC has a published test set. Where a split is missing, a hash of
the text makes one: the same on every machine, with all copies of a text on one side.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mirrorhead._files import sha256_of
from mirrorhead_lab.datasets.reviews import read_text, text_key
from mirrorhead_lab.datasets.sources import locate
from mirrorhead_lab.runtime.errors import DataError, reason


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts and the number of each one's class."""

    texts: tuple[str, ...]
    labels: np.ndarray  # (n,), int64

    def __len__(self) -> int:
        return len(self.texts)

    def sample(self, count: int | None, seed: int = 0) -> LabelledTexts:
        """`count` of the texts drawn at random, or all if there are no more."""
        return self.take(np.random.default_rng(seed).permutation(len(self))[:count])

    def take(self, places: np.ndarray) -> LabelledTexts:
        """The texts at these places, in that order."""
        return LabelledTexts(tuple(self.texts[i] for i in places), self.labels[places])


@dataclass(frozen=True, eq=False)
class Sentences:
    """A task: its classes and three sets of texts."""

    name: str
    classes: tuple[str, ...]
    train: LabelledTexts
    validation: LabelledTexts
    test: LabelledTexts

    def fingerprint(self) -> str:
        """A hash of the classes, texts and labels: a file that was edited has another."""
        parts = (self.train, self.validation, self.test)
        sets = [[part.texts, part.labels.tolist()] for part in parts]
        return sha256_of(json.dumps([self.classes, sets]).encode())[:16]


@dataclass(frozen=True)
class _Task:
    classes: tuple[str, ...]
    encoding: str
    train: str
    count: int
    validation: str | None = None
    test: str | None = None


_SENTIMENT = ("negative", "positive")
_QUESTIONS = ("description", "entity", "abbreviation", "person", "place", "number")
TASKS = {
    "sst2": _Task(
        _SENTIMENT, "utf-8", "stsa.binary.train", 6920, "stsa.binary.dev", "stsa.binary.test"
    ),
    "trec": _Task(_QUESTIONS, "latin-1", "TREC.train.all", 5452, test="TREC.test.all"),
    "subj": _Task(("subjective", "objective"), "latin-1", "subj.all", 10_000),
    "cr": _Task(_SENTIMENT, "latin-1", "custrev.all", 3771),
}


def load_sentences(
    name: str, folder: str | Path | None = None, *, download: bool = False, partial: bool = False
) -> Sentences:
    """One of the four tasks: "sst2", "trec", "subj" or "cr"; arguments as in `load_imdb`."""
    if name not in TASKS:
        raise ValueError(f"name must be one of {', '.join(TASKS)}, got {name!r}")
    task = TASKS[name]
    root = locate("sentences", folder, download=download)

    def read(file: str) -> LabelledTexts:
        return _read_kim(root / file, task.encoding, len(task.classes))

    train = read(task.train)
    if not partial and len(train) != task.count:
        raise DataError(f"{root / task.train}: found {len(train):,} texts, expected {task.count:,}")
    validation, test = (None if f is None else read(f) for f in (task.validation, task.test))
    return _split(name, task.classes, train, validation, test)


def load_own_sentences(path: Path) -> Sentences:
    """A CSV file or JSON lines, with "text" and "label"; a tenth each validates and tests."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    texts, labels = [], []
    for number, row in (_json_rows if path.suffix == ".jsonl" else _csv_rows)(path, content):
        text, label = row.get("text"), row.get("label")
        label = "" if label is None else str(label).strip()
        if not isinstance(text, str) or not text.strip() or not label:
            raise DataError(f"{path}, line {number}: each line needs a text and a label")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{path}, line {number}: the text holds half a character (a surrogate)")
        texts.append(text)
        labels.append(label)
    classes = tuple(sorted(set(labels)))
    count, has = len(classes), f"{path} has {len(classes):,} classes"
    if count < 2:
        raise DataError(f"{has}; at least 2 are needed")
    if count > max(2, len(texts) // 2):
        raise DataError(f"{has} for {len(texts):,} texts; labels must repeat")
    numbers = np.array([classes.index(label) for label in labels], dtype=np.int64)
    found = LabelledTexts(tuple(texts), numbers)
    return _split(path.stem, classes, found, key=_any_language)


def _read_kim(path: Path, encoding: str, classes: int) -> LabelledTexts:
    """Lines of the form `LABEL text`."""
    texts, labels = [], []
    for number, line in enumerate(read_text(path, encoding).split("\n"), 1):
        if not line.strip():
            continue
        label, _, text = line.strip().partition(" ")
        if not label.isdigit() or int(label) >= classes:
            raise DataError(f"{path}, line {number}: not a label below {classes} and a text")
        if not text.strip():  # so four lines of CR are published
            continue
        texts.append(text.strip())
        labels.append(int(label))
    return LabelledTexts(tuple(texts), np.array(labels, dtype=np.int64))


def _csv_rows(path: Path, content: str) -> list[tuple[int, dict]]:
    reader = csv.DictReader(io.StringIO(content), strict=True)
    limit = csv.field_size_limit(max(len(content), 1))  # a text may exceed the default
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path}, after line {reader.line_num}: not CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
    columns = reader.fieldnames or []
    if not {"text", "label"} <= set(columns):
        there = f"it names {', '.join(map(repr, columns))}" if columns else "the file is empty"
        raise DataError(f"{path}: the first line must name the columns text and label; {there}")
    for number, row in rows:
        if None in row:  # what is left of a line when all columns are filled
            raise DataError(
                f"{path}, line {number}: more fields than the first line names; a text with a"
                " comma needs quotes"
            )
    return rows


def _json_rows(path: Path, content: str) -> Iterable[tuple[int, dict]]:
    # Not splitlines: it also splits at characters that a JSON text may contain, such as U+2028.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON: {error}") from error
            yield number, row if isinstance(row, dict) else {}


def _any_language(text: str) -> bytes:
    """What copies of a text have in common, in any script: `text_key` knows a to z alone.

    >>> _any_language("A fine film!") == text_key("A fine film!")
    True
    """
    return ("".join(filter(str.isalnum, text.lower())) or text).encode()


def _split(
    name: str,
    classes: tuple[str, ...],
    train: LabelledTexts,
    validation: LabelledTexts | None = None,
    test: LabelledTexts | None = None,
    key: Callable[[str], bytes] = text_key,
) -> Sentences:
    """Fill in missing sets with a tenth of the training texts each, by a hash of the text."""
    # Copies of a text have the same key, and so the same number from 0 to 9.
    tenth = np.array([hashlib.sha256(key(text)).digest()[0] % 10 for text in train.texts])
    keep = np.ones(len(train), dtype=bool)
    if validation is None:
        validation, keep = train.take(np.flatnonzero(tenth == 0)), keep & (tenth != 0)
    if test is None:
        test, keep = train.take(np.flatnonzero(tenth == 1)), keep & (tenth != 1)
    sets = train.take(np.flatnonzero(keep)), validation, test
    if not all(len(part) for part in sets):
        raise DataError(f"{name}: {len(train)} texts are too few for three sets")
    return Sentences(name, classes, *sets)
