"""A step of one parameter group: which tensors move, by which rule, in which implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from mirrorhead.optim._compiled import prepare_compiled, step_compiled
from mirrorhead.optim._foreach import step_foreach
from mirrorhead.optim._formula import Hyper, Method, Storage, UpdateRule
from mirrorhead.optim._native import Checksums, serves, step_native
from mirrorhead.optim._param_state import (
    ParamState,
    has_values,
    is_finite,
    memory_order,
    random_bits,
)


class Implementation(Enum):
    """How the formula is computed."""

    LOOP = "loop"
    FOREACH = "foreach"
    COMPILED = "compiled"
    NATIVE = "native"

    @classmethod
    def chosen(cls, foreach: bool | None, fused: bool | None) -> Implementation:
        """Return the one that the options ask for; the C library if they say nothing."""
        if fused:
            return cls.COMPILED
        if foreach is None and fused is None:
            return cls.NATIVE
        return cls.LOOP if foreach is False else cls.FOREACH

    def on(self, weight: Tensor) -> Implementation:
        """Return the one that moves this tensor: not all can."""
        if not has_values(weight):
            return Implementation.LOOP
        if self is Implementation.NATIVE and not serves(weight):
            return Implementation.FOREACH
        return self


_STEPS: dict[Implementation, Callable[[Sequence[ParamState]], Sequence[bool | Tensor]]] = {
    Implementation.LOOP: lambda states: [state.step() for state in states],
    Implementation.FOREACH: step_foreach,
    Implementation.COMPILED: step_compiled,
    Implementation.NATIVE: step_native,
}


@dataclass
class StepPlan:
    """All that one step of a group will do; nothing has moved yet.

    `states` are moved by our formula. The other tensors (p = 2) are moved by `torch_step`,
    torch's own SGD or AdamW. `counters` are the step counts of the former: one is added.
    """

    implementation: Implementation
    finite: list[bool | Tensor]  # by position in the group; filled in by `run`
    states: list[ParamState] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counters: list[Tensor] = field(default_factory=list)
    torch_step: Callable[[], None] | None = None

    def add(
        self,
        position: int,
        rule: UpdateRule,
        hyper: Hyper,
        tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
        seed: int,
        checksums: Sequence[Checksums] | None,
    ) -> None:
        """Move a tensor by our formula; `tensors` are weight, grad, stored, m, v of its state."""
        its_seed = seed * len(self.finite) + position
        drawn_here = self.implementation.on(tensors[0]) is not Implementation.NATIVE
        noise = random_bits(tensors[0], its_seed) if rule.stochastic and drawn_here else None
        its_checksums = None if checksums is None else checksums[position]
        self.states.append(ParamState(rule, hyper, *tensors, noise, its_seed, its_checksums))
        self.positions.append(position)

    def batches(self) -> list[tuple[Implementation, list[int], list[ParamState]]]:
        """Return the states by rule, device and dtype of the gradient."""
        batches: dict[tuple, tuple[Implementation, list[int], list[ParamState]]] = {}
        for position, state in zip(self.positions, self.states, strict=True):
            how = self.implementation.on(state.weight)
            key = (how, state.rule, state.weight.device, state.grad.dtype)
            _, positions, states = batches.setdefault(key, (how, [], []))
            positions.append(position)
            states.append(state)
        return list(batches.values())

    def prepare(self) -> None:
        """Do what can fail, such as compiling, before anything moves."""
        for how, _, states in self.batches():
            if how is Implementation.COMPILED:
                prepare_compiled(states)

    def run(self) -> list[bool | Tensor]:
        """Take the step. Return which gradients were finite."""
        if self.torch_step is not None:
            self.torch_step()
        for counter in self.counters:
            counter.add_(1)
        for how, positions, states in self.batches():
            for position, ok in zip(positions, _STEPS[how](states), strict=True):
                self.finite[position] &= ok
        return self.finite

    def run_checked(self) -> list[bool]:
        """Check tensors that come from a caller, and take the step."""
        for state in self.states:
            state.check()
        self.prepare()
        return [bool(ok) for ok in self.run()]

    def clean_for_torch(self, positions: list[int], grads: Sequence[Tensor]) -> list[Tensor]:
        """Return these gradients with 0 for inf and NaN, and note which had any."""
        finite, clean = cleaned([grads[i] for i in positions])
        for i, ok in zip(positions, finite, strict=True):
            self.finite[i] &= ok
        return clean

    def torch_kernel(
        self, weights: list[Tensor], *others: Sequence[Tensor | None], fusible: bool = True
    ) -> dict[str, Any]:
        """Return `foreach` and `fused` of torch's own step; `others` are gradients and buffers.

        On a CPU torch's fused kernels take memory as it comes: where the tensors of a weight are
        not laid out alike or have gaps, they mix up its entries and write to memory of others.
        """
        how = self.implementation.on(weights[0])
        of_each = zip(weights, *others, strict=True)
        alike = all(_alike([x for x in some if x is not None]) for some in of_each)
        if how is not Implementation.LOOP and not (fusible and alike):
            how = Implementation.FOREACH
        fused = how in (Implementation.COMPILED, Implementation.NATIVE)
        return {"foreach": how is Implementation.FOREACH, "fused": fused}


def update_rule(
    p: float,
    method: Method,
    weight: Tensor,
    stored: Tensor | None,
    stochastic_rounding: bool,
    **flags: bool,
) -> UpdateRule:
    """Return the rule of one tensor; what is stored beside it follows from p."""
    storage = Storage.PRIMAL if stored is None else Storage.DUAL if p < 2 else Storage.WIDE
    stochastic = stochastic_rounding and weight.dtype == torch.bfloat16
    return UpdateRule(p, method, storage, weight.dtype, stochastic=stochastic, **flags)


def storage_for(p: float, dtype: torch.dtype, keep_dual: bool) -> Storage:
    """Return what to keep beside a weight; see `Storage` for why."""
    if not keep_dual:
        return Storage.PRIMAL
    if p < 2:
        return Storage.DUAL
    return Storage.WIDE if dtype != wide_dtype(dtype) else Storage.PRIMAL


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute and keep state in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def cleaned(grads: Sequence[Tensor]) -> tuple[list[bool | Tensor], list[Tensor]]:
    """Return which gradients are finite, and all of them with 0 for inf and NaN."""
    finite = [is_finite(g) for g in grads]
    return finite, [
        g if ok is True else g.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        for g, ok in zip(grads, finite, strict=True)
    ]


def _alike(tensors: Sequence[Tensor]) -> bool:
    if all(x.is_contiguous() for x in tensors):
        return True
    first = tensors[0]
    same = all(x.stride() == first.stride() for x in tensors)
    return same and first.permute(memory_order(first)).is_contiguous()


def dither_of(step: int) -> float:
    """Return the dither of a step: evenly spread over (-1/2, 1/2), by the golden ratio."""
    return 0.998 * (math.fmod(step * 0.6180339887498949, 1.0) - 0.5)


def knee_numbers(p: float, knee: float | None, rms: float) -> dict[str, float]:
    """Return the fields of `Hyper` for a knee at |w| = knee * rms; none where there is none."""
    if knee is None or p >= 2:
        return {}
    at = knee * rms
    return {"knee": at, "dual_knee": at ** (p - 1), "slope": at ** (2 - p) / (p - 1)}
