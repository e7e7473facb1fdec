"""The models against the plain formula, and what can be read from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorhead import MirrorAdam, attention_param_groups
from mirrorhead_lab.models import (
    HuggingFaceClassifier,
    SelfAttention,
    TextClassifier,
    TextSettings,
    ViT,
    ViTSettings,
    attention_maps,
)
from mirrorhead_lab.models.attention_maps import attention_weights

SMALL = TextSettings(
    vocabulary=50, max_length=24, dim=24, hidden=40, layers=3, heads=3, embedding_std=0.5
)
SMALL_VIT = ViTSettings(side=12, patch=3, dim=16, hidden=20, layers=3, heads=2, dropout=0.0)


# --- the plain computation: every head, row and padding position, one at a time ---------------


def plain_attention(layer: SelfAttention, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """One text: x (T, dim), seen (T,) -> (T, dim) and the weights (heads, T, T)."""
    size = x.shape[1] // layer.heads
    outs, maps = [], []
    for h in range(layer.heads):
        rows = slice(h * size, (h + 1) * size)
        q, k, v = (x @ m.weight[rows].T for m in (layer.query, layer.key, layer.value))
        scores = q @ k.T / math.sqrt(size)
        e = (scores - scores.max()).exp() * seen
        maps.append(e / e.sum(dim=1, keepdim=True))
        outs.append(maps[-1] @ v)
    out = torch.cat(outs, dim=1) @ layer.out.weight.T
    if layer.out.bias is not None:
        out = out + layer.out.bias
    return out, torch.stack(maps)


def plain_norm(norm: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    out = centred / (centred.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return out if norm.bias is None else out + norm.bias


def plain_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def plain_text(model: TextClassifier, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Padded to max_length, all rows of all blocks, an explicit softmax."""
    logits, maps = [], []
    for row in ids:
        full = torch.zeros(model.settings.max_length, dtype=torch.long)
        full[: len(row)] = row
        seen = (full != 0).to(model.head.weight.dtype)
        x = model.tokens.weight[full] + model.positions.weight
        if model.settings.embedding_norm:
            x = plain_norm(model.norm, x)
        found = []
        block: Any
        for block in model.blocks:
            out, weights = plain_attention(block.attention, x, seen)
            x = plain_norm(block.norm1, x + out)
            hidden = x @ block.up.weight.T
            relu = model.settings.activation == "relu"
            hidden = hidden.clamp(min=0) if relu else plain_gelu(hidden)
            x = plain_norm(block.norm2, x + hidden @ block.down.weight.T)
            found.append(weights)
        # One logit is that of the second class, against 0.
        logits.append(
            torch.cat([torch.zeros(2 - len(model.head.weight)), model.head.weight @ x[0]])
        )
        maps.append(torch.stack(found))
    return torch.stack(logits), list(torch.stack(maps).unbind(1))


def plain_vit(model: ViT, pictures: Tensor) -> Tensor:
    s = model.settings
    logits = []
    for picture in F.interpolate(pictures, (s.side, s.side), mode="bilinear"):
        tokens: list[Tensor] = [model.cls]
        for i in range(0, s.side, s.patch):
            for j in range(0, s.side, s.patch):
                piece = picture[:, i : i + s.patch, j : j + s.patch].permute(1, 2, 0).flatten()
                tokens.append(model.patches.weight @ piece + model.patches.bias)
        x = torch.stack(tokens) + model.positions
        block: Any
        for block in model.blocks:
            seen = torch.ones(len(x), dtype=x.dtype)
            x = x + plain_attention(block.attention, plain_norm(block.norm1, x), seen)[0]
            h = plain_norm(block.norm2, x) @ block.up.weight.T + block.up.bias
            x = x + plain_gelu(h) @ block.down.weight.T + block.down.bias
        logits.append(model.head.weight @ plain_norm(model.norm, x)[0] + model.head.bias)
    return torch.stack(logits)


def some_ids(lengths: list[int], vocabulary: int = 50) -> Tensor:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(1, vocabulary, (length,))
    return ids


def text_model(**changes: Any) -> TextClassifier:
    return TextClassifier(dataclasses.replace(SMALL, **changes)).double().eval()


# --- exactness --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding_norm": True, "heads": 4},
        {"layers": 1},
        {"activation": "relu", "one_logit": False},
    ],
)
def test_text_classifier_is_the_plain_formula(changes: dict[str, Any]) -> None:
    model = text_model(**changes)
    ids = some_ids([17, 4, 9, 17])
    fast, plain = model(ids), plain_text(model, ids)[0]
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)
    names, weights = zip(*model.named_parameters(), strict=True)
    labels = torch.tensor([0, 1, 1, 0])
    grads = [
        torch.autograd.grad(F.cross_entropy(logits, labels), weights) for logits in (fast, plain)
    ]
    for name, one, two in zip(names, *grads, strict=True):
        assert float(two.abs().max()) > 1e-6, f"{name} has no gradient"
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_vit_is_the_plain_formula() -> None:
    model = ViT(SMALL_VIT).double().eval()
    pictures = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(pictures), plain_vit(model, pictures), rtol=0, atol=1e-12)


def test_one_row_is_enough() -> None:
    text, vit = text_model(), ViT(SMALL_VIT).double().eval()
    for model, x in ((text, some_ids([9, 12])), (vit, torch.randn(2, 3, 12, 12).double())):
        short = model(x)
        model.every_row = True
        torch.testing.assert_close(model(x), short, rtol=0, atol=1e-12)


def test_padding_changes_nothing() -> None:
    model = text_model()
    ids = some_ids([11, 5])
    alone = model(ids[1:, :5])
    torch.testing.assert_close(model(ids)[1:], alone, rtol=0, atol=1e-12)


def test_dropout_acts_in_training_alone() -> None:
    model, ids = text_model().train(), some_ids([9, 12])
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    only_embeddings = text_model(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.5).train()
    assert not torch.equal(only_embeddings(ids), only_embeddings(ids))
    quiet = text_model(dropout=0.0, attention_dropout=0.0).train()
    assert torch.equal(quiet(ids), quiet(ids))
    only_attention = text_model(dropout=0.0, attention_dropout=0.5).train()
    assert not torch.equal(only_attention(ids), only_attention(ids))


def test_sizes_are_the_papers() -> None:
    for size in (3, 4, 6):
        with torch.device("meta"):
            model = TextClassifier(TextSettings.paper(size))
        count = sum(p.numel() for p in model.parameters())
        embeddings = (30_522 + 512) * 384
        block = 4 * 384**2 + 2 * 384 * 1_536 + 2 * 384
        assert count == embeddings + size * block + 384  # one logit
        assert not [name for name, _ in model.named_parameters() if "bias" in name]
    with torch.device("meta"):
        vit = ViT(ViTSettings())
    assert vit.positions.shape == (145, 512)
    assert len(vit.blocks) == 6


def test_attention_matrices_are_grouped() -> None:
    for model, layers in ((text_model(), 3), (ViT(SMALL_VIT), 3)):
        attention, _ = attention_param_groups(model, geometry=1.1)
        assert len(attention["params"]) == 3 * layers
        assert all(".out." not in name for name, _ in attention["params"])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TextSettings(layers=0), "layers must be at least 1, got 0"),
        (lambda: TextSettings(dropout=1.0), "dropout must be from 0 to below 1"),
        (lambda: TextSettings(embedding_std=0.0), "embedding_std must be positive"),
        (lambda: TextSettings(activation=cast(Any, "tanh")), "one of gelu, relu, got 'tanh'"),
        (lambda: TextSettings.paper(5), "size must be 3, 4 or 6, got 5"),
        (lambda: ViTSettings(patch=5), "patch must divide side"),
        (lambda: ViTSettings(dropout=-0.1), "dropout must be"),
        (lambda: ViTSettings(heads=0), "heads must be at least 1"),
        (lambda: text_model(heads=5), "heads must divide dim, got 5 heads and dim 24"),
        (lambda: text_model()(some_ids([25])), "at most 24 columns, got 25"),
    ],
)
def test_bad_settings_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.slow
def test_compiled_is_the_same() -> None:
    model = text_model(layers=1)
    compiled = torch.compile(model, dynamic=True)
    with torch.no_grad():
        for lengths in ([9, 12], [5, 7, 3], [20, 1]):
            ids = some_ids(lengths)
            torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-12)


# --- reading attention -------------------------------------------------------------------------


def test_maps_are_the_plain_weights() -> None:
    model = text_model()
    ids = some_ids([17, 4, 9])
    expected = plain_text(model, ids)[1]
    model.every_row = True
    found = attention_maps(model, ids)
    assert len(found) == 3
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want[:, :, :17, :17], rtol=0, atol=1e-12)
    model.every_row = False
    last = attention_maps(model, ids)[2]
    torch.testing.assert_close(last, expected[2][:, :, :1, :17], rtol=0, atol=1e-12)


def test_reading_changes_nothing() -> None:
    model = text_model().train()
    ids = some_ids([9, 12])
    before = model.eval()(ids)
    model.train()
    state = torch.get_rng_state()
    attention_maps(model, ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert torch.equal(model.eval()(ids), before)
    assert all(p.grad is None for p in model.parameters())


def test_layers_can_be_chosen() -> None:
    model, ids = text_model(), some_ids([9, 12])
    every = attention_maps(model, ids)
    (second,) = attention_maps(model, ids, layers=[1])
    assert torch.equal(second, every[1])
    with pytest.raises(ValueError, match=r"layers must be from 0 to 2, got \[3\]"):
        attention_maps(model, ids, layers=[3])
    with pytest.raises(ValueError, match="made no call"):
        attention_maps(nn.Linear(3, 2), torch.zeros(1, 3))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.linspace(-3, 3, 70, dtype=torch.float64).reshape(2, 1, 5, 7).sin()},
        # Every query sees at least one key: the first.
        {
            "attn_mask": torch.arange(70).reshape(2, 1, 5, 7) % 7 % (1 + torch.arange(5)[:, None])
            == 0
        },
    ],
)
def test_weights_times_values_is_the_fused_attention(options: dict[str, Any]) -> None:
    shape = {"query": (2, 4, 5, 3), "key": (2, 4, 7, 3), "value": (2, 4, 7, 6)}
    qkv = {name: torch.randn(*size, dtype=torch.float64) for name, size in shape.items()}
    fused = F.scaled_dot_product_attention(**qkv, **options)
    weights = attention_weights(**qkv, **options)
    torch.testing.assert_close(weights @ qkv["value"], fused, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))


def test_grouped_queries_are_read() -> None:
    q, k = torch.randn(2, 4, 5, 3).double(), torch.randn(2, 2, 7, 3).double()
    fused = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    weights = attention_weights(q, k, k, enable_gqa=True)
    torch.testing.assert_close(weights @ k.repeat_interleave(2, dim=1), fused, rtol=0, atol=1e-12)


def test_a_query_that_sees_nothing_has_no_weights() -> None:
    q = torch.randn(1, 1, 2, 3)
    mask = torch.tensor([[True, False], [False, False]])
    assert attention_weights(q, q, q, attn_mask=mask)[0, 0].tolist() == [[1, 0], [0, 0]]


# --- Hugging Face --------------------------------------------------------------------------------


def bert(implementation: str = "sdpa") -> HuggingFaceClassifier:
    import transformers  # takes seconds

    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": implementation}
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        **options,
    )
    return HuggingFaceClassifier(transformers.BertForSequenceClassification(config)).eval()


@pytest.mark.slow
def test_bert_is_inspected_by_the_same_code() -> None:
    ids = some_ids([9, 6])
    found = attention_maps(bert(), ids)
    eager = bert("eager").model(
        input_ids=ids, attention_mask=(ids != 0).long(), output_attentions=True
    )
    assert len(found) == len(eager.attentions) == 2
    for got, want in zip(found, eager.attentions, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
        attention_maps(bert("eager"), ids)


@pytest.mark.slow
def test_bert_ignores_padding_and_can_be_trained() -> None:
    model = bert()
    ids = some_ids([9, 6])
    torch.testing.assert_close(model(ids)[1:], model(ids[1:, :6]), rtol=1e-5, atol=1e-6)
    optimizer = MirrorAdam(attention_param_groups(model, geometry=1.5), lr=0.02)
    labels = torch.tensor([0, 1])
    first = F.cross_entropy(model(ids), labels)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()
    assert F.cross_entropy(model(ids), labels) < 0.9 * first


@pytest.mark.slow
def test_another_padding_token_is_refused() -> None:
    from transformers import BertConfig

    model: Any = nn.Linear(1, 1)
    model.config = BertConfig(pad_token_id=3)
    with pytest.raises(ValueError, match="it has 3"):
        HuggingFaceClassifier(model)
