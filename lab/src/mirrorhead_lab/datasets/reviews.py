"""Labelled texts, and three published sets of film reviews: IMDb, counterfactual pairs, ERASER.

Each set is read as its authors publish it:

- IMDb (Maas et al. 2011): aclImdb/{train,test}/{neg,pos}/ID_RATING.txt. Ratings up to 4 of 10 are
  negative, from 7 on positive. 123 texts are in both train and test: see `imdb_protocol`.
- Counterfactual pairs (Kaushik et al. 2020), a review and the least edit that flips its label:
  cad-imdb/{train,dev,test}_paired.tsv with label, text, pair number; the original comes first, its
  revision second. Originals are reviews of IMDb's *train* split: exclude them from training
  (`without`) before scoring on them.
- ERASER movies (Zaidan and Eisner 2008; DeYoung et al. 2020), reviews and what people marked:
  movies/{docs/,train.jsonl,val.jsonl,test.jsonl}. Words are what white space separates; a rationale
  runs from `start_token` to `end_token`, exclusive. Test was marked in another way (a third of its
  words, against 7 to 9 in a hundred): never pool it with the others.

IMDb's train and test are of different films, but a random part of train shares its films with
the rest: it reads about 2 points above test. `validation_split` keeps a film's reviews on one
side, as far as the texts tell. `imdb_protocol` has the sets that every experiment here uses.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from mirrorhead._files import sha256_of
from mirrorhead_lab.datasets.sources import locate, published_sha256, require
from mirrorhead_lab.runtime.errors import DataError, reason

NEGATIVE, POSITIVE = 0, 1
IMDB_PER_FOLDER = 12_500
PAIRS = {"train": 1_707, "dev": 245, "test": 488}
DOCUMENTS = {"train": 1_600, "val": 200, "test": 199}
#: A word that at most this many reviews have is likely a name: of a person, place or thing.
RARE = 30
#: Two reviews with this many rare words in common are of one film, wherever they are ...
FAR = 4
#: ... and with NEAR words if they are at most PAGE places apart, as a film has at most 30 reviews.
NEAR, PAGE = 2, 30
_WORD = re.compile(r"[a-z0-9']+")
_NOT_LETTER = bytes(set(range(256)) - set(b"abcdefghijklmnopqrstuvwxyz0123456789"))


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
    check_split(split, ("train", "test"))
    root = locate("imdb", folder, download=download) / split
    texts, labels, names = [], [], []
    for label, name, ratings in ((NEGATIVE, "neg", range(5)), (POSITIVE, "pos", range(7, 11))):
        files = sorted(_numbered(root / name))
        check_count(f"reviews in {root / name}", len(files), IMDB_PER_FOLDER, partial)
        for _, rating, path in files:
            if rating not in ratings:
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
    for path in folder.glob("*.txt"):
        match = re.fullmatch(r"(\d+)_(\d+)\.txt", path.name)
        if match is None:
            raise DataError(f"{path}: the name should be ID_RATING.txt")
        found.append((int(match[1]), int(match[2]), path))
    return found


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
    number = _label(where, label, {"Negative": NEGATIVE, "Positive": POSITIVE})
    if not text.strip():
        raise DataError(f"{where}: the review is empty")
    return number, text, pair


def _label(where: str, label: Any, known: dict[str, int]) -> int:
    if not isinstance(label, str) or label not in known:
        raise DataError(f"{where}: the label {label!r} is not one of {list(known)}")
    return known[label]


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
    split: str, folder: str | Path | None = None, *, download: bool = False, partial: bool = False
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
        labels.append(_label(where, label, {"NEG": NEGATIVE, "POS": POSITIVE}))
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


@dataclass(frozen=True)
class Protocol:
    """Three sets of reviews, and how many were left out of training and why."""

    train: Texts
    validation: Texts
    test: Texts
    in_test: int
    in_cad: int


def imdb_protocol(
    folder: str | Path | None = None,
    *,
    share: float = 0.1,
    seed: int = 0,
    download: bool = False,
    partial: bool = False,
) -> Protocol:
    """IMDb without its overlaps, with a validation part of other films.

    Two kinds of texts are removed from the published training split, so that both can be scored:
    those that are also in test, which stays as published, and those of counterfactual pairs. The
    rest is split by `validation_split`.
    """
    require("imdb", "cad", folder=folder, download=download)
    whole = load_imdb("train", folder, download=download, partial=partial)
    test = load_imdb("test", folder, download=download, partial=partial)
    kept = whole.take(without(whole, test.texts))
    pairs = [load_cad(split, folder, download=download, partial=partial) for split in PAIRS]
    texts = [text for pair in pairs for text in pair.original.texts + pair.revision.texts]
    clean = kept.take(without(kept, texts))
    train, validation = (clean.take(places) for places in validation_split(clean, share, seed))
    in_test, in_cad = len(whole) - len(kept), len(kept) - len(clean)
    return Protocol(train, validation, test, in_test, in_cad)


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


def film_groups(reviews: Texts) -> np.ndarray:
    """Return a group number for each review; reviews of one film, and copies, share it.

    Two reviews belong together if they share at least 4 words that are rare in the set (2 to
    30 reviews have them), or at least 2 when they have the same label and stand at most 30
    places apart: the reviews of a film are neighbours in the published order. Groups are the
    connected components.
    """
    documents = [set(_WORD.findall(text.lower())) for text in reviews.texts]
    counts = Counter(word for document in documents for word in document)
    # Sorted, for a result that does not depend on the order of a set.
    rare = sorted(word for word, count in counts.items() if 2 <= count <= RARE)
    column = {word: i for i, word in enumerate(rare)}
    columns = [[column[word] for word in document if word in column] for document in documents]
    ends = np.cumsum([0] + [len(row) for row in columns])
    indices = np.array([i for row in columns for i in row], dtype=np.int32)
    n = len(reviews)
    has = sp.csr_matrix((np.ones(len(indices), np.float32), indices, ends), (n, len(column)))
    shared = sp.triu(has @ has.T, k=1).tocoo()  # how many rare words i and j share
    i, j = shared.row, shared.col
    near = (j - i <= PAGE) & (reviews.labels[i] == reviews.labels[j])
    linked = (shared.data >= FAR) | (near & (shared.data >= NEAR))
    i, j = i[linked], j[linked]
    # Copies of a short text may have no rare word at all.
    first: dict[bytes, int] = {}
    copies = [first.setdefault(text_key(text), place) for place, text in enumerate(reviews.texts)]
    i, j = np.concatenate([i, np.arange(n)]), np.concatenate([j, copies])
    edges = sp.coo_matrix((np.ones(len(i), np.int8), (i, j)), (n, n))
    return connected_components(edges, directed=False)[1]


def validation_split(
    reviews: Texts, share: float = 0.1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places to train on and to validate on, with no film on both sides.

    Whole groups of `film_groups` are drawn at random, as long as they fit, until validation
    has `share` of each label.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    groups = film_groups(reviews)
    counts = np.zeros((groups.max() + 1, reviews.labels.max() + 1), dtype=np.int64)
    np.add.at(counts, (groups, reviews.labels), 1)  # (groups, labels)
    room = share * counts.sum(axis=0)
    chosen = np.zeros(len(counts), dtype=bool)
    for group in np.random.default_rng(seed).permutation(len(counts)):
        if (counts[group] <= room).all():
            chosen[group] = True
            room -= counts[group]
    if not chosen.any():
        raise DataError(
            f"of {len(reviews)} reviews no group of films fits into a share of {share}: they are"
            " too few, or too much alike"
        )
    inside = chosen[groups]
    return np.flatnonzero(~inside), np.flatnonzero(inside)
