"""Attention of any layer and head, read from outside the model: the weights, and the matrix W.

Models here, and those of Hugging Face by default, call torch's fused attention, which never
forms the weights. `attention_maps` intercepts those calls and computes the weights from the same
queries and keys; the model and its result are not changed.

`read_heads` returns W of every head, with the tokens and queries that the head sees. With x_t the
input of token t and x_q that of the query, the attention of a head is softmax over t of
(W_K x_t + b_K)'(W_Q x_q + b_Q) / sqrt(d_h). The term with b_K is the same for all t and drops out,
so the head is the paper's model softmax(X W z) with

    W = W_K' W_Q / sqrt(d_h),  z = x_q                       without a bias of the queries,
    W = W_K' [W_Q  b_Q] / sqrt(d_h),  z = (x_q, 1)           with one.

Nothing is assumed about the model: what this formula gives is compared with the attention that the
model computed. Models with rotary or relative positions, or with grouped keys, do not agree with it
and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mirrorhead_lab.runtime.errors import UserError

Query = Literal["first", "last"]

#: Names of the query's and the key's linear map in a module of attention.
PROJECTIONS = (("query", "key"), ("q_lin", "k_lin"), ("q_proj", "k_proj"))
#: How far the model's attention, computed in float32, may be from the formula's.
AGREE = 1e-3


def attention_maps(
    model: nn.Module, *inputs: Any, layers: Collection[int] | None = None, **named: Any
) -> list[Tensor]:
    """Return the attention weights of each layer, (b, heads, queries, keys); rows sum to 1.

    The model runs once, with `inputs` and `named`, in evaluation mode and without gradients. The
    last layer of the models here has one query, [CLS], unless `model.every_row` is True.

    Args:
        model: of a compiled one, give the original.
        layers: which to keep, from 0; all of them if None. Others are not computed.

    >>> from mirrorhead_lab.models.paper import TextClassifier, TextSettings
    >>> model = TextClassifier(TextSettings(vocabulary=9, dim=8, hidden=16, layers=2, heads=2))
    >>> first, last = attention_maps(model, torch.tensor([[2, 5, 6, 3]]))
    >>> first.shape, last.shape
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 1, 4]))
    """
    wanted = None if layers is None else set(layers)
    with evaluating(model), torch.no_grad(), _Listener(wanted) as listener:
        model(*inputs, **named)
    if listener.calls == 0:
        raise ValueError(
            "the model made no call of torch's scaled_dot_product_attention, so there is nothing"
            ' to read. Hugging Face models need attn_implementation="sdpa"; of a compiled model'
            " give the original"
        )
    if wanted is not None and not wanted <= set(range(listener.calls)):
        raise ValueError(f"layers must be from 0 to {listener.calls - 1}, got {sorted(wanted)}")
    return listener.maps


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block, the model is in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def all_rows(model: nn.Module) -> Iterator[None]:
    """Within the block, the last layer of a model here has a row for every token, not only [CLS].

    Models of Hugging Face always have all rows, and are left as they are.

    >>> from mirrorhead_lab.models.paper import TextClassifier, TextSettings
    >>> model = TextClassifier(TextSettings(vocabulary=9, dim=8, hidden=16, layers=1, heads=2))
    >>> with all_rows(model):
    ...     attention_maps(model, torch.tensor([[2, 5, 6, 3]]))[0].shape
    torch.Size([1, 2, 4, 4])
    """
    if not hasattr(model, "every_row"):
        yield
        return
    switched: Any = model
    before, switched.every_row = switched.every_row, True
    try:
        yield
    finally:
        switched.every_row = before


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(Q K' scale + mask); arguments as in torch's scaled_dot_product_attention.

    Weights are those before dropout. A query that may see nothing has weights of 0.
    """
    del value, dropout_p
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale  # (..., queries, keys)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    blind = (scores == -math.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(dim=-1).masked_fill(blind, 0)


class _Listener(TorchFunctionMode):
    """Computes attention weights beside every call of the fused attention."""

    def __init__(self, wanted: set[int] | None) -> None:
        super().__init__()
        self.wanted = wanted
        self.calls = 0
        self.maps: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if self.wanted is None or self.calls in self.wanted:
                self.maps.append(attention_weights(*args, **kwargs))
            self.calls += 1
        return func(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """The heads of one layer on n texts, in float64."""

    W: Tensor  # (heads, d, c), such that the logits of a head are X W z
    X: Tensor  # inputs of all tokens, (n, T, d)
    z: Tensor  # input of the query, (n, c); c is d, or d + 1 with a bias
    mask: Tensor  # (n, T), True where the query may look
    attention: Tensor  # of the query, (heads, n, T)


def read_heads(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    query: Query | None = None,
    named: Mapping[str, Tensor] | None = None,
) -> list[LayerHeads]:
    """Run a model on texts and return the heads of every layer, first to last.

    Args:
        model: one of this package or of Hugging Face, with attention by torch's
            scaled_dot_product_attention.
        ids: token numbers, (n, T), padded on the right.
        mask: (n, T), True on tokens that are not padding.
        query: "first" is [CLS]; "last" is the last token of each text. None: "last" if the
            model is causal, else "first".
        named: what the model is called with, instead of `ids`.

    >>> from mirrorhead_lab.models.paper import TextClassifier, TextSettings
    >>> model = TextClassifier(TextSettings(vocabulary=9, dim=8, hidden=16, layers=2, heads=2))
    >>> ids = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    >>> first, last = read_heads(model, ids, ids != 0)
    >>> first.W.shape, first.X.shape, first.z.shape
    (torch.Size([2, 8, 8]), torch.Size([2, 4, 8]), torch.Size([2, 8]))
    """
    owners = [(m, found) for m in model.modules() if (found := _projections(m)) is not None]
    if not owners:
        raise UserError(
            f"{type(model).__name__} has no attention that can be read: no module with linear"
            " maps for queries and keys (query and key, q_lin and k_lin, q_proj and k_proj,"
            " or c_attn)"
        )
    inputs: list[Tensor] = []  # of each module of attention, as it is called

    def remember(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        inputs.append(given[0].detach())

    with ExitStack() as hooks, all_rows(model):
        for module, _ in owners:
            hooks.enter_context(module.register_forward_pre_hook(remember, with_kwargs=True))
        try:
            given: Any = named
            maps = attention_maps(model, **given) if given else attention_maps(model, ids)
        except ValueError as error:
            raise UserError(f"{type(model).__name__}: {error}") from error
    if len(maps) != len(owners) or len(inputs) != len(owners):
        raise UserError(
            f"{type(model).__name__} has {len(owners)} modules with queries and keys and made"
            f" {len(maps)} calls of attention: an unknown architecture"
        )
    # A causal model's first token sees itself alone.
    causal = ids.shape[1] > 1 and bool((maps[0][:, :, 0, 1:] == 0).all())
    last = (query or ("last" if causal else "first")) == "last"
    rows = mask.sum(dim=1) - 1 if last else torch.zeros(len(ids), dtype=torch.long)
    seen = mask.clone()
    if causal and not last:
        seen[:, 1:] = False
    layers = enumerate(zip(inputs, owners, maps, strict=True))
    return [_layer(i, X, weights, own, rows, seen) for i, (X, (_, weights), own) in layers]


def _layer(
    number: int,
    X: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    maps: Tensor,
    rows: Tensor,
    mask: Tensor,
) -> LayerHeads:
    """Put the formula together for one layer, and compare it with what the model computed."""
    to_query, bias, to_key = weights
    heads, every = maps.shape[1], torch.arange(len(X))
    if to_query.shape != to_key.shape or len(to_query) % heads:
        raise UserError(
            f"layer {number}: queries of shape {tuple(to_query.shape)} and keys of shape"
            f" {tuple(to_key.shape)} with {heads} heads: heads that share keys cannot be read"
        )
    X = X.double()
    z = X[every, rows]
    if bias is not None:
        to_query = torch.cat([to_query, bias[:, None]], dim=1)
        z = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
    to_query, to_key = (m.double().unflatten(0, (heads, -1)) for m in (to_query, to_key))
    W = to_key.mT @ to_query / math.sqrt(to_key.shape[1])  # (heads, d, c)
    logits = torch.einsum("ntd,hdc,nc->hnt", X, W, z)
    attention = logits.masked_fill(~mask, -math.inf).softmax(dim=-1)
    computed = maps[every, :, rows].double().transpose(0, 1)
    if not float((attention - computed).abs().max()) <= AGREE:
        raise UserError(
            f"layer {number}: the model's attention is not the softmax of X W z for its own"
            " queries and keys; models with rotary or relative positions cannot be read"
        )
    return LayerHeads(W, X, z, mask, attention)


def _projections(module: nn.Module) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Return W_Q, b_Q and W_K of a module of attention, (out, in); None if it is none."""
    for names in PROJECTIONS:
        query, key = (getattr(module, name, None) for name in names)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
            bias = None if query.bias is None else query.bias.detach()
            return query.weight.detach(), bias, key.weight.detach()
    fused: Any = getattr(module, "c_attn", None)  # GPT-2: (in, 3 out)
    if fused is None or fused.weight.shape[1] != 3 * fused.weight.shape[0]:
        return None
    query, key, _ = fused.weight.detach().mT.chunk(3)
    return query, fused.bias.detach().chunk(3)[0], key
