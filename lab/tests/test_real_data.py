"""The real data sets, where MIRRORHEAD_DATA names a folder that has them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from data_slices import needs_real_data
from mirrorhead_lab.datasets import (
    SOURCES,
    edited,
    encode,
    epoch_batches,
    find,
    imdb_protocol,
    load_cad,
    load_cifar10,
    load_eraser,
    load_imdb,
    load_tokenizer,
    without,
)
from mirrorhead_lab.datasets.sources import locate
from mirrorhead_lab.datasets.texts import text_key
from mirrorhead_lab.models import TextClassifier, TextSettings, attention_maps
from mirrorhead_lab.training import OptimizerSettings, TrainSettings, train

pytestmark = [needs_real_data, pytest.mark.slow]


def test_imdb_overlaps_as_documented() -> None:
    train, test = load_imdb("train"), load_imdb("test")
    assert len(train) == len(test) == 25_000
    assert len(set(train.texts) & set(test.texts)) == 123
    originals = {
        text_key(t) for split in ("train", "dev", "test") for t in load_cad(split).original.texts
    }
    in_train = originals & {text_key(t) for t in train.texts}
    assert len(originals - in_train) <= 1  # one of 2,440 is not found by its text
    assert len(without(train, test.texts)) == 25_000 - 123


def test_the_protocol_shares_no_text_and_few_films() -> None:
    found = imdb_protocol()
    clean = len(found.train) + len(found.validation)
    assert clean == 22_427  # 123 are in test too, 2,450 in the counterfactual pairs
    assert len(found.validation) == pytest.approx(0.1 * clean, abs=10)
    assert found.validation.labels.mean() == pytest.approx(0.5, abs=0.03)
    keys = [{text_key(t) for t in part.texts} for part in (found.train, found.validation)]
    test = {text_key(t) for t in found.test.texts}
    assert not keys[0] & keys[1] and not keys[0] & test and not keys[1] & test

    # Like test, and unlike a random part, validation resembles nothing that is trained on.
    rng = np.random.default_rng(0)
    words = re.compile(r"[a-z0-9']+")
    everything = [*found.train.texts, *found.validation.texts, *found.test.texts]
    documents = [set(words.findall(text.lower())) for text in everything]
    counts = Counter(w for d in documents for w in d)
    column = {w: i for i, w in enumerate(w for w, c in counts.items() if 2 <= c <= 60)}
    rows = [[column[w] for w in d if w in column] for d in documents]
    ends = np.cumsum([0, *map(len, rows)])
    flat = np.concatenate([np.array(row, dtype=np.int64) for row in rows])
    has = sp.csr_matrix((np.ones(len(flat), np.float32), flat, ends), (len(rows), len(column)))

    def resembling(part: np.ndarray, rest: np.ndarray) -> float:
        """The share of `part` with 4 rare words or more in common with one of `rest`."""
        return float(np.mean((has[part] @ has[rest].T).max(axis=1).toarray() >= 4))

    split, sample = len(found.train), 1_000
    chance = rng.permutation(clean)
    apart = resembling(split + rng.permutation(clean - split)[:sample], np.arange(split))
    mixed = resembling(chance[split:][:sample], chance[:split])
    fresh = resembling(clean + rng.permutation(25_000)[:sample], np.arange(split))
    assert fresh < 0.05 and mixed > 0.15, (fresh, mixed)
    assert apart < 0.05, apart


def test_cad_is_pairs_with_few_edits() -> None:
    tokenizer = load_tokenizer()
    for split, pairs in (("train", 1_707), ("dev", 245), ("test", 488)):
        found = load_cad(split)
        assert len(found) == pairs
        assert (found.original.labels + found.revision.labels == 1).all()
    texts = zip(found.original.texts, found.revision.texts, strict=True)
    shares = [edited(tokenizer.encode(a).ids, tokenizer.encode(b).ids)[0].mean() for a, b in texts]
    assert 0.05 < float(np.mean(shares)) < 0.2
    assert sum(share == 0 for share in shares) <= 8


def test_eraser_marks_test_in_another_way() -> None:
    sizes, shares = {}, {}
    for split in ("train", "val", "test"):
        found = load_eraser(split)
        sizes[split] = len(found)
        shares[split] = float(np.mean([mask.mean() for mask in found.marked]))
    assert sizes == {"train": 1_600, "val": 200, "test": 199}
    assert shares == pytest.approx({"train": 0.093, "val": 0.072, "test": 0.31}, abs=0.006)
    assert np.median([len(w) for w in load_eraser("train").words]) == pytest.approx(729, abs=10)


def test_cifar10_is_whole() -> None:
    train, test = load_cifar10("train"), load_cifar10("test")
    assert np.bincount(train.labels).tolist() == [5_000] * 10
    assert np.bincount(test.labels).tolist() == [1_000] * 10
    mean = (train.pixels / np.float32(255)).mean(axis=(0, 2, 3))
    assert mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=1e-3)


def test_published_files_have_the_listed_checksums() -> None:
    for name in ("cad", "bert", "sentences"):
        folder = locate(name)
        for remote in SOURCES[name].remotes:
            content = (folder / remote.name).read_bytes()
            assert len(content) == remote.size
            assert hashlib.sha256(content).hexdigest() == remote.sha256


def test_real_reviews_fill_their_buckets(tmp_path: Path) -> None:
    reviews = load_imdb("train")
    slice_ = reviews.take(np.arange(0, 25_000, 10))
    tokenizer = load_tokenizer(max_length=512)
    found = encode(slice_, tokenizer, tmp_path)
    assert found.vocabulary == 30_522
    assert found.lengths.max() == 512
    batches = epoch_batches(np.arange(len(found)), 32, seed=0, epoch=0, lengths=found.lengths)
    padded = sum(found.lengths[b].max() * len(b) for b in batches)
    assert padded < 1.05 * found.lengths.sum()
    for i in range(0, len(found), 250):
        assert found[i].tolist() == tokenizer.encode(slice_.texts[i]).ids


def test_real_reviews_can_be_learned(tmp_path: Path) -> None:
    reviews, places = load_imdb("train"), np.arange(0, 25_000, 10)
    tokenizer = load_tokenizer(max_length=128)
    train_set, other = (encode(reviews.take(places + i), tokenizer, tmp_path) for i in (0, 5))
    torch.manual_seed(0)
    model = TextClassifier(replace(TextSettings.laptop(), max_length=128))
    settings = TrainSettings(epochs=1, optimizer=OptimizerSettings("mirror-adam", lr=1e-3, p=1.5))
    outcome = train(model, train_set, other, settings, tmp_path / "run")
    assert outcome.best_accuracy > 0.6  # .70 was seen; the deviation of chance is .01
    (weights,) = attention_maps(model, other.batch([0, 1])[0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1))


@pytest.mark.parametrize("name", ["sst2", "trec", "subj", "cr"])
def test_sentences_are_split_without_overlap(name: str) -> None:
    task = find(name).read()
    parts = (task.train, task.validation, task.test)
    for part in parts:
        assert sorted(set(part.labels.tolist())) == list(range(len(task.classes)))
    made_here = {"sst2": (), "trec": (0, 1), "subj": (0, 1, 2), "cr": (0, 1, 2)}[name]
    for one in made_here:
        for other in made_here:
            assert one == other or not set(parts[one].texts) & set(parts[other].texts)
    if name == "cr":
        assert sum(map(len, parts)) == 3771
