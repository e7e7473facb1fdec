"""The formula on lists of tensors, with torch's foreach operations.

The tensors are cut into pieces that fit the cache (CPU) or bound the scratch memory
(elsewhere), so that a step needs a few megabytes beside the state, whatever the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from mirrorhead.geometry._powers import PowerOps, inverse_exponent, power, signed_power
from mirrorhead.optim import _formula
from mirrorhead.optim._formula import Method, Storage, UpdateRule
from mirrorhead.optim._param_state import ParamState, is_finite, waits

Tensors = list[Tensor] | tuple[Tensor, ...]

_LISTS = PowerOps(
    mul=torch._foreach_mul,
    sqrt=torch._foreach_sqrt,
    abs=torch._foreach_abs,
    copysign=lambda xs, ys: [torch.copysign(x, y) for x, y in zip(xs, ys, strict=True)],
    pow=torch._foreach_pow,
)


def step_foreach(states: Sequence[ParamState]) -> list[bool | Tensor]:
    """Move flat tensors that share a rule and a device. Return which gradients were finite."""
    rule = states[0].rule
    if rule.storage is Storage.PRIMAL and rule.knee:  # rare: without kept state
        return [state.step() for state in states]
    finite: list[bool | Tensor] = [True] * len(states)
    for indices, batch in _batches(states):
        for i, state in zip(indices, batch, strict=True):
            finite[i] &= is_finite(state.grad)
        d, lr = _direction(rule, batch, clean=all(finite[i] is True for i in indices))
        if rule.storage is Storage.DUAL:
            _move_dual(rule, batch, d, lr)
        else:
            _move_primal(rule, batch, d, lr)
    return finite


def _batches(states: Sequence[ParamState]) -> Iterator[tuple[list[int], list[ParamState]]]:
    """Cut and gather the states into lists of about as many weights as fit the cache."""
    indices, batch, room = [], [], 0
    for i, state in enumerate(states):
        limit = _limit(state.weight)
        for piece in state.pieces(limit):
            size = piece.weight.numel()
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
    """Return how many weights to take at a time. 40 Ki: a few lists stay in a 2 MB cache."""
    return 5 << 13 if x.device.type == "cpu" else 1 << 24


def _direction(rule: UpdateRule, batch: list[ParamState], clean: bool) -> tuple[Tensors, float]:
    """Return d and lr for the batch, and update the moments in place."""
    hypers = [state.hyper for state in batch]
    first = hypers[0]  # what is read from it belongs to the group
    g = [state.grad.to(rule.wide) for state in batch]
    if not clean:
        g = [x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for x in g]
    if rule.scaled:
        numbers = [h.grad_scale for h in hypers if not isinstance(h.grad_scale, Tensor)]
        if len(numbers) == len(g):
            g = torch._foreach_mul(g, numbers)
        else:  # not read from the device: see `dual_norms`
            g = [x * h.grad_scale for x, h in zip(g, hypers, strict=True)]
    d: Tensors = g
    if rule.method is Method.ADAM:
        m, v = _list(batch, "m"), _list(batch, "v")
        torch._foreach_lerp_(m, d, first.gain1)
        torch._foreach_mul_(v, first.beta2)
        torch._foreach_addcmul_(v, d, d, first.gain2)
        root = torch._foreach_sqrt(v)
        torch._foreach_mul_(root, [h.root_bias for h in hypers])
        torch._foreach_add_(root, first.eps)
        d = torch._foreach_div(m, root)
    elif rule.momentum:
        m = _list(batch, "m")
        torch._foreach_mul_(m, first.momentum)
        torch._foreach_add_(m, d)
        d = torch._foreach_add(d, m, alpha=first.momentum) if rule.nesterov else m
    # Where lr differs, or is so small that dividing by it is not safe, it is multiplied in.
    rates = [h.lr for h in hypers]
    if rates[0] > 1e-20 and all(rate == rates[0] for rate in rates):
        return d, rates[0]
    return torch._foreach_mul(d, rates), 1.0


def _move_dual(rule: UpdateRule, batch: list[ParamState], d: Tensors, lr: float) -> None:
    w, u = _list(batch, "weight"), _list(batch, "stored")
    first = batch[0].hyper
    exact, finite = _resync(rule, batch)
    # As in _formula.dithered; the gap comes out negative, and both are divided by lr.
    gap = torch._foreach_add(u, u, alpha=-0.7 * torch.finfo(rule.wide).eps)
    torch._foreach_sub_(gap, u)
    step = gap
    for x, t in zip(d, gap, strict=True):
        torch.add(x, t, alpha=first.dither / lr, out=t)
    if rule.decay:
        torch._foreach_add_(step, u, alpha=first.decay / lr)
    if exact and rule.dtype == rule.wide:
        torch._foreach_sub_(u, step, alpha=lr)
        _inverse(rule, batch, out=w)
        return
    # What has not moved keeps its bits. An interpolation with weight 0 or 1 does that
    # exactly, and far faster on a CPU than a where.
    moved = torch._foreach_sub(u, step, alpha=lr)
    change = torch._foreach_sub(moved, u)
    torch._foreach_sign_(change)
    torch._foreach_abs_(change)
    torch._foreach_copy_(u, moved)
    new = _inverse(rule, batch)
    if rule.dtype == rule.wide and finite:
        torch._foreach_lerp_(w, new, change)
    else:
        for state, x, c in zip(batch, new, change, strict=True):
            kept = torch.where(c == 0, state.weight, _formula.rounded(rule, x, state.noise))
            state.weight.copy_(kept)


def _resync(rule: UpdateRule, batch: list[ParamState]) -> tuple[bool, bool]:
    """Set u = mirror(w) where w has been edited since the last step.

    Return whether w equals inverse(u) to the bit everywhere, and whether all numbers compared are
    finite. A product with random numbers stands for the comparison, which is many times slower on
    a CPU: a difference hides from it only if it is orthogonal to them to the last bit.
    """
    exact = finite = True
    for state, held in zip(batch, _inverse(rule, batch), strict=True):
        w, u = state.weight, state.stored
        assert u is not None
        if waits(w):  # reading a number would wait: compare everything
            mirrored = rule.mirror(w.to(rule.wide), state.hyper)
            u.copy_(torch.where(rule.unedited(held, w), u, mirrored))
            exact = finite = False
            continue
        apart = held.to(rule.dtype).to(rule.wide).sub_(w.to(rule.wide))
        random = _random_numbers(_limit(w), apart.dtype, apart.device)
        difference = float(torch.dot(apart, random[: len(apart)]))
        if difference == 0:
            continue
        exact, finite = False, finite and math.isfinite(difference)
        edited = (~rule.unedited(held, w)).nonzero()[:, 0]
        if len(edited):
            u[edited] = rule.mirror(w[edited].to(rule.wide), state.hyper)
    return exact, finite


@cache
def _random_numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.rand(count, generator=generator, dtype=dtype, device="cpu")
    return (numbers + 0.5).to(device)


def _inverse(rule: UpdateRule, batch: list[ParamState], out: Tensors | None = None) -> Tensors:
    """Compute rule.inverse on the lists, the result in `out` if given."""
    u = _list(batch, "stored")
    if not rule.knee:
        return _signed_power(u, inverse_exponent(rule.p), out)
    knees = [state.hyper.dual_knee for state in batch]
    c = torch._foreach_clamp_max(u, knees)
    torch._foreach_clamp_min_(c, [-knee for knee in knees])
    linear = torch._foreach_sub(u, c)
    torch._foreach_mul_(linear, [state.hyper.slope for state in batch])
    result = _signed_power(c, inverse_exponent(rule.p), out)
    torch._foreach_add_(result, linear)
    return result


def _signed_power(x: Tensors, exponent: float, out: Tensors | None) -> Tensors:
    """Compute sign(x)|x|^exponent on lists, the result in `out` if given."""
    # Passes over memory are what counts. A cube is one pass, so u^10 = (u^3)^3 |u|, the power of
    # p = 1.1, takes four.
    if exponent in (4, 10, 28):
        if out is None:
            out = [torch.empty_like(a) for a in x]
        for a, o in zip(x, out, strict=True):  # in `out` itself, and one list beside it
            torch.pow(a, 3, out=o)
            for _ in range({4: 0, 10: 1, 28: 2}[round(exponent)]):
                o.pow_(3)
            o.mul_(a.abs())
        return out
    result = signed_power(x, exponent, _LISTS)
    if out is None:
        return list(result)
    torch._foreach_copy_(out, result)
    return out


def _move_primal(rule: UpdateRule, batch: list[ParamState], d: Tensors, lr: float) -> None:
    """Compute relative() on lists where no weight changes its sign; else tensor by tensor."""
    step = torch._foreach_mul(d, lr)
    base = [_formula.base_weight(rule, state.weight, state.stored) for state in batch]
    size = power(torch._foreach_abs(base), rule.p - 1, _LISTS)
    excess = torch._foreach_abs(step)
    torch._foreach_sub_(excess, size)
    torch._foreach_clamp_min_(excess, 0)
    if waits(base[0]) or any(float(x.sum()) for x in excess):
        moved = [
            _formula.relative(rule, x, s, state.hyper)
            for x, s, state in zip(base, step, batch, strict=True)
        ]
    else:
        size = torch._foreach_clamp_min(size, torch.finfo(rule.wide).tiny)
        argument = torch._foreach_div(step, _LISTS.copysign(size, base))
        torch._foreach_neg_(argument)
        torch._foreach_add_(argument, 1 - batch[0].hyper.decay if rule.decay else 1.0)
        moved = torch._foreach_mul(base, signed_power(argument, inverse_exponent(rule.p), _LISTS))
    for state, old, new in zip(batch, base, moved, strict=True):
        state.weight.copy_(_formula.written(rule, state.weight, old, new, state.noise))
        if state.stored is not None:
            state.stored.copy_(new)


def _list(batch: list[ParamState], name: str) -> Tensors:
    return [getattr(state, name) for state in batch]
