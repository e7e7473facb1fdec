"""Measures of sparsity and of token selection, against definitions written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from mirrorhead_lab.evaluation import (
    attention_weights_by_kind,
    average_precision,
    count_large,
    gini,
    hoyer,
    iou_f1,
    mass,
    normalized_entropy,
    pruned,
    token_f1,
    top,
    word_scores,
)
from mirrorhead_lab.models import TextClassifier, TextSettings, attention_maps

sizes = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=20)
documents = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=15)
masks = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20)


# --- weights --------------------------------------------------------------------------------


@given(sizes)
def test_gini_is_the_mean_difference(values: list[float]) -> None:
    assume(max(map(abs, values)) > 1e-3)
    a = np.abs(values)
    expected = np.abs(a[:, None] - a[None]).mean() / (2 * a.mean())
    assert gini(torch.tensor(values)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@given(sizes, st.sampled_from([1e-30, 0.1, -3.0, 1e30]))
def test_sparsity_does_not_depend_on_scale(values: list[float], scale: float) -> None:
    assume(max(map(abs, values)) > 1e-3)
    w = torch.tensor(values, dtype=torch.float64)
    for measure in (gini, hoyer):
        assert measure(w) == pytest.approx(measure(scale * w), abs=1e-9)
        assert -1e-9 <= measure(w) <= 1 + 1e-9
        # Zeros beside it make it sparser.
        assert measure(torch.cat([w, torch.zeros(5)])) > measure(w) - 1e-9


def test_bad_weights_are_refused() -> None:
    for measure in (gini, hoyer):
        with pytest.raises(ValueError, match="all zero"):
            measure(torch.zeros(4))
        with pytest.raises(ValueError, match="finite"):
            measure(torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="at least 2"):
        hoyer(torch.ones(1))


def small() -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(TextSettings(vocabulary=30, dim=8, hidden=12, layers=2, heads=2)).eval()


def test_weights_are_found_by_kind() -> None:
    model = small()
    found = attention_weights_by_kind(model)
    block: Any = model.blocks[1]
    assert {kind: w.numel() for kind, w in found.items()} == dict.fromkeys(found, 2 * 64)
    assert torch.equal(found["query"][64:], block.attention.query.weight.flatten())
    assert count_large(found["key"], 0.0) == 128
    assert count_large(torch.tensor([0.06, -0.06, 0.0599, -1.0])) == 3
    with pytest.raises(ValueError, match="no parameters named"):
        attention_weights_by_kind(nn.Linear(2, 2))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_pruning_takes_the_smallest(share: float) -> None:
    model = small()
    found = pruned(model, share)
    for (name, before), after in zip(model.named_parameters(), found.parameters(), strict=True):
        gone = (after == 0) & (before != 0)
        if before.ndim < 2:
            assert torch.equal(before, after), name
            continue
        assert int(gone.sum()) == int(share * before.numel()), name
        assert torch.equal(after[~gone], before[~gone])
        if gone.any():
            assert before[gone].abs().max() <= before[~gone].abs().min()
    with pytest.raises(ValueError, match="share must be"):
        pruned(model, 1.0)


def test_equal_weights_are_not_pruned_together() -> None:
    layer = nn.Linear(10, 10)
    nn.init.ones_(layer.weight)
    after: Any = pruned(layer, 0.3)
    assert int((after.weight == 0).sum()) == 30


# --- selection ------------------------------------------------------------------------------


@pytest.mark.slow
@given(documents)
def test_average_precision_is_the_area_in_steps(document: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in document], dtype=float)
    marked = np.array([mark for _, mark in document])
    assume(marked.any())
    area, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = scores >= threshold
        found = float(marked[chosen].sum() / marked.sum())
        area += (found - recall) * float(marked[chosen].mean())
        recall = found
    assert average_precision(scores, marked) == pytest.approx(area)
    # Any order of the tokens, and any growing function of the scores, gives the same.
    order = np.random.default_rng(0).permutation(len(scores))
    assert average_precision(np.exp(scores)[order], marked[order]) == pytest.approx(area)


def test_constant_scores_have_the_precision_of_chance() -> None:
    marked = np.arange(50) < 7
    assert average_precision(np.ones(50), marked) == pytest.approx(7 / 50)
    assert mass(np.ones(50), marked) == pytest.approx(7 / 50)
    assert average_precision(marked.astype(float), marked) == 1
    assert mass(marked.astype(float), marked) == 1


@pytest.mark.slow
@given(masks)
def test_f1_of_tokens_and_spans(pairs: list[tuple[bool, bool]]) -> None:
    chosen, marked = (np.array(column) for column in zip(*pairs, strict=True))
    f1 = token_f1(chosen, marked)
    assert f1 == token_f1(marked, chosen)
    if (chosen & marked).any():
        precision, recall = marked[chosen].mean(), chosen[marked].mean()
        assert f1 == pytest.approx(2 / (1 / precision + 1 / recall))
    else:
        assert f1 == iou_f1(chosen, marked) == 0
    assert iou_f1(chosen, marked) == pytest.approx(iou_f1(marked, chosen))
    assert iou_f1(marked, marked) == token_f1(marked, marked) == float(marked.any())


def test_spans_match_by_half_of_their_union() -> None:
    marked = np.array([1, 1, 1, 1, 0, 0], dtype=bool)
    assert iou_f1(np.array([1, 1, 0, 0, 0, 0], dtype=bool), marked) == 1
    assert iou_f1(np.array([1, 0, 0, 0, 0, 0], dtype=bool), marked) == 0
    assert iou_f1(np.array([1, 1, 0, 0, 0, 1], dtype=bool), marked) == pytest.approx(2 / 3)


def test_top_takes_the_share_asked_for() -> None:
    scores = np.random.default_rng(0).random(40)
    for share in (0.1, 0.25, 1.0):
        chosen = top(scores, share)
        assert chosen.sum() == 40 * share
        if share < 1:
            assert scores[chosen].min() > scores[~chosen].max()
    assert top(scores, 1e-6).sum() == 1
    with pytest.raises(ValueError, match="share must be"):
        top(scores, 0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: average_precision(np.ones(3), np.zeros(3, dtype=bool)), "at least one"),
        (lambda: average_precision(np.ones(3), np.ones(4, dtype=bool)), "must be alike"),
        (lambda: average_precision(np.array([np.nan]), np.ones(1, dtype=bool)), "finite"),
        (lambda: mass(np.array([-1.0, 2.0]), np.ones(2, dtype=bool)), "not be negative"),
        (lambda: word_scores(np.ones(3), [None, 0], 1), "3 scores for 2 tokens"),
    ],
)
def test_bad_scores_are_refused(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


# --- entropy --------------------------------------------------------------------------------


def test_entropy_is_of_what_may_be_seen() -> None:
    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 0, 0], [2, 0, 0, 0]])
    weights = attention_maps(small(), ids, layers=[0])[0]
    seen = (ids != 0)[:, None, None, :]
    found = normalized_entropy(weights, seen)
    assert found.shape == weights.shape[:-1]
    for b, n in enumerate((4, 2)):
        for row, value in zip(weights[b].flatten(0, 1), found[b].flatten(), strict=True):
            kept = row[:n].double()
            assert float(value) == pytest.approx(float(-(kept * kept.log()).sum()) / math.log(n))
    assert (found[2] == 0).all()
    flat = torch.full((3, 7), 1 / 7, dtype=torch.float64)
    torch.testing.assert_close(normalized_entropy(flat), torch.ones(3, dtype=torch.float64))
