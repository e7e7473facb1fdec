"""Scoring attention against people, with scorers whose marks are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data_slices import VOCABULARY, make_cad, make_eraser, needs_real_data
from mirrorhead.analysis.people import (
    at_random,
    cls_attention,
    gradient_times_input,
    score_edits,
    score_rationales,
)
from mirrorhead.data import Rationales, load_cad, load_eraser, load_tokenizer
from mirrorhead.data.tokenizer import wordpiece
from mirrorhead.models import TextClassifier, TextSettings, attention_maps

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
    return (ids[0] == DULL).double().numpy() + 1e-3


def small() -> TextClassifier:
    torch.manual_seed(0)
    settings = TextSettings(vocabulary=len(VOCABULARY), dim=8, hidden=12, layers=2, heads=2)
    return TextClassifier(settings)


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
    given = rationales(("a dull film was the plot", "dull"), ("the plot is dull .", "dull"))
    found = score_rationales(CountsDull(), sees_dull, given, wordpiece(VOCABULARY), share=0.2)
    assert (found.documents, found.auprc, found.token_f1, found.iou_f1) == (2, 1, 1, 1)
    assert found.chance == pytest.approx((1 / 6 + 1 / 5) / 2)
    # Without the word the class is lost; with it alone nothing is.
    before, after = (torch.tensor(x).softmax(0)[0] for x in ([2.0, 0.0], [0.0, 1.0]))
    assert found.comprehensiveness == pytest.approx(float(before - after))
    assert found.sufficiency == pytest.approx(0, abs=1e-7)


def test_words_that_are_cut_off_are_not_found() -> None:
    given = rationales(
        ("a film was the plot of dull", "dull"),
    )
    found = score_rationales(CountsDull(), sees_dull, given, wordpiece(VOCABULARY, 5), share=0.1)
    assert found.auprc < 0.5 and found.token_f1 == 0


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


def test_scores_at_random_are_chance() -> None:
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(300):
        words = rng.choice(["a", "film", "plot", "dull"], 40)
        documents.append((" ".join(words), "dull"))
    found = score_rationales(
        CountsDull(), at_random(), rationales(*documents), wordpiece(VOCABULARY), share=0.25
    )
    assert found.auprc == pytest.approx(found.chance, abs=0.06)
    assert found.token_f1 == pytest.approx(0.25, abs=0.03)


def test_attention_of_cls_is_the_last_layers_mean() -> None:
    model = small().train()
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    found = cls_attention(model)(ids)
    expected = attention_maps(model, ids)[1][0, :, 0].mean(dim=0)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert model.training


def test_gradient_times_input_is_what_a_linear_model_adds_up() -> None:
    model = CountsDull()
    ids = torch.tensor([[2, DULL, 6, DULL, 3]])
    found = gradient_times_input(model, model.embed)(ids)
    assert found.tolist() == [0, 2, 0, 2, 0]
    text = small()
    scores = gradient_times_input(text, text.tokens)(torch.tensor([[2, 5, 6, 7, 3]]))
    assert scores.shape == (5,) and (scores > 0).all()
    assert text.tokens.weight.grad is None and text.training


def test_eraser_slices_are_scored(tmp_path: Path) -> None:
    make_eraser(tmp_path)
    given = load_eraser("val", tmp_path, partial=True)
    model = small()
    found = score_rationales(model, cls_attention(model), given, wordpiece(VOCABULARY), 0.2)
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
