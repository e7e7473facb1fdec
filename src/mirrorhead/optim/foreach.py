"""The step of kernels.py on lists of tensors, with torch's foreach operations.

The tensors are cut into pieces that fit the cache (CPU) or bound the scratch memory
(elsewhere), so that a step needs a few megabytes beside the state, whatever the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from mirrorhead.optim.kernels import (
    BETA2,
    DECAY,
    DITHER,
    EPS,
    GAIN1,
    GAIN2,
    GRAD_SCALE,
    LR,
    MOMENTUM,
    ROOT_BIAS,
    Rule,
    base_weight,
    relative,
    rounded,
    written,
)
from mirrorhead.optim.leaf import Leaf, is_finite
from mirrorhead.potentials import Arithmetic, inverse_exponent, power, signed_power

Tensors = list[Tensor] | tuple[Tensor, ...]

_LISTS = Arithmetic(
    mul=torch._foreach_mul,
    sqrt=torch._foreach_sqrt,
    abs=torch._foreach_abs,
    copysign=lambda xs, ys: [torch.copysign(x, y) for x, y in zip(xs, ys, strict=True)],
    pow=torch._foreach_pow,
)


def step_foreach(rule: Rule, leaves: Sequence[Leaf]) -> list[bool]:
    """Move all leaves, which share `rule` and a device. Which gradients were finite."""
    finite = [True] * len(leaves)
    flat = []
    for i, leaf in enumerate(leaves):
        if (view := leaf.flat()) is None:
            finite[i] = leaf.step(rule)
        else:
            flat.append((i, view))
    numbers = [leaf.h.tolist() for leaf in leaves]
    for indices, batch in _batches(flat):
        rows = [numbers[i] for i in indices]
        for i, leaf in zip(indices, batch, strict=True):
            finite[i] &= is_finite(leaf.g)
        d, lr = _direction(rule, batch, rows, clean=all(finite[i] for i in indices))
        if rule.storage == "dual":
            _move_dual(rule, batch, rows[0], d, lr)
        else:
            _move_primal(rule, batch, rows[0], d, lr)
    return finite


def _batches(leaves: Sequence[tuple[int, Leaf]]) -> Iterator[tuple[list[int], list[Leaf]]]:
    """The leaves, cut and gathered into lists of about as many weights as fit the cache."""
    indices, batch, room = [], [], 0
    for i, leaf in leaves:
        limit = _limit(leaf.w)
        for piece in leaf.pieces(limit):
            size = piece.w.numel()
            if size > room:
                if batch:
                    yield indices, batch
                indices, batch, room = [], [], limit
            indices.append(i)
            batch.append(piece)
            room -= size
    if batch:
        yield indices, batch


def _limit(x: Tensor) -> int:
    """How many weights to take at a time. 40 Ki: a few lists of them stay in a 2 MB cache."""
    return 5 << 13 if x.device.type == "cpu" else 1 << 24


def _direction(
    rule: Rule, batch: list[Leaf], rows: list[list[float]], clean: bool
) -> tuple[Tensors, float]:
    """d and lr for the batch, the moments updated in place.

    Where lr differs between tensors, or is so small that dividing by it is not safe, it is
    multiplied in and 1 returned.
    """
    first = rows[0]  # all but LR and ROOT_BIAS are the group's
    g = [leaf.g.to(rule.wide) for leaf in batch]
    if not clean:
        g = [x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for x in g]
    if rule.scaled:
        g = torch._foreach_mul(g, [row[GRAD_SCALE] for row in rows])
    d: Tensors = g
    if rule.kind == "adam":
        m, v = _list(batch, "m"), _list(batch, "v")
        torch._foreach_lerp_(m, d, first[GAIN1])
        torch._foreach_mul_(v, first[BETA2])
        torch._foreach_addcmul_(v, d, d, first[GAIN2])
        root = torch._foreach_sqrt(v)
        torch._foreach_mul_(root, [row[ROOT_BIAS] for row in rows])
        torch._foreach_add_(root, first[EPS])
        d = torch._foreach_div(m, root)
    elif rule.momentum:
        m = _list(batch, "m")
        torch._foreach_mul_(m, first[MOMENTUM])
        torch._foreach_add_(m, d)
        d = torch._foreach_add(d, m, alpha=first[MOMENTUM]) if rule.nesterov else m
    rates = [row[LR] for row in rows]
    if rates[0] > 1e-20 and all(rate == rates[0] for rate in rates):
        return d, rates[0]
    return torch._foreach_mul(d, rates), 1.0


def _move_dual(rule: Rule, batch: list[Leaf], h: list[float], d: Tensors, lr: float) -> None:
    w, u = _list(batch, "w"), _list(batch, "stored")
    exact = _resync(rule, w, u)
    # kernels._dithered; the gap comes out negative, and both are divided by lr.
    gap = torch._foreach_add(u, u, alpha=-0.7 * torch.finfo(rule.wide).eps)
    torch._foreach_sub_(gap, u)
    step = gap
    for x, t in zip(d, gap, strict=True):
        torch.add(x, t, alpha=h[DITHER] / lr, out=t)
    if rule.decay:
        torch._foreach_add_(step, u, alpha=h[DECAY] / lr)
    if exact and rule.dtype == rule.wide:
        torch._foreach_sub_(u, step, alpha=lr)
        _inverse(rule, u, out=w)
        return
    # What has not moved keeps its bits. An interpolation with weight 0 or 1 does that
    # exactly, and far faster on a CPU than a where.
    moved = torch._foreach_sub(u, step, alpha=lr)
    change = torch._foreach_sub(moved, u)
    torch._foreach_sign_(change)
    torch._foreach_abs_(change)
    torch._foreach_copy_(u, moved)
    new = _inverse(rule, u)
    if rule.dtype == rule.wide:
        torch._foreach_lerp_(w, new, change)
    else:
        for leaf, x, c in zip(batch, new, change, strict=True):
            leaf.w.copy_(torch.where(c == 0, leaf.w, rounded(rule, x, leaf.noise)))


def _resync(rule: Rule, w: Tensors, u: Tensors) -> bool:
    """Set u = mirror(w) where w has been edited since the last step.

    Returns whether w equals inverse(u) to the bit everywhere, as it does from the first
    move of a weight on. Sums and products stand for comparisons, which are many times
    slower on a CPU: a difference hides from the product with random numbers only if it is
    orthogonal to them to the last bit.
    """
    exact = True
    for weight, dual, held in zip(w, u, _inverse(rule, u), strict=True):
        wide = weight.to(rule.wide)
        apart = held.to(rule.dtype).to(rule.wide).sub_(wide)
        if not float(torch.dot(apart, _random_like(apart))):
            continue
        exact = False
        slack, floor = rule.tolerance
        # By |w|, as good a measure as |held| where the two are close.
        excess = apart.abs_().sub_(wide.abs(), alpha=slack)
        if float(torch.threshold_(excess, floor, 0.0).sum()):
            dual.copy_(torch.where(excess > 0, rule.mirror(wide), dual))
    return exact


@cache
def _random_numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return (numbers + 0.5).to(device)


def _random_like(x: Tensor) -> Tensor:
    numbers = _random_numbers(_limit(x), x.dtype, x.device)
    return numbers if len(numbers) == len(x) else numbers[: len(x)]


def _inverse(rule: Rule, u: Tensors, out: Tensors | None = None) -> Tensors:
    """rule.inverse on lists, the result in `out` if given.

    Passes over memory are what counts. A cube is one pass, so u^10 = (u^3)^3 |u|, the
    power of p = 1.1, takes four.
    """
    exponent = inverse_exponent(rule.p)
    if exponent in (4, 10, 28):
        if out is None:
            out = [torch.empty_like(x) for x in u]
        for x, o in zip(u, out, strict=True):  # in `out` itself, and one list beside it
            torch.pow(x, 3, out=o)
            for _ in range({4: 0, 10: 1, 28: 2}[round(exponent)]):
                o.pow_(3)
            o.mul_(x.abs())
        return out
    x = signed_power(u, exponent, _LISTS)
    if out is None:
        return list(x)
    torch._foreach_copy_(out, x)
    return out


def _move_primal(rule: Rule, batch: list[Leaf], h: list[float], d: Tensors, lr: float) -> None:
    """kernels.relative on lists, where no weight changes its sign; else tensor by tensor."""
    step = torch._foreach_mul(d, lr)
    base = [base_weight(rule, leaf.w, leaf.stored) for leaf in batch]
    size = power(torch._foreach_abs(base), rule.p - 1, _LISTS)
    excess = torch._foreach_abs(step)
    torch._foreach_sub_(excess, size)
    torch._foreach_clamp_min_(excess, 0)
    if any(float(x.sum()) for x in excess):
        moved = [relative(rule, x, s, leaf.h) for x, s, leaf in zip(base, step, batch, strict=True)]
    else:
        size = torch._foreach_clamp_min(size, torch.finfo(rule.wide).tiny)
        argument = torch._foreach_div(step, _LISTS.copysign(size, base))
        torch._foreach_neg_(argument)
        torch._foreach_add_(argument, 1 - h[DECAY] if rule.decay else 1.0)
        moved = torch._foreach_mul(base, signed_power(argument, inverse_exponent(rule.p), _LISTS))
    for leaf, old, new in zip(batch, base, moved, strict=True):
        leaf.w.copy_(written(rule, leaf.w, old, new, leaf.noise))
        if leaf.stored is not None:
            leaf.stored.copy_(new)


def _list(batch: list[Leaf], name: str) -> Tensors:
    return [getattr(leaf, name) for leaf in batch]
