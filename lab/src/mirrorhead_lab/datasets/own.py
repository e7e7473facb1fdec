"""A file of one's own, CSV or JSON lines, with "text" and "label"."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mirrorhead_lab.datasets.dataset import DataSet
from mirrorhead_lab.datasets.texts import Splits, Texts, split_texts
from mirrorhead_lab.runtime.errors import DataError, reason

SUFFIXES = (".csv", ".jsonl")


def own_file(path: Path) -> DataSet:
    """Return the data set of a file."""
    return DataSet(name=path.stem, kind="text", load=lambda root, partial: load_own(path))


def load_own(path: Path) -> Splits[Texts]:
    """Read a file; a tenth of the texts validates, and another tests."""
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
    found = Texts(tuple(texts), numbers)
    return split_texts(path.stem, classes, found, key=_any_language)


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

    >>> from mirrorhead_lab.datasets.texts import text_key
    >>> _any_language("A fine film!") == text_key("A fine film!")
    True
    """
    return ("".join(filter(str.isalnum, text.lower())) or text).encode()
