"""Batches of parameters that move together: each takes one step, given the gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mirrorhead.optim._moves import dithered, follow_edits, inverse, move, move_whole
from mirrorhead.optim._native import NativeTable
from mirrorhead.optim._rule import (
    Group,
    Hyper,
    Method,
    Mover,
    Record,
    Rule,
    Storage,
    step_numbers,
)
from mirrorhead.optim._sharded import Number, largest_entry, reduce_shards
from mirrorhead.optim._tensors import (
    alike,
    cleaned,
    flat,
    has_values,
    is_finite,
    laid_out_like,
    number,
    waits,
)
from mirrorhead.optim.directions import accumulate, steepest

Finite = Sequence[bool | Tensor]
Scales = Sequence[Number] | None
Parts = list[Tensor | None]  # weight, gradient, stored, m, v, noise: as `_advance` takes them

_PIECE = 1 << 20  # weights at a time: bounds the scratch memory of a step


class Batch(ABC):
    """Parameters of one group, moved in the same way."""

    def __init__(self, group: Group, records: Sequence[Record]) -> None:
        self.group, self.records, self.rule = group, records, records[0].rule
        self.speeds = np.array([record.speed for record in records])

    def numbers(self, rate: float) -> dict[str, Any]:
        """Return the numbers of this step, and count it."""
        counters = [record.count for record in self.records if record.count is not None]
        centered = self.rule.storage is Storage.CENTERED
        if self.rule.method is not Method.ADAM:
            return step_numbers(self.group, rate, self.speeds, None, centered)
        if not all(map(has_values, counters)):
            return step_numbers(self.group, rate, self.speeds, np.ones(len(counters)), centered)
        views = [counter.detach().numpy() for counter in counters]  # quicker than tensor by tensor
        counts = np.array([float(view) + 1 for view in views])
        for view, count in zip(views, counts, strict=True):
            view[...] = count
        return step_numbers(self.group, rate, self.speeds, counts, centered)

    def prepare(self, grads: list[Tensor]) -> None:  # noqa: B027
        """Do what can fail, such as compiling, before anything moves."""

    @abstractmethod
    def run(self, rate: float, grads: list[Tensor], scales: Scales) -> Finite:
        """Take the step. Return which gradients were finite; `scales` multiply them first."""

    def seeds(self) -> np.ndarray:
        """Return seeds for the noise of stochastic rounding: others for every step."""
        return self.group["step"] * len(self.records) + np.arange(len(self.records))


class NativeBatch(Batch):
    def __init__(self, group: Group, records: Sequence[Record]) -> None:
        super().__init__(group, records)
        self.table = NativeTable(records)

    def run(self, rate: float, grads: list[Tensor], scales: Scales) -> Finite:
        numbers = self.numbers(rate)
        if scales is not None:
            sign = self.records[0].numbers["grad_scale"]
            numbers["grad_scale"] = [sign * float(scale) for scale in scales]
        if self.rule.storage is not Storage.CENTERED:
            return self.table.step(grads, numbers, self.seeds())
        kept = [record.scale.numpy() for record in self.records if record.scale is not None]
        numbers["scale"] = [float(scale) for scale in kept]
        finite = self.table.step(grads, numbers, self.seeds())
        params = [record.param for record in self.records]
        largest = reduce_shards(self.table.largest, params, "max")
        new = [max(r.reach, float(x)) for r, x in zip(self.records, largest, strict=True)]
        self.table.rescale(new)
        for scale, value in zip(kept, new, strict=True):
            scale[...] = value
        return finite


class TorchBatch(Batch):
    """At p = 2 torch's own SGD or AdamW, which are the same step, to the bit."""

    def run(self, rate: float, grads: list[Tensor], scales: Scales) -> Finite:
        finite, clean = cleaned(grads)
        weights = [record.weight for record in self.records]
        firsts = [record.m for record in self.records]
        group, fused = self.group, self.records[0].mover is not Mover.EAGER
        fused = bool(group["fused"] or (group["foreach"] is None and group["fused"] is None))
        # On a CPU torch's fused kernels take memory as it comes: where the tensors of a weight are
        # not laid out alike or have gaps, they mix up its entries and write to other memory.
        seconds = [record.v for record in self.records]
        for parts in zip(weights, clean, firsts, seconds, strict=True):
            fused = fused and has_values(weights[0]) and alike([x for x in parts if x is not None])
        if weights[0].device.type == "cpu" and self.rule.method is not Method.ADAM:
            # torch's fused SGD leaves the last elements of half-precision tensors undefined.
            fused = fused and weights[0].dtype.itemsize >= 4
        foreach = not fused and group["foreach"] is not False and has_values(weights[0])
        how: dict[str, Any] = {"lr": rate, "maximize": group["maximize"]}
        how |= {"foreach": foreach, "fused": fused}
        if self.rule.method is Method.ADAM:
            beta1, beta2 = group["betas"]
            eps = max(group["eps"], torch.finfo(torch.float32).tiny)
            how |= {"beta1": beta1, "beta2": beta2, "eps": eps, "amsgrad": False}
            how |= {"weight_decay": group["weight_decay"]}
            counts: Any = [record.count for record in self.records]
            adamw(weights, clean, firsts, seconds, [], counts, **how)  # pyright: ignore
        else:
            if group["weight_decay"]:
                for weight in weights:
                    weight.mul_(1 - rate * group["weight_decay"])
            if scales is not None:
                clean = [g * scale for g, scale in zip(clean, scales, strict=True)]
            elif group["nesterov"] and foreach:  # torch adds the momentum to gradients in place
                clean = [g.clone() for g in clean]
            how |= {"momentum": group["momentum"], "nesterov": group["nesterov"]}
            sgd(weights, clean, firsts, dampening=0, weight_decay=0, **how)
        # torch's fused kernels leave this out: a backward pass would use the moved weights.
        torch.autograd.graph.increment_version(weights)
        return finite


class EagerBatch(Batch):
    """Plain torch: tensors that share a rule laid end to end, or one by one."""

    def run(self, rate: float, grads: list[Tensor], scales: Scales) -> Finite:
        numbers, finite = self.numbers(rate), [is_finite(g) for g in grads]
        hypers = []
        for i, record in enumerate(self.records):
            own = {k: x[i] if isinstance(x, np.ndarray) else x for k, x in numbers.items()}
            own = {k: float(x) for k, x in own.items()}
            h = Hyper(**{**record.numbers, **own})
            if scales is not None:
                h = h._replace(grad_scale=h.grad_scale * scales[i])
            hypers.append(h)
        if self.rule.storage is Storage.CENTERED:
            self._centered(grads, hypers)
        elif self.rule.whole or self.rule.norm is not None:
            for record, g, h in zip(self.records, grads, hypers, strict=True):
                _step_whole(record, g, h)
        else:
            self._advance(grads, hypers)
        for record in self.records:
            torch.autograd.graph.increment_version(record.weight)
        return finite

    def _advance(self, grads: list[Tensor], hypers: list[Hyper]) -> None:
        packed = self.records[0].mover in (Mover.PACKED, Mover.COMPILED)
        advance = self.kernel()
        small: list[tuple[Parts, Hyper]] = []
        room = _PIECE
        for record, g, h, seed in zip(self.records, grads, hypers, self.seeds(), strict=True):
            parts = _parts(record, g, int(seed))
            for piece in _pieces(parts):
                size = piece[0].numel()  # pyright: ignore[reportOptionalMemberAccess]
                if not packed or piece[0].dim() != 1:  # pyright: ignore
                    _write(piece, advance(piece, h))
                    continue
                if small and size > room:
                    _step_packed(small, advance)
                    small, room = [], _PIECE
                small.append((piece, h))
                room -= size
        if small:
            _step_packed(small, advance)

    def kernel(self) -> Callable[[Parts, Hyper], Parts]:
        return lambda parts, h: advance(self.rule, parts, h)

    def _centered(self, grads: list[Tensor], hypers: list[Hyper]) -> None:
        """Move all u, then find the scales, then write the weights."""
        moved, largest, rule = [], [], self.rule
        for i, (record, g) in enumerate(zip(self.records, grads, strict=True)):
            u, center, scale = record.stored, record.center, record.scale
            assert u is not None and center is not None and scale is not None
            scale = scale if waits(scale) else number(scale)
            h = hypers[i] = hypers[i]._replace(scale=_as(scale, rule.wide))
            d, m, v = accumulate(rule.method, g.to(rule.wide), record.m, record.v, h)
            start = follow_edits(rule, record.weight, u, center.to(rule.wide), h)
            new = dithered(rule, start, h.lr * d, h)
            moved.append(new != start)
            _write([None, None, u, record.m, record.v], [None, None, new, m, v])
            largest.append(largest_entry(new))
        scales = reduce_shards(largest, [record.param for record in self.records], "max")
        for record, h, its_moved, x in zip(self.records, hypers, moved, scales, strict=True):
            assert (
                record.stored is not None and record.center is not None and record.scale is not None
            )
            new = x.clamp_min(record.reach) if isinstance(x, Tensor) else max(record.reach, x)
            its_moved |= torch.as_tensor(_as(new, rule.wide) != h.scale)
            h = h._replace(scale=_as(new, rule.wide))
            w = inverse(rule, record.stored, record.center.to(rule.wide), h).to(rule.dtype)
            record.weight.copy_(torch.where(its_moved, w, record.weight))
            record.scale.copy_(new) if isinstance(new, Tensor) else record.scale.fill_(new)


def advance(rule: Rule, parts: Parts, h: Hyper) -> Parts:
    """Return the weight, the gradient and the state after a step, entry by entry."""
    w, g, stored, m, v, noise = parts
    assert w is not None and g is not None
    d, m, v = accumulate(rule.method, g.to(rule.wide), m, v, h)
    w, stored = move(rule, w, stored, d, None, h, noise)
    return [w, None, stored, m, v, None]


def _step_whole(record: Record, g: Tensor, h: Hyper) -> None:
    """Move one parameter in a geometry, or along a direction, that needs all of its entries."""
    rule, w = record.rule, record.weight
    d, m, v = accumulate(rule.method, g.to(rule.wide), record.m, record.v, h)
    if rule.norm is not None:
        d = steepest(record.param, d, rule.norm, record.match_rms)
    _write([record.m, record.v], [m, v])
    if rule.whole:
        assert record.stored is not None
        move_whole(rule, record.param, record.stored, d, record.before, h)
    else:
        noise = _noise(record, 0) if rule.stochastic else None
        _write([w, record.stored], [*move(rule, w, record.stored, d, None, h, noise)])


def _parts(record: Record, g: Tensor, seed: int) -> Parts:
    noise = _noise(record, seed) if record.rule.stochastic else None
    g = laid_out_like(g, record.weight)
    return [record.weight, g, record.stored, record.m, record.v, noise]


def _noise(record: Record, seed: int) -> Tensor:
    """Return 16 random bits per weight, the same in every process that has the same weights."""
    # From a generator of its own: replicas are often seeded differently, and a run that resumes
    # should not have to restore torch's.
    noise = torch.zeros_like(record.weight, dtype=torch.int32)
    if not has_values(noise):
        return noise
    generator = torch.Generator(noise.device).manual_seed(seed)
    shape, device = noise.shape, noise.device
    return noise.copy_(
        torch.randint(0, 1 << 16, shape, dtype=torch.int32, device=device, generator=generator)
    )


def _pieces(parts: Parts) -> list[Parts]:
    """Cut tensors into flat pieces, or leave them as they are where memory has gaps."""
    views = flat(parts) if has_values(parts[0]) else None  # pyright: ignore[reportArgumentType]
    if views is None or views[0].numel() <= _PIECE:  # pyright: ignore[reportOptionalMemberAccess]
        return [parts if views is None else views]
    cuts = [repeat(None) if x is None else x.split(_PIECE) for x in views]
    return [list(piece) for piece in zip(*cuts, strict=False)]


def _step_packed(some: list[tuple[Parts, Hyper]], advance: Callable[[Parts, Hyper], Parts]) -> None:
    """Move flat tensors laid end to end: as many operations as for one of them."""
    if len(some) == 1:
        (parts, h) = some[0]
        _write(parts, advance(parts, h))
        return
    columns = [list(column) for column in zip(*(parts for parts, _ in some), strict=True)]
    sizes = [x.numel() for x in columns[0] if x is not None]
    whole = [None if column[0] is None else torch.cat(column) for column in columns]  # pyright: ignore
    like = whole[2] if whole[2] is not None else whole[0]
    assert like is not None
    fields = [_laid_out(x, sizes, like) for x in zip(*(h for _, h in some), strict=True)]
    for column, new in zip(columns, advance(whole, Hyper(*fields)), strict=True):
        if new is not None and column[0] is not None:
            torch._foreach_copy_(column, list(new.split(sizes)))  # pyright: ignore


def _laid_out(values: tuple, sizes: list[int], like: Tensor) -> Any:
    """Return one number if all are the same, else a number for each weight."""
    if not any(isinstance(x, Tensor) for x in values) and len(set(values)) == 1:
        return values[0]
    dtype = torch.promote_types(like.dtype, torch.float32)
    if any(isinstance(x, Tensor) for x in values):
        each = torch.stack([torch.as_tensor(x, dtype=dtype, device=like.device) for x in values])
    else:
        each = torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)
    counts = torch.tensor(sizes).to(like.device, non_blocking=True)
    return each.repeat_interleave(counts, output_size=sum(sizes))


def _write(old: Parts, new: Parts) -> None:
    for x, value in zip(old, new, strict=False):
        if x is not None and value is not None:
            x.copy_(value)


def _as(scale: Number, dtype: torch.dtype) -> Any:
    return scale.to(dtype) if isinstance(scale, Tensor) else scale
