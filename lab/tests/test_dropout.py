"""Dropout by 16 bits an entry: the law it draws from, its gradient, its seeds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirrorhead_lab.models.self_attention import Dropout, dropout, kept


@given(share=st.floats(0, 0.999), shape=st.lists(st.integers(0, 7), max_size=3))
def test_entries_are_zero_or_scaled_and_so_is_the_gradient(share: float, shape: list[int]) -> None:
    x = torch.rand(shape, dtype=torch.float64) + 1
    x.requires_grad_()
    out = dropout(x, share)
    alive = out != 0
    scale = out[alive] / x[alive]
    torch.testing.assert_close(scale, torch.full_like(scale, 1 / (1 - share)), rtol=0.02, atol=0)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient[alive], scale)
    assert (gradient[~alive] == 0).all()


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_the_share_is_right_and_entries_are_independent(share: float) -> None:
    torch.manual_seed(1)
    count = 400_000
    dropped = (dropout(torch.ones(count), share) == 0).double()
    # Five standard errors; neighbours share a 64-bit word, so their correlation is looked at.
    assert abs(dropped.mean() - share) < 5 * math.sqrt(share * (1 - share) / count)
    centred = dropped - dropped.mean()
    for lag in (1, 2, 3, 4, 64):
        correlation = (centred[lag:] * centred[:-lag]).mean() / centred.square().mean()
        assert abs(correlation) < 5 / math.sqrt(count)


def test_a_seed_decides() -> None:
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(kept(torch.Size([1000]), 2**15))
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])


def test_evaluation_leaves_everything_alone() -> None:
    x = torch.rand(100)
    assert Dropout(0.5).eval()(x) is x
    assert (Dropout(0.5)(x) == 0).any()
