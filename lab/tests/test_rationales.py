"""Scoring attention against people, with scorers whose marks are known."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from data_slices import VOCABULARY, make_cad, make_eraser, needs_real_data
from mirrorhead_lab.datasets import Pairs, Rationales, Texts, load_cad, load_eraser, load_tokenizer
from mirrorhead_lab.datasets.encoded import wordpiece
from mirrorhead_lab.evaluation import average_precision, rollout, token_f1
from mirrorhead_lab.evaluation.rationales import (
    _windows,
    at_random,
    attention_rollout,
    cls_attention,
    gradient_times_input,
    score_edits,
    score_rationales,
)
from mirrorhead_lab.models import TextClassifier, TextSettings, attention_maps

DULL = VOCABULARY.index("dull")


class CountsDull(nn.Module):
    """Logits from the number of "dull" alone; its embedding is that indicator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), 1)
        with torch.no_grad():
            self.embed.weight.zero_()
            self.embed.weight[DULL] = 1

    def forward(self, ids: Tensor) -> Tensor:  # (b, T) -> (b, 2)
        count = self.embed(ids).sum(dim=1)
        return torch.cat([2 * count, 1 - count], dim=1)


def sees_dull(ids: Tensor) -> np.ndarray:
    return (ids == DULL).double().numpy() + 1e-3


def small() -> TextClassifier:
    torch.manual_seed(0)
    settings = TextSettings(vocabulary=len(VOCABULARY), dim=8, hidden=12, layers=2, heads=2)
    return TextClassifier(settings)


def by_gradient(model: TextClassifier) -> Any:
    return gradient_times_input(model, model.tokens)


def rationales(*documents: tuple[str, str]) -> Rationales:
    """Texts, and the words in them that are marked."""
    words = tuple(tuple(text.split()) for text, _ in documents)
    marked = tuple(
        np.array([word in marks.split() for word in row])
        for row, (_, marks) in zip(words, documents, strict=True)
    )
    labels = np.zeros(len(words), dtype=np.int64)
    return Rationales(words, labels, marked, tuple(map(str, range(len(words)))))


def test_a_scorer_that_knows_is_perfect() -> None:
    annotated = rationales(("a dull film was the plot", "dull"), ("the plot is dull .", "dull"))
    found = score_rationales(CountsDull(), sees_dull, annotated, wordpiece(VOCABULARY), share=0.2)
    assert (found.documents, found.auprc, found.token_f1, found.iou_f1) == (2, 1, 1, 1)
    assert found.chance == pytest.approx((1 / 6 + 1 / 5) / 2)
    # Without the word the class is lost; with it alone nothing is.
    before, after = (torch.tensor(x).softmax(0)[0] for x in ([2.0, 0.0], [0.0, 1.0]))
    assert found.comprehensiveness == pytest.approx(float(before - after))
    assert found.sufficiency == pytest.approx(0, abs=1e-7)


@pytest.mark.slow
@given(st.lists(st.sampled_from(["a", "film", "films", "plots", "unknown"]), min_size=1))
def test_windows_are_few_even_and_whole(words: list[str]) -> None:
    whole = wordpiece(VOCABULARY).encode(words, is_pretokenized=True)
    windows = _windows(words, wordpiece(VOCABULARY, 7))
    assert len(windows) == max(1, math.ceil((len(whole.ids) - 2) / 5))
    lengths = [len(ids) for ids, _ in windows]
    assert max(lengths) <= 7 and max(lengths) - min(lengths) <= 1
    assert all((ids[0], ids[-1]) == (2, 3) for ids, _ in windows)
    assert [i for ids, _ in windows for i in ids[1:-1]] == whole.ids[1:-1]
    assert [w for _, places in windows for w in places[1:-1]] == whole.word_ids[1:-1]


def test_words_beyond_the_models_length_are_found() -> None:
    annotated = rationales(
        ("a film was the plot of dull", "dull"),
    )
    found = score_rationales(
        CountsDull(), sees_dull, annotated, wordpiece(VOCABULARY, 5), share=0.1
    )
    assert (found.auprc, found.token_f1) == (1, 1)


@pytest.mark.parametrize("scorer", [cls_attention, attention_rollout, by_gradient])
def test_windows_together_are_windows_one_by_one(scorer: Any) -> None:
    model = small().double()
    text = "the films was dull and of a very awful plot . the actor is grand !"
    words = text.split()
    chosen, share, tokenizer = np.zeros(len(words), dtype=bool), 0.25, wordpiece(VOCABULARY, 8)
    windows = _windows(words, tokenizer)
    assert len({len(ids) for ids, _ in windows}) == 2  # so that there is padding
    score = scorer(model)
    totals = np.zeros(len(words))
    for ids, places in windows:
        for value, word in zip(score(torch.tensor([ids]))[0], places, strict=True):
            if word is not None:
                totals[word] += value
    chosen[np.argsort(-totals, kind="stable")[: round(share * len(words))]] = True

    def probability(keep: np.ndarray) -> np.ndarray:
        rows = []
        for ids, places in windows:
            kept = [i for i, w in zip(ids, places, strict=True) if w is None or keep[w]]
            rows.append(model.eval()(torch.tensor([kept]))[0].softmax(0).detach().numpy())
        return np.mean(rows, axis=0)

    before = probability(np.ones(len(words), dtype=bool))
    marked = np.array([word in ("dull", "awful", "grand") for word in words])
    annotated = Rationales((tuple(words),), np.zeros(1, dtype=np.int64), (marked,), ("one",))
    found = score_rationales(model, score, annotated, tokenizer, share)
    best = before.argmax()
    assert found.auprc == pytest.approx(average_precision(totals, marked))
    assert found.token_f1 == pytest.approx(token_f1(chosen, marked))
    assert found.comprehensiveness == pytest.approx((before - probability(~chosen))[best])
    assert found.sufficiency == pytest.approx((before - probability(chosen))[best])


def test_unmarked_documents_are_left_out() -> None:
    marked = ("a dull film", "dull")
    tokenizer = wordpiece(VOCABULARY)
    one = score_rationales(CountsDull(), sees_dull, rationales(marked), tokenizer, 0.3)
    two = score_rationales(
        CountsDull(), sees_dull, rationales(marked, ("a film", "")), tokenizer, 0.3
    )
    assert one == two
    with pytest.raises(ValueError, match="no document with anything marked"):
        score_rationales(CountsDull(), sees_dull, rationales(("a film", "")), tokenizer, 0.3)


def test_edits_are_found_in_originals(tmp_path: Path) -> None:
    make_cad(tmp_path, [("a dull film", "a grand film"), ("the plot", "the plot")])
    pairs = load_cad("test", tmp_path, partial=True)
    tokenizer = wordpiece(VOCABULARY)
    found = score_edits(sees_dull, pairs, tokenizer)
    assert (found.pairs, found.auprc) == (1, 1)
    assert found.mass == pytest.approx(1.001 / 1.003)
    assert found.chance == pytest.approx(1 / 3)


def test_what_a_longer_revision_pushes_out_is_not_edited(tmp_path: Path) -> None:
    make_cad(tmp_path, [("a dull film film plot the", "a grand grand grand film film plot the")])
    pairs = load_cad("test", tmp_path, partial=True)
    found = score_edits(sees_dull, pairs, wordpiece(VOCABULARY, max_length=7))  # 5 are read
    assert found.chance == pytest.approx(1 / 5)


@pytest.mark.slow
@pytest.mark.parametrize("marked", ["plot", "plotsss"])  # one piece, and four of them
def test_scores_at_random_are_chance(marked: str) -> None:
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(300):
        words = rng.choice(["a", "film", "the", marked], 40)
        documents.append((" ".join(words), marked))
    found = score_rationales(
        CountsDull(), at_random(), rationales(*documents), wordpiece(VOCABULARY), share=0.25
    )
    assert found.auprc == pytest.approx(found.chance, abs=0.06)
    assert found.token_f1 == pytest.approx(0.25, abs=0.03)


def test_attention_of_cls_is_the_last_layers_mean() -> None:
    model = small().train()
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    found = cls_attention(model)(ids)[0]
    expected = attention_maps(model, ids)[1][0, :, 0].mean(dim=0)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert model.training
    maps = attention_maps(model, ids)
    one = cls_attention(model, layer=0, heads=[1])(ids)[0]
    np.testing.assert_allclose(one, maps[0][0, 1, 0].numpy(), rtol=1e-6)
    both = cls_attention(model, layer=-2, heads=[0, 1])(ids)[0]
    np.testing.assert_allclose(both, maps[0][0, :, 0].mean(dim=0).numpy(), rtol=1e-6)
    for layer in (2, -3):
        with pytest.raises(ValueError, match="layer must be from 0 to 1"):
            cls_attention(model, layer=layer)(ids)
    for heads in ([], [2], [0, -1]):
        with pytest.raises(ValueError, match="heads must be some numbers from 0 to 1"):
            cls_attention(model, heads=heads)(ids)


def test_rollout_is_what_paths_through_the_layers_add_up_to() -> None:
    """Against a sum over all paths: each layer, a token stays or is moved by mean attention."""
    torch.manual_seed(1)
    settings = TextSettings(vocabulary=len(VOCABULARY), dim=8, hidden=12, layers=3, heads=2)
    model = TextClassifier(settings).double().train()
    ids = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 9, 3, 0]])
    found = attention_rollout(model)(ids)
    assert not model.every_row and model.training
    model.every_row = True
    maps = [layer.mean(dim=1).numpy() for layer in attention_maps(model, ids)]
    expected = np.zeros((2, 5))
    for b, a, c, end in itertools.product(range(2), range(5), range(5), range(5)):
        path, weight = (0, a, c, end), 1.0
        for layer, (one, two) in zip(reversed(maps), itertools.pairwise(path), strict=True):
            weight *= (layer[b, one, two] + (one == two)) / 2
        expected[b, end] += weight
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)
    assert found[1, 4] == 0  # padding
    attention_rollout(model)(ids)
    assert model.every_row
    model.every_row = False
    with pytest.raises(ValueError, match="a row for every token"):
        rollout(attention_maps(model, ids))
    with pytest.raises(ValueError, match="at least one layer"):
        rollout([])


def test_texts_do_not_meet_in_a_batch() -> None:
    model = small().double()
    ids = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]])
    for scorer in (cls_attention(model), by_gradient(model)):
        both = scorer(ids)
        np.testing.assert_allclose(both[:1], scorer(ids[:1]), rtol=1e-10)
        np.testing.assert_allclose(both[1:, :3], scorer(ids[1:, :3]), rtol=1e-10)


def test_scores_of_0_are_flat() -> None:
    original, revision = (
        Texts((text,), np.array([label]), ("one",))
        for label, text in enumerate(("a dull film", "a grand film"))
    )
    nothing = score_edits(
        lambda ids: np.zeros(tuple(ids.shape)), Pairs(original, revision), wordpiece(VOCABULARY)
    )
    assert nothing.mass == nothing.auprc == nothing.chance == pytest.approx(1 / 3)


def test_gradient_times_input_is_what_a_linear_model_adds_up() -> None:
    model = CountsDull()
    ids = torch.tensor([[2, DULL, 6, DULL, 3]])
    found = gradient_times_input(model, model.embed)(ids)[0]
    assert found.tolist() == [0, 2, 0, 2, 0]
    text = small()
    scores = gradient_times_input(text, text.tokens)(torch.tensor([[2, 5, 6, 7, 3]]))[0]
    assert scores.shape == (5,) and (scores > 0).all()
    assert text.tokens.weight.grad is None and text.training


def test_eraser_slices_are_scored(tmp_path: Path) -> None:
    make_eraser(tmp_path)
    annotated = load_eraser("val", tmp_path, partial=True)
    model = small()
    found = score_rationales(model, cls_attention(model), annotated, wordpiece(VOCABULARY), 0.2)
    assert found.documents == 1 and 0 < found.auprc <= 1


@needs_real_data
@pytest.mark.slow
def test_real_sets_are_scored_near_chance_by_an_untrained_model() -> None:
    torch.manual_seed(0)
    model = TextClassifier(TextSettings.laptop())
    tokenizer = load_tokenizer(max_length=256)
    pairs = load_cad("dev")
    edits = score_edits(cls_attention(model), pairs, tokenizer)
    assert edits.pairs >= 240
    assert edits.auprc == pytest.approx(edits.chance, abs=0.12)
    assert edits.mass == pytest.approx(edits.chance, abs=0.05)
