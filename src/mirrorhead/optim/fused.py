"""The step of kernels.py through torch.compile: one pass over memory, on CPU and GPU.

A kernel is compiled once for each `Rule`, for flat tensors of any length, and takes all
numbers (lr, momentum, ...) from a tensor, so that neither another shape nor a schedule
compiles anything again. Tensors go in by the handful, since a call costs about 30 us.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from mirrorhead.optim.kernels import (
    Rule,
    accumulate,
    clean_gradient,
    direction,
    move,
    resume,
)
from mirrorhead.optim.leaf import Leaf, is_finite

_HANDFUL = 4
_traced: set[Callable[..., Any]] = set()


def step_fused(rule: Rule, leaves: Sequence[Leaf]) -> list[bool]:
    """Move all leaves, which share `rule` and a device. Which gradients were finite."""
    device = leaves[0].w.device.type
    polynomial = rule.wide == torch.float32
    # On a CPU, re-syncing edited weights inline would cost a power for every weight: mark
    # them, and finish those few afterwards. A GPU has powers to spare and would have to wait.
    rule = replace(rule, polynomial=polynomial, defer=rule.storage == "dual" and device == "cpu")
    finite = [True] * len(leaves)
    flat = []
    for i, leaf in enumerate(leaves):
        # Lengths 0 and 1 are special to torch.compile, and too short to gain anything.
        if leaf.w.numel() > 1 and (view := leaf.flat()) is not None:
            # Without .data each would be known as a view, and compiled for its base's shape.
            flat.append((i, view.without_bases()))
            torch.autograd.graph.increment_version(leaf.w)
        else:
            finite[i] = leaf.step(replace(rule, defer=False))
    whole = len(flat) - len(flat) % _HANDFUL
    handfuls = [flat[i : i + _HANDFUL] for i in range(0, whole, _HANDFUL)]
    handfuls += [[entry] for entry in flat[whole:]]
    for handful in handfuls:
        parts = zip(*(leaf for _, leaf in handful), strict=True)
        kernel = _kernel(rule, device, len(handful))
        marks = kernel(*parts) if kernel in _traced else _first_call(kernel, *parts)
        for (i, leaf), mark in zip(handful, torch.stack(marks).tolist(), strict=True):
            if not math.isfinite(mark):
                finite[i] = is_finite(leaf.g)
                if rule.defer:
                    _finish(rule, leaf)
    return finite


def _first_call(kernel: Callable[..., Any], *parts: Any) -> Any:
    """Compile and run, the numbers of the rule constants of the kernel, not arguments of it."""
    try:
        with torch._dynamo.config.patch(specialize_float=True):
            marks = kernel(*parts)
    except Exception as error:
        raise RuntimeError(
            f"fused=True: torch.compile could not build the kernel ({type(error).__name__}, above)."
            " On a CPU it needs a C++ compiler such as g++; foreach=True needs none"
        ) from error
    _traced.add(kernel)
    return marks


def _finish(rule: Rule, leaf: Leaf) -> None:
    """Re-sync and move the weights that the kernel found edited from outside."""
    rule = replace(rule, defer=False)
    w, g, stored, m, v, h, noise = leaf
    assert stored is not None
    d = direction(rule, clean_gradient(rule, g, h), m, v, h)
    new_w, new_stored = resume(rule, w, stored, d, h, noise)
    w.copy_(new_w)
    stored.copy_(new_stored)


@cache
def _kernel(rule: Rule, device: str, count: int) -> Callable[..., Any]:
    """The compiled step of `count` leaves."""

    def kernel(ws, gs, stores, ms, vs, hs, noises):
        marks = []
        for w, g, stored, m, v, h, noise in zip(ws, gs, stores, ms, vs, hs, noises):  # noqa: B905
            wide_g, new_m, new_v = accumulate(rule, g, m, v, h)
            d = direction(rule, wide_g, new_m, new_v, h)
            new_w, new_stored = move(rule, w, stored, d, h, noise)
            w.copy_(new_w)
            if stored is not None:
                stored.copy_(new_stored)
            if m is not None:
                m.copy_(new_m)
            if v is not None:
                v.copy_(new_v)
            # NaN if any weight was marked or any gradient is not finite; from what the
            # step has just written, so that it takes no loop of its own.
            written = new_w.to(rule.wide) if new_stored is None else new_stored
            marks.append((written + 0.0 * g).sum())
        return marks

    # torch.compile counts recompilations by code object: give each rule its own.
    name = f"mirror_{rule.kind}_p{rule.p:g}_{rule.storage}_{count}"
    kernel = types.FunctionType(
        kernel.__code__.replace(co_name=name), globals(), name, None, kernel.__closure__
    )
    options: dict[str, Any] = {}
    if device == "cpu":
        options = {
            # The sum of marks reads what the step just wrote: one loop instead of two.
            "realize_opcount_threshold": 3,
            # Multiply-adds for the polynomials. Rounding is as good or better.
            "cpp.enable_floating_point_contract_flag": "fast",
        }
    return torch.compile(kernel, dynamic=True, fullgraph=True, options=options)
