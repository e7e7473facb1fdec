"""Attention with dropout, text by text, against the formula with the same weights dropped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mirrorhead_lab.models import SelfAttention
from mirrorhead_lab.models.self_attention import (
    attention_keeping,
    dropped_attention,
    kept,
    levels_dropped,
)

B, HEADS, T, D = 3, 2, 7, 5


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor, gain: float, scale: float
) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(dim=-1) * keep * gain) @ v


def some(rows: int, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(B, HEADS, n, d) for n, d in ((rows, D), (T, D), (T, width))]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v


def padding() -> Tensor:
    return (torch.arange(T) < torch.tensor([[T], [4], [1]]))[:, None, None, :]


@pytest.mark.parametrize("rows", [T, 3, 1])
@pytest.mark.parametrize("mask", [None, padding()])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_the_formula_with_the_same_mask(
    rows: int, mask: Tensor | None, scale: float | None
) -> None:
    inputs = some(rows, width=4)
    keep = torch.rand(B, HEADS, rows, T) < 0.7
    fast = attention_keeping(*inputs, mask, keep, 1.7, scale)
    slow = plain(*inputs, mask, keep, 1.7, scale or 1 / math.sqrt(D))
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    weights = torch.randn_like(slow)
    grads = [torch.autograd.grad((out * weights).sum(), inputs) for out in (fast, slow)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gradcheck() -> None:
    keep = torch.rand(B, HEADS, T, T) < 0.7

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_keeping(q, k, v, padding(), keep, 1.25)

    assert torch.autograd.gradcheck(run, some(T))


@pytest.mark.slow
def test_a_seed_decides_and_the_mean_is_attention_without_dropout() -> None:
    q, k, v = (x.detach() for x in some(T))
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(dropped_attention(q, k, v, padding(), 0.2))
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])
    many = torch.stack([dropped_attention(q, k, v, padding(), 0.2) for _ in range(4_000)])
    whole = plain(q, k, v, padding(), torch.ones(T, T), 1.0, 1 / math.sqrt(D))
    error = many.std(dim=0) / math.sqrt(len(many))
    assert ((many.mean(dim=0) - whole).abs() <= 6 * error + 1e-12).all()


@pytest.mark.parametrize("rows", [None, 3, 1])
def test_the_layer_is_the_plain_formula_in_training(rows: int | None) -> None:
    layer = SelfAttention(HEADS * D, HEADS, dropout=0.3).double()
    x = torch.randn(B, T, HEADS * D, dtype=torch.float64, requires_grad=True)
    dropped, gain = levels_dropped(0.3)
    # One row is drawn with the heads as its rows, as they all look at the same tokens.
    shape = (B, 1, HEADS, T) if rows == 1 else (B, HEADS, rows or T, T)
    torch.manual_seed(5)
    keep = kept(torch.Size(shape), dropped)
    keep = keep.transpose(1, 2) if rows == 1 else keep
    q, k, v = (
        m(x).unflatten(-1, (HEADS, D)).transpose(1, 2)
        for m in (layer.query, layer.key, layer.value)
    )
    slow = plain(q[:, :, :rows], k, v, padding(), keep, gain, 1 / math.sqrt(D))
    slow = layer.out(slow.transpose(1, 2).flatten(2))
    torch.manual_seed(5)
    fast = layer(x, padding(), rows)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    leaves = [x, *layer.parameters()]
    weights = torch.randn_like(slow)
    grads = [torch.autograd.grad((out * weights).sum(), leaves) for out in (fast, slow)]
    for one, two in zip(*grads, strict=True):
        assert float(two.abs().max()) > 1e-6
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [None, 1])
def test_autocast_is_taken(rows: int | None) -> None:
    layer = SelfAttention(HEADS * D, HEADS, dropout=0.3)
    x = torch.randn(B, T, HEADS * D, requires_grad=True)
    torch.manual_seed(5)
    wide = layer(x, padding(), rows)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = layer(x, padding(), rows)
    torch.testing.assert_close(narrow.float(), wide, rtol=0.1, atol=0.05)
    grads = [
        torch.autograd.grad(out.float().sum(), [x, *layer.parameters()]) for out in (wide, narrow)
    ]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(two, one, rtol=0.1, atol=0.1 * float(one.abs().max()))
