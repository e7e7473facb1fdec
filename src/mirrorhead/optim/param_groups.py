"""Parameter groups that give attention projections their own p."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from mirrorhead.geometry._base import Potential
from mirrorhead.optim.centered_adam import CenteredAdam
from mirrorhead.optim.mirror_adam import MirrorAdam
from mirrorhead.optim.mirror_descent import MirrorDescent
from mirrorhead.optim.steepest_descent import SteepestDescent

#: Names of query, key and value projections, packed ones included, as torch, timm and
#: Hugging Face modules have them. Weights alone: a bias has no geometry to speak of.
ATTENTION_PATTERNS = (
    r"\bin_proj_weight$",  # torch.nn.MultiheadAttention, packed
    r"\b[qkv]_proj_weight$",  # the same, with kdim or vdim of their own
    # Packed. A bare in_proj counts inside attention alone: Mamba's is something else.
    r"\b(qkv|qkv_proj|to_qkv|[Ww]qkv|query_key_value|query_key|c_attn|q_attn|in_proj_qkvz?)\.weight$",
    r"(?i)att\w*\.(self\.)?in_proj\.weight$",
    # One by one. RWKV calls the two halves of its feed-forward key and value.
    r"(?<!feed_forward\.)\b(query|key|value)(_proj|_global)?\.weight$",
    r"\b(to|projection|layout|[ew]2[ew])_(query|key|value)\.weight$",
    r"\b(q|k|v|kv)(_proj|_lin|_head)?\.weight$",
    r"\b([Ww]_?|to_|linear_|project_)(q|k|v|kv)\.weight$",
    r"\b(q|kv)_[ab]_proj(_with_mqa)?\.weight$",  # DeepSeek's products of two thin matrices
    r"\brel_attn\.[qkv]$",  # XLNet
)

#: A bare key or value counts only beside one of these: a critic has a value, too. Reformer's query
#: is also its key; RWKV's is called receptance.
_KEY_OR_VALUE = re.compile(r"\b(key|value)\.weight$")
_QUERIES = ("query", "query_key", "receptance")

#: Names of tables that are no `nn.Embedding`, and of layers that write to the vocabulary.
_EMBEDDING = re.compile(r"(?i)(embed|\bw[tp]e\b|pos_emb|position_bias|\blm_head\b)")

#: What wrappers put into a name, and what it stands for: PEFT's adapters, torch's
#: parametrizations, DDP and torch.compile.
_WRAPPERS = (
    (r"(^|\.)parametrizations\.(\w+)\.(original\d*|\d+\.\w+)$", r"\1\2"),
    (r"\.(base_layer|original_module)(?=\.)", ""),
    (r"\.lora_(embedding_)?[AB](\.\w+)?(\.weight)?$", ".weight"),
    (r"\.lora_magnitude_vector\b.*$", ".weight"),
    (r"(^|\.)(module|_orig_mod)(?=\.)", ""),
)


#: What a group can set: the options of both optimizers, and what learning rate schedulers read.
_OPTIONS = sorted(
    {
        *(
            name
            for cls in (CenteredAdam, MirrorAdam, MirrorDescent, SteepestDescent)
            for name in inspect.signature(cls).parameters
        ),
        *("name", "initial_lr", "max_lr", "min_lr", "lr_scale"),
    }
    - {"params"}
)


class ParamGroups(list[dict[str, Any]]):
    """A list of parameter groups that prints what is in them."""

    def __str__(self) -> str:
        lines = []
        for group in self:
            options = ", ".join(f"{k}={v}" for k, v in group.items() if k not in ("params", "name"))
            params = [x[1] if isinstance(x, tuple) else x for x in group["params"]]
            names = [x[0] if isinstance(x, tuple) else str(tuple(x.shape)) for x in group["params"]]
            count = sum(param.numel() for param in params)
            shown = ", ".join(names[:4]) + (f", and {len(names) - 4} more" if names[4:] else "")
            total = f"{len(names)} tensors, {count:,} parameters"
            lines.append(f"{group['name']} ({options}): {total}: {shown or '(none)'}")
        return "\n".join(lines)


def attention_param_groups(
    model: nn.Module,
    geometry: float | Potential = 1.1,
    rest: float | Potential | Mapping[str, Any] = 2.0,
    patterns: Sequence[tuple[str, Mapping[str, Any]]] = (),
    *,
    named: bool = True,
    **options: Any,
) -> ParamGroups:
    """Return groups for `MirrorDescent` or `MirrorAdam`: attention projections, and the rest.

    Every parameter that requires a gradient is in exactly one group. A name is matched by
    regular expressions (`re.search`): first against `patterns`, in order, then against
    `ATTENTION_PATTERNS`. The first match decides; a name without a match belongs to the rest.
    If a tensor has several names, the first of them counts. `key` and `value` are projections if
    the same module has a `query`. Parts of a name that PEFT, torch's
    parametrizations, DDP and torch.compile add are ignored, so `q_proj.lora_A.default.weight`
    counts as `q_proj.weight`. `print` the result to see the groups. If no name matches
    `ATTENTION_PATTERNS`, there is a warning.

    Args:
        model: any module.
        geometry: for query, key and value projections, packed ones included.
        rest: a geometry, or a dict of options, for everything else.
        patterns: pairs of a pattern and the options of the group it makes. A pattern that matches
            no parameter gives a warning; if all it matches are frozen, it makes no group.
        named: True for (name, parameter) pairs, so that errors and checkpoints can name the
            parameters. False for plain parameters, which `ZeroRedundancyOptimizer` and
            `clip_grad_norm_(group["params"], ...)` need.
        options: options for all groups that do not set them themselves. Only names of options of
            `MirrorDescent`, `MirrorAdam` and learning rate schedulers are accepted.

    >>> model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)
    >>> groups = attention_param_groups(model, geometry=1.1, patterns=[("norm", {"geometry": 1.5})])
    >>> print(groups)
    norm (geometry=1.5): 4 tensors, 32 parameters: norm1.weight, norm1.bias, norm2.weight,
    norm2.bias
    attention (geometry=1.1): 1 tensors, 192 parameters: self_attn.in_proj_weight
    rest (geometry=2.0): 7 tensors, 376 parameters: self_attn.in_proj_bias,
    self_attn.out_proj.weight, self_attn.out_proj.bias, linear1.weight, and 3 more
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    _check_patterns(patterns, [name for name, _ in model.named_parameters()])
    _check_options("options", options)
    _check_options("rest", rest if isinstance(rest, Mapping) else {})
    groups = [
        *({"name": pattern, **options, **own} for pattern, own in patterns),
        {"name": "attention", **options, "geometry": geometry},
        {"name": "rest", **options, **(rest if isinstance(rest, Mapping) else {"geometry": rest})},
    ]
    known = {_unwrapped(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in groups]
    for name, param in model.named_parameters():  # a shared tensor comes once
        if param.requires_grad:
            members[_choose(name, [pattern for pattern, _ in patterns], known)].append(
                (name, param)
            )
    if not any(_is_attention(name, known) for pairs in members for name, _ in pairs):
        warnings.warn(
            f"no parameter of {type(model).__name__} that requires a gradient has the name of a"
            " query, key or value projection: give patterns=[(regular expression, options)] for"
            " them",
            stacklevel=2,
        )
    return ParamGroups(
        {"params": pairs if named else [param for _, param in pairs], **group}
        for pairs, group in zip(members, groups, strict=True)
        if pairs
    )


def matrix_param_groups(
    model: nn.Module,
    matrices: Mapping[str, Any] | None = None,
    embeddings: Mapping[str, Any] | None = None,
    rest: Mapping[str, Any] | None = None,
    *,
    named: bool = True,
) -> tuple[ParamGroups, ParamGroups, ParamGroups]:
    """Return groups of the hidden matrices, of embeddings and output layers, and of the rest.

    As Muon is used: hidden matrices with an optimizer such as `SteepestDescent(...,
    Schatten(inf))`, and embeddings, the layer that writes to the vocabulary, gains and biases with
    another. A hidden matrix is any parameter of two dimensions that is not the weight of an
    `nn.Embedding` or `nn.EmbeddingBag`, is not tied to one, and whose name does not say that it is
    one (`embed`, `wte`, `wpe`, `pos_emb`, `lm_head`). Each list has one group, or none if it would
    be empty, so it can be given to an optimizer, and lists can be added.

    Args:
        model: any module.
        matrices, embeddings, rest: options of each group.
        named: as in `attention_param_groups`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> matrices, embeddings, rest = matrix_param_groups(model, {"lr": 0.02})
    >>> print(matrices)
    matrices (lr=0.02): 1 tensors, 16 parameters: 1.weight
    >>> print(ParamGroups(embeddings + rest))
    embeddings (): 1 tensors, 36 parameters: 0.weight
    rest (): 3 tensors, 12 parameters: 1.bias, 2.weight, 2.bias
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            table = id(param) in tables or _EMBEDDING.search(_unwrapped(name))
            kind = "rest" if param.ndim != 2 and not table else "embeddings"
            kind = "matrices" if param.ndim == 2 and not table else kind
            members.setdefault(kind, []).append((name, param))
    options = {"matrices": matrices, "embeddings": embeddings, "rest": rest}
    result = []
    for kind, own in options.items():
        _check_options(kind, own or {})
        pairs = members.get(kind, [])
        params = pairs if named else [param for _, param in pairs]
        result.append(
            ParamGroups([{"params": params, "name": kind, **(own or {})}] if pairs else [])
        )
    return tuple(result)


def _check_patterns(patterns: Any, names: Sequence[str]) -> None:
    if isinstance(patterns, Mapping | str) or not all(
        isinstance(pair, Sequence)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], Mapping)
        for pair in patterns
    ):
        example = '[("norm", {"geometry": 1.5})]'
        raise TypeError(
            f"patterns must be pairs of a pattern and options, as {example}; got {patterns!r}"
        )
    for pattern, own in patterns:
        try:
            found = any(_matches(pattern, name) for name in names)
        except re.error as error:
            raise ValueError(f"patterns has {pattern!r}, no regular expression: {error}") from None
        if not found:
            # No error: the same patterns may serve several models.
            warnings.warn(
                f"patterns has {pattern!r}, which matches no parameter; names are like"
                f" {', '.join(map(repr, names[:3]))}",
                stacklevel=3,
            )
        _check_options(f"patterns[{pattern!r}]", own)


def _check_options(where: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{where} has {name!r}; a group can set {', '.join(_OPTIONS)}")


def _is_attention(name: str, names: Collection[str]) -> bool:
    """Return whether this one of the model's parameters is a query, key or value projection."""
    name = _unwrapped(name)
    if found := _KEY_OR_VALUE.search(name):
        module = name[: found.start()]
        if not any(f"{module}{query}.weight" in names for query in _QUERIES):
            return False
    return any(re.search(pattern, name) for pattern in ATTENTION_PATTERNS)


def _choose(name: str, patterns: Sequence[str], names: Collection[str]) -> int:
    for i, pattern in enumerate(patterns):
        if _matches(pattern, name):
            return i
    return len(patterns) + (0 if _is_attention(name, names) else 1)


def _matches(pattern: str, name: str) -> bool:
    return bool(re.search(pattern, name) or re.search(pattern, _unwrapped(name)))


def _unwrapped(name: str) -> str:
    """Return the name that the parameter has in the plain model."""
    for pattern, replacement in _WRAPPERS:
        name = re.sub(pattern, replacement, name)
    return name.lstrip(".")
