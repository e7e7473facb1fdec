"""A step in any geometry, in plain torch: mirror descent for a potential, steepest for a norm.

    u+ = (1 - decay) u - lr d,  w+ = inverse(u+);        w+ = (1 - decay) w - lr steepest(d)

u is kept, in float32 or better. Where w is not, to the bit, inverse(u), it was edited from outside,
and u starts from it again. A matrix that is spread over several processes is gathered, unless the
geometry acts entry by entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mirrorhead.geometry._base import Norm, Potential, Separable
from mirrorhead.optim._param_state import cleaned
from mirrorhead.optim._sharded import is_sharded, local, local_gradient


@dataclass
class AnyPlan:
    """One step of a group in any geometry; nothing has moved yet."""

    group: dict[str, Any]
    params: list[Tensor]
    direction: Callable[[Tensor, Tensor], Tensor]  # of a parameter, given its gradient
    move: Callable[[Tensor, Tensor], None]  # the parameter, along the direction

    def run(self) -> list[bool | Tensor]:
        finite, clean = cleaned([local_gradient(param) for param in self.params])
        for param, g in zip(self.params, clean, strict=True):
            wide = g.to(torch.promote_types(local(param).dtype, torch.float32))
            self.move(param, self.direction(param, -wide if self.group["maximize"] else wide))
            torch.autograd.graph.increment_version(param)
        return finite


def move_mirror(
    param: Tensor, u: Tensor, d: Tensor, psi: Potential, before: Potential, lr: float, decay: float
) -> None:
    """Move w and u (a part of one process, as d is) by lr d in the dual.

    Args:
        before: the potential of the last step: w is inverse(u) in it.
    """
    separable = isinstance(psi, Separable)
    gather, part = (_same, _same) if separable else gathered(param)
    w, u_all, d = (gather(local(x)) for x in (param, u, d))
    wide = u_all.dtype
    edited = before.inverse(u_all).to(w.dtype) != w
    if psi != before and not (psi.dense_dual and type(psi) is type(before)):
        edited = torch.ones_like(edited)  # u was that of another potential
    if not separable and not psi.dense_dual:
        edited = edited.any()
    start = torch.where(edited, psi.lift(w.to(wide)), u_all)
    new = start - lr * d - decay * start if decay else start - lr * d
    moved = new != start
    if not separable:
        moved = moved.any() | (psi != before)
    result = torch.where(moved, psi.inverse(new).to(w.dtype), w)
    local(param).copy_(part(result))
    local(u).copy_(part(new))


def move_steepest(
    param: Tensor,
    copy: Tensor | None,
    d: Tensor,
    norm: Norm,
    lr: float,
    decay: float,
    match_rms: float | None,
) -> None:
    """Move w by lr along the steepest direction of d; `copy` is w in float32, of half precision."""
    gather, part = gathered(param)
    if not param.numel():
        return
    direction = norm.steepest(gather(d))
    if match_rms is not None:
        size = direction.square().mean().sqrt()
        direction = direction * (match_rms / torch.where(size > 0, size, 1.0))
    w = local(param)
    base = w if copy is None else torch.where(local(copy).to(w.dtype) == w, local(copy), w)
    new = base * (1 - decay) if decay else base
    new = torch.sub(new, part(direction), alpha=lr)
    if copy is not None:
        local(copy).copy_(new)
        new = torch.where(new == base, w, new.to(w.dtype))
    w.copy_(new)


def steepest(param: Tensor, d: Tensor, norm: Norm) -> Tensor:
    """Return the steepest direction of d, both parts of one process."""
    gather, part = gathered(param)
    return part(norm.steepest(gather(d))) if param.numel() else d


@lru_cache(maxsize=1024)
def speed(psi: Potential, rms: float, shape: tuple[int, ...]) -> float:
    """Return how far u moves when weights of typical size `rms` move by 1, along themselves."""
    if isinstance(psi, Separable):
        return float(psi.curvature(torch.tensor(rms, dtype=torch.float64)))
    generator = torch.Generator().manual_seed(0)
    w = rms * torch.randn(shape, generator=generator, dtype=torch.float64)
    apart = psi.lift(1.001 * w) - psi.lift(0.999 * w)
    size = float(torch.linalg.vector_norm(w))
    found = float(torch.linalg.vector_norm(apart)) / (0.002 * size) if size else 1.0
    return found if 0 < found < math.inf else 1.0


def _same(x: Tensor) -> Tensor:
    return x


def gathered(param: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return what gathers a part of one process, and what takes the part out of the whole."""
    if not is_sharded(param):
        return _same, _same
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, places = param.device_mesh, param.placements
    shape, stride = param.shape, param.stride()

    def gather(x: Tensor) -> Tensor:
        spread = DTensor.from_local(x, mesh, places, run_check=False, shape=shape, stride=stride)
        return spread.full_tensor()

    return gather, lambda x: distribute_tensor(x.contiguous(), mesh, places).to_local()
