"""One parameter as the implementations see it, and the plainest of them, the loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorhead.optim.kernels import Rule, accumulate, direction, move


class Leaf(NamedTuple):
    """Local, plain tensors: the weight, its gradient, its state, and the step's numbers."""

    w: Tensor
    g: Tensor
    stored: Tensor | None  # u, or a wide copy of w; see kernels.Storage
    m: Tensor | None  # momentum, or first moment
    v: Tensor | None  # second moment
    h: Tensor  # the numbers LR, DECAY, ... of kernels.py
    noise: Tensor | None  # 16 random bits a weight, for stochastic rounding

    def step(self, rule: Rule) -> bool:
        """Move this one tensor, in eager torch. Whether its gradient was finite."""
        w, g, stored, m, v, h, noise = self
        g, new_m, new_v = accumulate(rule, g, m, v, h)
        d = direction(rule, g, new_m, new_v, h)
        new_w, new_stored = move(rule, w, stored, d, h, noise)
        for old, new in ((w, new_w), (stored, new_stored), (m, new_m), (v, new_v)):
            if old is not None and new is not None:
                old.copy_(new)
        return is_finite(self.g)

    def pieces(self, size: int) -> Iterator[Leaf]:
        """A flat leaf, cut into leaves of at most `size` weights."""
        if self.w.numel() <= size:
            yield self
            return
        state = (self.stored, self.m, self.v, self.noise)
        cuts = (repeat(x) if x is None else x.split(size) for x in state)
        weights, gradients = self.w.split(size), self.g.split(size)
        for w, g, stored, m, v, noise in zip(weights, gradients, *cuts, strict=False):
            yield Leaf(w, g, stored, m, v, self.h, noise)

    def without_bases(self) -> Leaf:
        """The same tensors, but h, unaware of what they are views of."""
        w, g, stored, m, v, h, noise = self
        stored, m, v, noise = (x if x is None else x.data for x in (stored, m, v, noise))
        return Leaf(w.data, g.data, stored, m, v, h, noise)

    def flat(self) -> Leaf | None:
        """The same memory as one-dimensional views, or None where that cannot be had."""
        w, g, stored, m, v, h, noise = self
        parts = (w, g, stored, m, v, noise)
        if not all(x is None or x.is_contiguous() for x in parts):
            parts = _in_memory_order(parts)
            if parts is None:
                return None
        w, g, stored, m, v, noise = (x if x is None else x.view(-1) for x in parts)
        assert w is not None and g is not None
        return Leaf(w, g, stored, m, v, h, noise)


def _in_memory_order(parts: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
    """Contiguous views of tensors that are all laid out alike, if they have no gaps."""
    w, g, *state, noise = parts
    assert w is not None and g is not None
    by_stride = sorted(range(w.dim()), key=w.stride, reverse=True)
    # The gradient and the noise are only read: a copy will do where their layout differs.
    g, noise = (
        x if x is None or x.stride() == w.stride() else torch.empty_like(w, dtype=x.dtype).copy_(x)
        for x in (g, noise)
    )
    ordered = tuple(x if x is None else x.permute(by_stride) for x in (w, g, *state, noise))
    return ordered if all(x is None or x.is_contiguous() for x in ordered) else None


def is_finite(g: Tensor) -> bool:
    """Whether there is no inf or NaN in g."""
    if g.device.type == "cpu" and g.is_contiguous() and g.dtype in (torch.float32, torch.float64):
        # A dot product is the fastest pass there is; it may overflow, so a bad sign is checked.
        flat = g.view(-1)
        if math.isfinite(torch.dot(flat, flat)):
            return True
    return bool(torch.isfinite(g).all())


def step_loop(rule: Rule, leaves: Sequence[Leaf]) -> list[bool]:
    """Move the leaves one after the other. Which gradients were finite."""
    return [leaf.step(rule) for leaf in leaves]
