"""The plan of a group's step, kept for the next step: for groups of many small tensors.

To plan a step in Python costs more than to take it where tensors are small. `CachedPlan` keeps the
table that native/step.c reads. Each step compares everything the table was made from, and writes
what changes at every step: the addresses of the gradients, lr, dither, the bias corrections, the
seeds. Where anything else has changed, `refreshed` says no, and the step is planned again.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead.optim._native import WORDS, Checksums, Column, call_rows, packed_rows, packed_rule
from mirrorhead.optim._param_state import waits
from mirrorhead.optim._sharded import is_sharded
from mirrorhead.optim._step import Group, Implementation, StepPlan, dither_of

State = Mapping[Tensor, dict[str, Any]]
AllChecksums = Mapping[Tensor, Checksums]

_VERSIONED = ("step", "rms", "dual", "wide")  # state that a step notices edits of


class CachedPlan:
    """The step of a group whose tensors are all moved by native/step.c, by one rule."""

    def __init__(
        self, group: Group, params: list[Tensor], plan: StepPlan, state: State, sums: AllChecksums
    ) -> None:
        states = plan.states
        self.rule = states[0].rule
        self.options = option_values(group, "lr")
        self.params = list(params)
        self.entries = [state.get(param) for param in params]  # None where nothing is kept
        self.checksums = [sums[param] for param in params]
        self.held = [entry for entry in self.entries if entry is not None]
        # What the entries of the state hold, name by name, in one list.
        self.names = [(entry, name) for entry in self.held for name in entry]
        self.values: list[Any] = [x for entry in self.held for x in entry.values()]
        self.tensors = [*params, *(entry[name] for entry, name in self.names if name != "rms")]
        self.addresses = [x.data_ptr() for x in self.tensors]
        self.dtypes = [x.dtype for x in self.tensors]
        self.shapes = [x.shape for x in self.tensors]
        self.versioned = [entry[name] for entry, name in self.names if name in _VERSIONED]
        self.versions = [x._version for x in self.versioned]
        # The step counts, all equal, as arrays: to write them one by one is quicker in numpy.
        counters = [entry["step"] for entry in self.held if "step" in entry]
        self.counts = [counter.detach().numpy() for counter in counters]
        self.count = float(counters[0]) if counters else 0.0
        self.betas = tuple(group.get("betas", (0.0, 0.0)))
        self.scales = np.array(plan.scales)  # of u: lr is multiplied by them
        self.least_scale = min(plan.scales)
        self.rows = packed_rows(states, [None] * len(states))
        self.packed_rule = packed_rule(self.rule, False)
        self.table = np.frombuffer(self.rows, dtype=np.int64).reshape(len(states), WORDS)
        self.doubles = self.table.view(np.float64)
        self.ints = self.table.view(np.int32)
        self.ints[:, Column.CHECKED] = True
        self.grads: list[Tensor] = []
        self.grad_dtypes = [one.grad.dtype for one in states]

    def refreshed(self, group: Group, rate: float, state: State, checksums: AllChecksums) -> bool:
        """Make the plan that of the next step. Return False if anything else has changed."""
        params = group["params"]
        if (  # one list after the other, which is quicker than tensor by tensor
            not identical(option_values(group, "lr"), self.options)
            or not identical(params, self.params)
            or any(map(is_not, map(state.get, params), self.entries))
            or any(map(is_not, map(checksums.get, params), self.checksums))
            or sum(map(len, self.held)) != len(self.names)
            or any(map(is_not, [entry.get(name) for entry, name in self.names], self.values))
            or [x._version for x in self.versioned] != self.versions
            or [x.data_ptr() for x in self.tensors] != self.addresses
            or [x.dtype for x in self.tensors] != self.dtypes
            or [x.shape for x in self.tensors] != self.shapes
            or False in [x.is_contiguous() for x in self.tensors]
            or 0 < rate * self.least_scale < torch.finfo(self.rule.wide).tiny
        ):
            return False
        grads = [param.grad for param in params if param.grad is not None]
        if (
            len(grads) != len(params)
            or False in [g.layout is torch.strided for g in grads]
            or [g.dtype for g in grads] != self.grad_dtypes
            or [g.shape for g in grads] != self.shapes[: len(grads)]
            or False in [g.is_contiguous() for g in grads]
            or set(map(type, grads)) != {Tensor}  # this and the next two are a quick `in_memory`
            or True in [g.is_neg() for g in grads]
            or 0 in (addresses := [g.data_ptr() for g in grads])
        ):
            return False
        step, (beta1, beta2) = group["step"] + 1, self.betas
        count = self.count + 1
        self.grads = grads
        self.table[:, Column.GRAD] = addresses
        self.doubles[:, Column.LR] = rate * self.scales / (1 - beta1**count)
        self.doubles[:, Column.DECAY] = rate * group["weight_decay"]
        self.doubles[:, Column.DITHER] = dither_of(step)
        self.doubles[:, Column.ROOT_BIAS] = (1 - beta2**count) ** -0.5
        if self.rule.stochastic:
            self.table[:, Column.SEED] = step * len(grads) + np.arange(len(grads))
        return True

    def run(self) -> list[bool]:
        self.count += 1
        for count in self.counts:
            count[()] = self.count
        call_rows("step", self.packed_rule, self.rows, self.params)
        self.grads = []
        finite = self.ints[:, Column.FINITE]
        return [True] * len(finite) if finite.all() else [bool(ok) for ok in finite]


def option_values(group: Group, *left_out: str) -> list[Any]:
    """Return the options of a group, and each beta: a list of them can change in place."""
    others = ("params", "param_names", "step", *left_out)
    return [*(x for name, x in group.items() if name not in others), *group.get("betas", ())]


def identical(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and not any(map(is_not, some, others))


def can_be_kept(plan: StepPlan, group: Group, params: list[Tensor], state: State) -> bool:
    """Return whether a plan that has been run can serve for the next steps as a `CachedPlan`."""
    entries = [state.get(param, {}) for param in params]
    counters = [entry["step"] for entry in entries if "step" in entry]
    return (
        len(plan.states) == len(group["params"])
        and not group.get("normalize")  # the norms change at every step
        and not any(map(waits, counters))
        and len(set(map(float, counters))) <= 1
        and not any(x.is_inference() for entry in entries for x in entry.values())
        and not any(map(is_sharded, params))
        and all(
            one.rule == plan.states[0].rule
            and plan.implementation.on(one.weight) is Implementation.NATIVE
            and one.contiguous()
            and one.checksums is not None
            and (one.stored is None or one.checksums.written_for is not None)
            for one in plan.states
        )
    )
