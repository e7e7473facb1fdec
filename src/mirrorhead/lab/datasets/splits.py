"""What may be trained on and what may be scored: overlaps, and a validation split by film.

IMDb's train and test are of different films, but a random part of train shares its films with
the rest: it reads about 2 points above test. `validation_split` keeps a film's reviews on one
side, as far as the texts tell. `imdb_protocol` has the sets that every experiment here uses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from mirrorhead.lab.datasets.reviews import PAIRS, Texts, load_cad, load_imdb
from mirrorhead.lab.runtime.errors import DataError

#: A word that at most this many reviews have is likely a name: of a person, place or thing.
RARE = 30
#: Two reviews with this many rare words in common are of one film, wherever they are ...
FAR = 4
#: ... and with NEAR words if they are at most PAGE places apart, as a film has at most 30 reviews.
NEAR, PAGE = 2, 30
_WORD = re.compile(r"[a-z0-9']+")
_NOT_LETTER = bytes(set(range(256)) - set(b"abcdefghijklmnopqrstuvwxyz0123456789"))


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
