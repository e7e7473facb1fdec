"""Zeros on request: a schedule for the density of weights, and a table of what is 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mirrorhead._checks import check_integer, is_number
from mirrorhead.geometry import KSupport


def anneal(optimizer: Optimizer, *, to: float, steps: int) -> DensitySchedule:
    """Return a schedule that lowers the density of `KSupport` groups from what they have now.

    After step t of T the density is d_0 (d_T / d_0)^(t / T), from then on d_T. Call its `step`
    after each of the optimizer's, as with a learning-rate schedule, and put its `state_dict` into
    checkpoints. To resume, load the schedule before the optimizer, which refuses another geometry.

    Args:
        optimizer: with at least one group whose geometry is a `KSupport` with a share.
        to: the last density, above 0 and at most the first one.
        steps: until it is reached.

    >>> import mirrorhead as mh
    >>> weight = nn.Parameter(torch.randn(20, 50))
    >>> optimizer = mh.MirrorAdam([weight], lr=1e-3, geometry=mh.KSupport(1.0))
    >>> schedule = anneal(optimizer, to=0.02, steps=10)
    >>> for _ in range(12):
    ...     weight.grad = weight.detach() - 1
    ...     optimizer.step()
    ...     schedule.step()
    >>> int(weight.count_nonzero())
    20
    """
    return DensitySchedule(optimizer, to, steps)


class DensitySchedule:
    """What `anneal` returns."""

    def __init__(self, optimizer: Optimizer, to: float, steps: int) -> None:
        self._optimizer = optimizer
        self._starts = [
            group["geometry"].share if isinstance(group.get("geometry"), KSupport) else None
            for group in optimizer.param_groups
        ]
        starts = [start for start in self._starts if start is not None]
        if not starts:
            raise ValueError(
                "optimizer must have a group whose geometry is a KSupport with a share"
            )
        if not is_number(to) or not 0 < to <= min(starts):
            raise ValueError(f"to must be above 0 and at most {min(starts):g}, got {to!r}")
        self._to, self._steps = float(to), check_integer("steps", steps, 1)
        self._done = 0

    def step(self) -> None:
        """Set the density for the optimizer's next step."""
        self._done += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule is, and all that it was made with."""
        about = {"to": self._to, "steps": self._steps, "done": self._done}
        return {**about, "starts": list(self._starts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume; the optimizer must have as many groups as it had."""
        if len(state["starts"]) != len(self._starts):
            known, given = len(self._starts), len(state["starts"])
            raise ValueError(f"the optimizer has {known} groups, the state is of {given}")
        self._starts, self._done = list(state["starts"]), int(state["done"])
        self._to, self._steps = float(state["to"]), int(state["steps"])
        self._set()

    def _set(self) -> None:
        part = min(1.0, self._done / self._steps)
        for group, start in zip(self._optimizer.param_groups, self._starts, strict=True):
            if start is not None:
                share = start * (self._to / start) ** part
                group["geometry"] = KSupport(share, group=group["geometry"].group)


@dataclass(frozen=True, repr=False)
class SparsityReport:
    """Zeros of a model; printing it gives a table.

    Attributes:
        rows: for each tensor of two or more dimensions its name, shape, and entries that are not 0.
        density: the share of all their entries that are not 0.
    """

    rows: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def density(self) -> float:
        entries = sum(torch.Size(shape).numel() for _, shape, _ in self.rows)
        return sum(count for *_, count in self.rows) / max(entries, 1)

    def __repr__(self) -> str:
        width = max([6, *(len(name) for name, *_ in self.rows)])
        lines = [f"{'matrix':{width}}  {'shape':>14}  not 0     density"]
        for name, shape, count in self.rows:
            share = count / max(torch.Size(shape).numel(), 1)
            size = " x ".join(map(str, shape))
            lines.append(f"{name:{width}}  {size:>14}  {count:<9,} {share:.2%}")
        return "\n".join([*lines, f"density of all: {self.density:.2%}"])


def sparsity_report(model: nn.Module) -> SparsityReport:
    """Count the entries that are not 0 in each matrix of a model; tied ones count once.

    >>> model = nn.Linear(4, 2)
    >>> _ = nn.init.eye_(model.weight)
    >>> sparsity_report(model)
    matrix           shape  not 0     density
    weight           2 x 4  2         25.00%
    density of all: 25.00%
    """
    return SparsityReport(
        tuple(
            (name, tuple(param.shape), int(torch.count_nonzero(param.detach())))
            for name, param in model.named_parameters()
            if param.ndim >= 2
        )
    )
