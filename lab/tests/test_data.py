"""Loaders, splits, tokens and batches, on slices that the tests make."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_slices import (
    VOCABULARY,
    make_bert,
    make_cad,
    make_cifar10,
    make_eraser,
    make_imdb,
    sentence,
)
from mirrorhead_lab.datasets import (
    DataError,
    Texts,
    edited,
    encode,
    epoch_batches,
    even_batches,
    film_groups,
    imdb_protocol,
    load_cad,
    load_cifar10,
    load_eraser,
    load_imdb,
    load_tokenizer,
    validation_split,
    without,
)
from mirrorhead_lab.datasets.encoded import wordpiece


def texts_of(*texts: str) -> Texts:
    labels = np.arange(len(texts), dtype=np.int64) % 2
    return Texts(texts, labels, tuple(map(str, range(len(texts)))))


# --- IMDb ----------------------------------------------------------------------------------


def test_imdb_comes_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    folder = make_imdb(tmp_path, per_folder=12)
    reviews = load_imdb("train", tmp_path, partial=True)
    assert reviews.labels.tolist() == [0] * 12 + [1] * 12
    assert list(reviews.names) == [f"train/neg/{i}_2.txt" for i in range(12)] + [
        f"train/pos/{i}_9.txt" for i in range(12)
    ]
    for name, text in zip(reviews.names, reviews.texts, strict=True):
        assert (folder / name).read_text() == text
    assert load_imdb("test", tmp_path, partial=True).texts != reviews.texts


@pytest.mark.parametrize(
    ("file", "becomes", "says"),
    [
        ("pos/0_9.txt", "pos/0_3.txt", r"0_3\.txt: a rating of 3 does not fit the folder pos/"),
        ("pos/0_9.txt", "pos/zero.txt", r"zero\.txt: the name should be ID_RATING\.txt"),
        ("neg", "bad", "neg is missing"),
        ("neg/3_2.txt", b" \n", r"3_2\.txt is empty"),
        ("neg/3_2.txt", b"good \xff\xfe", r"3_2\.txt cannot be read"),
    ],
)
def test_bad_imdb_is_refused(tmp_path: Path, file: str, becomes: str | bytes, says: str) -> None:
    """A file or folder gets another name, or another content."""
    train = make_imdb(tmp_path) / "train"
    if isinstance(becomes, bytes):
        (train / file).write_bytes(becomes)
    else:
        (train / file).rename(train / becomes)
    with pytest.raises(DataError, match=says):
        load_imdb("train", tmp_path, partial=True)


def test_a_set_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    make_imdb(tmp_path)
    make_cad(tmp_path, [("a dull film", "a grand film")])
    make_eraser(tmp_path)
    make_cifar10(tmp_path)
    for load in (load_imdb, load_cad, load_eraser, load_cifar10):
        with pytest.raises(DataError, match="not complete"):
            load("train", tmp_path)
        with pytest.raises(ValueError, match="split must be one of"):
            load("validation", tmp_path)


# --- counterfactual pairs --------------------------------------------------------------------


def test_cad_reads_quotes_as_they_are_meant(tmp_path: Path) -> None:
    pairs = [("a dull film", '"he said ""grand"" twice"'), ('so "dull', "so grand")]
    make_cad(tmp_path, pairs)
    got = load_cad("dev", tmp_path, partial=True)
    assert got.original.texts == ("a dull film", 'so "dull')
    assert got.revision.texts == ('he said "grand" twice', "so grand")
    assert got.original.labels.tolist() == [0, 0]
    assert got.revision.labels.tolist() == [1, 1]
    assert got.original.names == got.revision.names == ("dev/0", "dev/1")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["Negative\tdull\t1", "Good\tgrand\t1"], "line 3: the label 'Good'"),
        (["Negative\tdull\t1", "Positive\t \t1"], "line 3: the review is empty"),
        (["Negative\tdull\t1", "Positive\tgrand"], "line 3: expected 3 columns, got 2"),
        (["Negative\tdull\t1", "Positive\tgrand\t2"], "pair 1"),
        (["Negative\tdull\t1", "Negative\tgrand\t1"], "pair 1"),
        (["Negative\tdull\t1"], "cannot be pairs"),
    ],
)
def test_bad_cad_is_refused(tmp_path: Path, rows: list[str], says: str) -> None:
    path = make_cad(tmp_path, []) / "train_paired.tsv"
    path.write_text("\n".join(["Sentiment\tText\tbatch_id", *rows]) + "\n")
    with pytest.raises(DataError, match=says):
        load_cad("train", tmp_path, partial=True)
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match="the first line"):
        load_cad("train", tmp_path, partial=True)


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.integers(0, 5), max_size=12),
)
def test_what_is_not_edited_is_common(a: list[int], b: list[int]) -> None:
    in_a, in_b = edited(a, b)
    assert (len(in_a), len(in_b)) == (len(a), len(b))
    kept = [x for x, changed in zip(a, in_a, strict=True) if not changed]
    assert kept == [x for x, changed in zip(b, in_b, strict=True) if not changed]
    if a == b:
        assert not in_a.any()
    elif not set(a) & set(b):
        assert in_a.all() and in_b.all()


# --- ERASER ----------------------------------------------------------------------------------


def test_eraser_marks_words_up_to_the_end(tmp_path: Path) -> None:
    make_eraser(tmp_path)
    got = load_eraser("val", tmp_path, partial=True)
    assert got.words == (("a", "dull", "film", ".", "the", "plot", "was", "awful", "."),)
    assert np.flatnonzero(got.marked[0]).tolist() == [1, 2]
    assert got.labels.tolist() == [0]
    assert repr(got) == "Rationales(1 reviews, 22.2% of the words marked)"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"classification": "MIXED"}, "the label 'MIXED'"),
        ({"classification": ["POS"]}, r"the label \['POS'\]"),
        ({"annotation_id": "\0"}, "cannot be read"),
        ({"annotation_id": "../negR_val.txt"}, "is no name"),
        ({"annotation_id": "gone.txt"}, r"gone\.txt is missing"),
        ({"evidences": [[{"docid": "negR_val.txt", "start_token": 3, "end_token": 10}]]}, "do not"),
        ({"evidences": [[{"docid": "negR_val.txt", "start_token": -1, "end_token": 2}]]}, "do not"),
        ({"evidences": [[{"docid": "other.txt", "start_token": 1, "end_token": 2}]]}, "do not fit"),
        (
            {"evidences": [[{"docid": "negR_val.txt", "start_token": "1", "end_token": 2}]]},
            "do not",
        ),
        ({"evidences": [[{"docid": "negR_val.txt"}]]}, "not a rationale"),
        ({"evidences": 3}, "not an annotation"),
    ],
)
def test_bad_eraser_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = make_eraser(tmp_path) / "val.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=says):
        load_eraser("val", tmp_path, partial=True)
    path.write_text('{"annotation_id": ')
    with pytest.raises(DataError, match="line 1: not an annotation"):
        load_eraser("val", tmp_path, partial=True)


# --- CIFAR-10 --------------------------------------------------------------------------------


def test_cifar10_is_red_green_blue_by_rows(tmp_path: Path) -> None:
    folder = make_cifar10(tmp_path)
    got = load_cifar10("train", tmp_path, partial=True)
    assert got.pixels.shape == (15, 3, 32, 32)
    record = (folder / "data_batch_2.bin").read_bytes()[3073 : 2 * 3073]
    assert got.labels[4] == record[0]
    assert got.pixels[4, 1, 5, 7] == record[1 + 1024 + 5 * 32 + 7]


def test_pictures_are_scaled_back_and_forth(tmp_path: Path) -> None:
    make_cifar10(tmp_path)
    got = load_cifar10("test", tmp_path, partial=True)
    x, y = got.batch([2, 0])
    assert x.shape == (2, 3, 32, 32) and x.dtype == torch.float32
    assert y.tolist() == got.labels[[2, 0]].tolist()
    red = (x[0, 0] * 0.2470 + 0.4914) * 255
    torch.testing.assert_close(red, torch.from_numpy(got.pixels[2, 0]).float(), atol=1e-3, rtol=0)


def test_bad_cifar10_is_refused(tmp_path: Path) -> None:
    folder = make_cifar10(tmp_path)
    content = bytearray((folder / "test_batch.bin").read_bytes())
    (folder / "test_batch.bin").write_bytes(content[:-1])
    with pytest.raises(DataError, match="cut short"):
        load_cifar10("test", tmp_path, partial=True)
    content[3073] = 10
    (folder / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataError, match="picture 1 has label 10"):
        load_cifar10("test", tmp_path, partial=True)
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        load_cifar10("test", tmp_path, partial=True)


# --- splits ----------------------------------------------------------------------------------


def films(count: int = 40, reviews: int = 5, apart: bool = False) -> tuple[Texts, np.ndarray]:
    """Reviews of films that can be told by the names in them, and which film each is of."""
    rng = np.random.default_rng(0)
    film = np.arange(count * reviews) // reviews
    if apart:
        film = rng.permutation(film)
    names = [[f"name{f}x{i}" for i in range(6)] for f in range(count)]
    texts = [" ".join([*rng.choice(names[f], 5, replace=False), sentence(rng, 0)]) for f in film]
    labels = np.zeros(len(texts), dtype=np.int64)
    return Texts(tuple(texts), labels, tuple(map(str, range(len(texts))))), film


@pytest.mark.parametrize("apart", [False, True])
def test_no_film_is_on_both_sides(apart: bool) -> None:
    reviews, film = films(apart=apart)
    train, validation = validation_split(reviews, share=0.2, seed=3)
    assert sorted([*train, *validation]) == list(range(len(reviews)))
    assert len(validation) == 40
    assert not set(film[train]) & set(film[validation])


def test_a_validation_split_is_of_the_size_asked_for() -> None:
    rng = np.random.default_rng(0)
    reviews = texts_of(*(f"name{i} {sentence(rng, 0)}" for i in range(400)))
    train, validation = validation_split(reviews, share=0.2, seed=3)
    assert len(validation) == 80
    again = validation_split(reviews, share=0.2, seed=3)
    assert np.array_equal(again[0], train) and np.array_equal(again[1], validation)
    assert not np.array_equal(validation_split(reviews, share=0.2, seed=4)[1], validation)
    for share in (0, 1, -0.5):
        with pytest.raises(ValueError, match="share must be"):
            validation_split(reviews, share=share)


def test_a_split_that_would_be_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too few, or too much alike"):
        validation_split(texts_of(*["one film"] * 10), share=0.2)
    with pytest.raises(ValueError, match="must not be empty"):
        encode(texts_of(), wordpiece(VOCABULARY), tmp_path)


def test_copies_are_one_group_and_strangers_are_not() -> None:
    groups = film_groups(texts_of("So dull.", "grand", "so  dull", "a film", "So dull <br />"))
    assert groups[0] == groups[2] == groups[4]
    assert len(set(groups)) == 3


def test_rare_words_link_neighbours_sooner() -> None:
    filler = [f"unique{i} the film" for i in range(60)]
    near = texts_of("karloff lugosi a", "b", "karloff lugosi c", *filler)
    assert len({film_groups(near)[0], film_groups(near)[2]}) == 1
    far = texts_of("karloff lugosi a", *filler, "karloff lugosi c")
    assert film_groups(far)[0] != film_groups(far)[-1]
    four = "karloff lugosi chaney price"
    far = texts_of(f"{four} a", *filler, f"{four} c")
    assert film_groups(far)[0] == film_groups(far)[-1]
    # Words of two labels, two in common, are not enough.
    other = texts_of("karloff lugosi a", "karloff lugosi c", *filler)
    assert film_groups(other)[0] != film_groups(other)[1]


def test_the_protocol_leaves_overlaps_out_of_training(tmp_path: Path) -> None:
    folder = make_imdb(tmp_path, per_folder=30)
    leaked = (folder / "train/pos/4_9.txt").read_text()
    (folder / "test/pos/7_9.txt").write_text(f"{leaked}<br />")
    paired = (folder / "train/neg/2_2.txt").read_text()
    make_cad(tmp_path, [(paired, "altogether new")])
    found = imdb_protocol(tmp_path, partial=True, share=0.2)
    assert len(found.test) == 60
    assert found.classes == ("negative", "positive")
    used = {*found.train.texts, *found.validation.texts}
    assert not used & {leaked, paired}
    assert len(found.train) + len(found.validation) <= 60 - 2
    assert set(found.train.names).isdisjoint(found.validation.names)


def test_without_finds_copies_that_look_different() -> None:
    reviews = texts_of("A fine<br /><br />film", "dull", "grand")
    assert without(reviews, ["a fine film!", "DULL"]).tolist() == [2]


# --- tokens ----------------------------------------------------------------------------------


def test_tokens_follow_the_vocabulary(tmp_path: Path) -> None:
    make_bert(tmp_path)
    tokenizer = load_tokenizer(tmp_path, max_length=6, partial=True)
    found = tokenizer.encode("The FILMS<br />unknown, and more and more")
    assert found.tokens == ["[CLS]", "the", "film", "##s", "[UNK]", "[SEP]"]
    assert found.ids == [VOCABULARY.index(token) for token in found.tokens]
    words = tokenizer.encode(["films", "dull"], is_pretokenized=True)
    assert words.word_ids == [None, 0, 0, 1, None]
    with pytest.raises(DataError, match=r"vocab\.txt is not the published data"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("vocabulary", "says"),
    [
        (["[PAD]", "[UNK]", "[CLS]"], r"missing: \[SEP\]"),
        (["[UNK]", "[PAD]", "[CLS]", "[SEP]"], r"\[PAD\] must come first, it is number 1"),
        ([*VOCABULARY, "film"], "1 of them twice"),
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str, range(1 << 16))], "65,540 entries"),
    ],
)
def test_bad_vocabularies_are_refused(vocabulary: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        wordpiece(vocabulary)


def test_encoded_texts_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    make_imdb(tmp_path)
    reviews = load_imdb("train", tmp_path, partial=True)
    tokenizer = wordpiece(VOCABULARY, max_length=9)
    found = encode(reviews, tokenizer, tmp_path / "cache")
    assert isinstance(found.ids, np.memmap)
    for i, text in enumerate(reviews.texts):
        assert found[i].tolist() == tokenizer.encode(text).ids
    ids, labels = found.batch([3, 7, 1])
    assert ids.shape == (3, found.lengths[[3, 7, 1]].max())
    for row, i in zip(ids, [3, 7, 1], strict=True):
        assert row[row != 0].tolist() == found[i].tolist()
    assert labels.tolist() == reviews.labels[[3, 7, 1]].tolist()


def test_texts_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reviews, tokenizer = texts_of("a film", "dull"), wordpiece(VOCABULARY)
    first = encode(reviews, tokenizer, tmp_path)
    monkeypatch.setattr("mirrorhead_lab.datasets.encoded._write", None)
    again = encode(reviews, tokenizer, tmp_path)
    assert np.array_equal(first.ids, again.ids)
    monkeypatch.undo()
    others = [
        encode(texts_of("a film", "grand"), tokenizer, tmp_path),
        encode(texts_of("a", "film dull"), tokenizer, tmp_path),
        encode(reviews, wordpiece(VOCABULARY, max_length=3), tmp_path),
        encode(Texts(reviews.texts, reviews.labels * 0, reviews.names), tokenizer, tmp_path),
    ]
    assert len(list(tmp_path.iterdir())) == 1 + len(others)


@pytest.mark.parametrize("name", ["ids.u16", "starts.npy", "labels.npy", "about.json"])
def test_a_changed_cache_of_encoded_texts_is_refused(tmp_path: Path, name: str) -> None:
    texts, tokenizer = texts_of("a dull film", "a grand film"), wordpiece(VOCABULARY)
    encode(texts, tokenizer, tmp_path)
    (folder,) = tmp_path.iterdir()
    path = folder / name
    original = path.read_bytes()
    for changed in (original[:-2] + b"\x30\x75", b"", b"[]", original[:-3]):
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"is damaged .* delete"):
            encode(texts, tokenizer, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"is damaged .* delete"):
        encode(texts, tokenizer, tmp_path)
    path.write_bytes(original)
    assert len(encode(texts, tokenizer, tmp_path)) == 2


def test_two_may_encode_at_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reviews = texts_of(*(sentence(rng, 0) for _ in range(2000)))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(encode, reviews, wordpiece(VOCABULARY), tmp_path) for _ in range(2)]
        one, two = (job.result() for job in jobs)
    assert np.array_equal(one.ids, two.ids)
    assert len(list(tmp_path.iterdir())) == 1


# --- batches ---------------------------------------------------------------------------------


@given(
    n=st.integers(1, 500),
    size=st.integers(1, 40),
    seed=st.integers(0, 5),
    by_length=st.booleans(),
)
def test_an_epoch_sees_everything_once(n: int, size: int, seed: int, by_length: bool) -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 2 * n) if by_length else None
    indices = np.arange(n) * 2
    batches = epoch_batches(indices, size, seed=seed, epoch=3, lengths=lengths)
    assert sorted(np.concatenate(batches)) == indices.tolist()
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1) or n % size
    assert all(0 < len(batch) <= size for batch in batches)
    again = epoch_batches(indices, size, seed=seed, epoch=3, lengths=lengths)
    assert [b.tolist() for b in batches] == [b.tolist() for b in again]
    even = even_batches(indices, size, lengths)
    assert sorted(np.concatenate(even)) == indices.tolist()


def test_buckets_waste_little_and_epochs_differ() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 5000)
    places = np.arange(5000)
    padded = {}
    for name, given_lengths in (("buckets", lengths), ("chance", None)):
        batches = epoch_batches(places, 50, seed=0, epoch=0, lengths=given_lengths)
        padded[name] = sum(lengths[b].max() * len(b) for b in batches)
    assert padded["buckets"] < 1.03 * lengths.sum() < 0.6 * padded["chance"]
    orders = [epoch_batches(places, 50, seed=0, epoch=e, lengths=lengths) for e in (0, 1)]
    assert not np.array_equal(orders[0][0], orders[1][0])
    means = np.array([lengths[b].mean() for b in orders[0]])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.4  # no order among batches
    with pytest.raises(ValueError, match="batch_size must be"):
        epoch_batches(places, 0, seed=0, epoch=0)
