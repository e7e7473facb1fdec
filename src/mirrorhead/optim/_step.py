"""A step of one parameter group: which tensors move, by which rule, in which implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from mirrorhead.optim._compiled import prepare_compiled, step_compiled
from mirrorhead.optim._foreach import step_foreach
from mirrorhead.optim._formula import Hyper, Method, Storage, UpdateRule
from mirrorhead.optim._native import Checksums, serves, step_native
from mirrorhead.optim._param_state import ParamState, alike, cleaned, has_values, number

Group = dict[str, Any]  # of an optimizer's parameters

_SMALLEST_SIZE = 1e-3  # r of a trained tensor; that of a smaller one says nothing about its weights


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

    Tensors that were added are moved by our formula. Those at the positions `plain` (p = 2) are
    moved by `torch_step`, torch's own SGD or AdamW, given them and their gradients.

    Args, but for those of `mirror_descent` and `MirrorDescent`:
        centered: move all tensors by our formula, p = 2 included. u is then in units of weights, as
            `_centered` has it.
        dither: from -1/2 to 1/2; see `_formula.dithered`.
        seed: of the noise for stochastic rounding; another one for every step.
        checksums: of the weights as last written; without them the C library compares the
            weights one by one to notice edits from outside.
    """

    method: Method
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    stored: Sequence[Tensor | None]
    _: KW_ONLY
    lr: float | Tensor
    p: float
    weight_decay: float = 0
    centered: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    stochastic_rounding: bool = False
    dither: float = 0.0
    seed: int = 0
    checksums: Sequence[Checksums] | None = None

    def __post_init__(self) -> None:
        self.rate = number(self.lr, missing=0.0)
        self.implementation = Implementation.chosen(self.foreach, self.fused)
        self.scaled, self.nesterov = self.maximize, False
        self.finite: list[bool | Tensor] = [True] * len(self.params)  # filled in by `run`
        self.states: list[ParamState] = []
        self.positions: list[int] = []
        self.scales: list[float] = []  # what lr is multiplied by in the dual
        self.counters: list[Tensor] = []  # step counts: one is added
        self.plain: list[int] = []
        # It is given the plan instead of holding it: a cycle would keep all gradients alive until
        # Python's garbage collector runs.
        self.torch_step: Callable[[StepPlan, list[Tensor], list[Tensor]], None] | None = None

    def add(
        self, i: int, m: Tensor | None, v: Tensor | None, scale: float = 1.0, **numbers: Any
    ) -> None:
        """Move a tensor by our formula; `numbers` are fields of `Hyper`."""
        w, stored, seed = self.params[i], self.stored[i], self.seed * len(self.params) + i
        storage = Storage.PRIMAL if stored is None else Storage.DUAL if self.p < 2 else Storage.WIDE
        flags = {"nesterov": self.nesterov, "scaled": self.scaled, "decay": self.weight_decay != 0}
        flags |= {"momentum": numbers.get("momentum", 0) != 0, "knee": "knee" in numbers}
        flags["stochastic"] = self.stochastic_rounding and w.dtype == torch.bfloat16
        rule = UpdateRule(self.p, self.method, storage, w.dtype, **flags)
        hyper = Hyper(decay=self.rate * self.weight_decay, dither=self.dither, **numbers)
        sums = None if self.checksums is None else self.checksums[i]
        state = ParamState(rule, hyper, w, self.grads[i], stored, m, v, seed=seed, checksums=sums)
        native = self.implementation.on(w) is Implementation.NATIVE  # it draws its own noise
        self.states.append(state if native else state.with_noise())
        self.positions.append(i)
        self.scales.append(scale)

    def _placed(self, state: ParamState) -> tuple[Implementation, ParamState]:
        """Return what moves a state, and the state as it takes it: flat, but for the loop."""
        how = self.implementation.on(state.weight)
        if how is Implementation.LOOP or (how is Implementation.NATIVE and state.contiguous()):
            return how, state
        # Lengths 0 and 1 are special to torch.compile, and too short to gain anything.
        short = how is Implementation.COMPILED and state.weight.numel() < 2
        view = None if short else state.flat()
        return (Implementation.LOOP, state.with_noise()) if view is None else (how, view)

    def batches(self) -> list[tuple[Implementation, list[int], list[ParamState]]]:
        """Return the states by what moves them, rule, device and dtype of the gradient."""
        batches: dict[tuple, tuple[Implementation, list[int], list[ParamState]]] = {}
        placed = map(self._placed, self.states)
        for position, (how, state) in zip(self.positions, placed, strict=True):
            key = (how, state.rule, state.weight.device, state.grad.dtype)
            _, positions, states = batches.setdefault(key, (how, [], []))
            positions.append(position)
            states.append(state)
        return list(batches.values())

    def prepare(self) -> None:
        """Do what can fail, such as compiling, before anything moves."""
        if self.implementation is Implementation.COMPILED:
            for how, _, states in self.batches():
                if how is Implementation.COMPILED:
                    prepare_compiled(states)

    def run(self) -> list[bool | Tensor]:
        """Take the step. Return which gradients were finite."""
        if self.torch_step is not None and self.plain:
            weights = [self.params[i] for i in self.plain]
            finite, clean = cleaned([self.grads[i] for i in self.plain])
            for i, ok in zip(self.plain, finite, strict=True):
                self.finite[i] &= ok
            self.torch_step(self, weights, clean)
            # torch's fused kernels leave this out: a backward pass would use the moved weights.
            torch.autograd.graph.increment_version(weights)
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

    def torch_options(
        self, weights: list[Tensor], *others: Sequence[Tensor | None], fusible: bool = True
    ) -> dict[str, Any]:
        """Return options of torch's own step; `others` are gradients and buffers."""
        # On a CPU torch's fused kernels take memory as it comes: where the tensors of a weight are
        # not laid out alike or have gaps, they mix up its entries and write to memory of others.
        how = self.implementation.on(weights[0])
        fusible = fusible and all(map(alike, zip(weights, *others, strict=True)))
        if how is not Implementation.LOOP and not fusible:
            how = Implementation.FOREACH
        fused = how in (Implementation.COMPILED, Implementation.NATIVE)
        kernel = {"foreach": how is Implementation.FOREACH, "fused": fused}
        return {**kernel, "lr": self.rate, "maximize": self.maximize}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute and keep state in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def dither_of(step: int) -> float:
    """Return the dither of a step: evenly spread over (-1/2, 1/2), by the golden ratio."""
    return 0.998 * (math.fmod(step * 0.6180339887498949, 1.0) - 0.5)


def knee_numbers(p: float, knee: float | None, rms: float) -> dict[str, Any]:
    """Return the fields of `Hyper` for a knee at |w| = knee * rms; none where there is none."""
    # Beyond the knee a weight moves by lr knee^(2-p), without one by lr (|w|/r)^(2-p). So the knee
    # of a tensor that has no size yet must be at r: a bias at 0 would be at 1e32 after one step.
    if rms < _SMALLEST_SIZE:
        knee = 1.0
    if knee is None or p >= 2:
        return {}
    at = knee * rms
    return {"knee": at, "dual_knee": at ** (p - 1), "slope": at ** (2 - p) / (p - 1)}
