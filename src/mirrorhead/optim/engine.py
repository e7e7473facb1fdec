"""From parameters and numbers to leaves, and to one of the three implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from mirrorhead.optim.foreach import step_foreach
from mirrorhead.optim.fused import step_fused
from mirrorhead.optim.kernels import NUMBERS, Rule, Storage
from mirrorhead.optim.leaf import Leaf, step_loop

Implementation = Literal["loop", "foreach", "fused"]

_IMPLEMENTATIONS: dict[str, Callable[[Rule, Sequence[Leaf]], list[bool]]] = {
    "loop": step_loop,
    "foreach": step_foreach,
    "fused": step_fused,
}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute and keep state in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def storage_for(p: float, dtype: torch.dtype, keep_dual: bool) -> Storage:
    """What to keep beside a weight; see kernels.py for why."""
    if not keep_dual:
        return "primal"
    if p < 2:
        return "dual"
    return "wide" if dtype != wide_dtype(dtype) else "primal"


def implementation(foreach: bool | None, fused: bool | None) -> Implementation:
    """The one asked for; foreach if nothing is said."""
    if fused:
        return "fused"
    return "loop" if foreach is False else "foreach"


def dither(step: int) -> float:
    """The DITHER of a step: evenly spread over (-1/2, 1/2), by the golden ratio."""
    return 0.998 * (math.fmod(step * 0.6180339887498949, 1.0) - 0.5)


def run(
    rule: Rule,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    stored: Sequence[Tensor | None],
    m: Sequence[Tensor | None],
    v: Sequence[Tensor | None],
    numbers: Sequence[tuple[float, ...]],
    how: Implementation,
    stochastic_rounding: bool,
    seed: int,
) -> list[bool]:
    """One step of local tensors; which gradients were finite.

    `rule` carries what the tensors share; dtype and storage are filled in for each.
    """
    shared: dict[tuple, Tensor] = {}
    batches: dict[tuple, tuple[Rule, list[int], list[Leaf]]] = {}
    for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
        stochastic = stochastic_rounding and w.dtype == torch.bfloat16
        kept = stored[i]
        storage: Storage = "primal" if kept is None else "dual" if rule.p < 2 else "wide"
        key = (w.dtype, storage, stochastic, w.device, g.dtype)
        if key not in batches:
            its_rule = replace(rule, dtype=w.dtype, storage=storage, stochastic=stochastic)
            batches[key] = (its_rule, [], [])
        its_rule, indices, leaves = batches[key]
        # foreach reads the numbers here; the others, on the weight's own device.
        device = torch.device("cpu") if how == "foreach" else w.device
        row = (*numbers[i], its_rule.wide, device)
        if row not in shared:
            shared[row] = torch.tensor(numbers[i], dtype=its_rule.wide, device=device)
            if how == "fused":
                # Else a weight as long as this would be taken to be so in every call.
                torch._dynamo.mark_static(shared[row])
        noise = None
        if stochastic:
            noise = _noise(w, seed * len(weights) + i)
        indices.append(i)
        leaves.append(Leaf(w, g, kept, m[i], v[i], shared[row], noise))
    finite = [True] * len(weights)
    for its_rule, indices, leaves in batches.values():
        results = _IMPLEMENTATIONS[how](its_rule, leaves)
        for i, result in zip(indices, results, strict=True):
            finite[i] = result
    return finite


def _noise(w: Tensor, seed: int) -> Tensor:
    """16 random bits a weight, the same in every process that holds a copy of it.

    From a generator of our own: replicas are often seeded differently, and a run that
    resumes should not have to restore torch's.
    """
    generator = torch.Generator(w.device).manual_seed(seed)
    return torch.randint(
        0, 1 << 16, w.shape, dtype=torch.int32, device=w.device, generator=generator
    )


def row_of(numbers: dict[int, float]) -> tuple[float, ...]:
    """The numbers of a step in the order of kernels.py, 0 where none is given."""
    return tuple(numbers.get(k, 0.0) for k in range(NUMBERS))
