"""IMDb (Maas et al. 2011): 50,000 film reviews, positive or negative.

aclImdb/{train,test}/{neg,pos}/ID_RATING.txt. Ratings up to 4 of 10 are negative, from 7 on
positive. 123 texts are in both train and test. Train and test are of different films, but a random
part of train shares its films with the rest: it reads about 2 points above test.
`validation_split` keeps a film's reviews on one side, as far as the texts tell. The data set that
is trained on is that of `imdb_protocol`. Free for research.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from mirrorhead_lab.datasets.cad import PAIRS, load_cad
from mirrorhead_lab.datasets.dataset import DataSet
from mirrorhead_lab.datasets.sources import Folder, locate, publish, require
from mirrorhead_lab.datasets.texts import (
    Splits,
    Texts,
    check_count,
    check_split,
    read_text,
    text_key,
    without,
)
from mirrorhead_lab.runtime.errors import DataError

CLASSES = ("negative", "positive")
IMDB_PER_FOLDER = 12_500
#: A word that at most this many reviews have is likely a name: of a person, place or thing.
RARE = 30
#: Two reviews with this many rare words in common are of one film, wherever they are ...
FAR = 4
#: ... and with NEAR words if they are at most PAGE places apart, as a film has at most 30 reviews.
NEAR, PAGE = 2, 30
_WORD = re.compile(r"[a-z0-9']+")

publish(
    "imdb",
    "aclImdb",
    "https://ai.stanford.edu/~amaas/data/sentiment/",
    "aclImdb_v1.tar.gz 84125825 c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)


def load_imdb(
    split: str, folder: Folder = None, *, download: bool = False, partial: bool = False
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
    for label, name, ratings in ((0, "neg", range(5)), (1, "pos", range(7, 11))):
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


def imdb_protocol(
    folder: Folder = None,
    *,
    share: float = 0.1,
    seed: int = 0,
    download: bool = False,
    partial: bool = False,
) -> Splits[Texts]:
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
    return Splits("imdb", CLASSES, train, validation, test)


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


DATA_SET = DataSet(
    name="imdb",
    kind="text",
    sources=("imdb", "cad"),
    load=lambda root, partial: imdb_protocol(root, partial=partial),
    load_test=lambda root, partial: load_imdb("test", root, partial=partial),
    annotated=("eraser", "cad"),
)
