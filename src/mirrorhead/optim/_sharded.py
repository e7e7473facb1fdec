"""Sums and maxima over parameters that may be spread over several processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
from torch import Tensor

from mirrorhead.optim._param_state import has_values
from mirrorhead.potentials import power

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether x is a DTensor.

    torch.distributed.tensor takes a second to import, so it is only looked up: where nobody
    has imported it there is no DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """Return the part of x that lives in this process, detached: the same memory."""
    return (x.to_local() if is_sharded(x) else x).detach()


def local_gradient(param: Tensor) -> Tensor:
    """Return the gradient of this process's part of the parameter."""
    grad = param.grad
    assert grad is not None
    if is_sharded(param) and is_sharded(grad):
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def reduce_shards(
    values: Sequence[float], params: Sequence[Tensor], reduction: Literal["sum", "max"]
) -> list[float]:
    """Reduce one number for each parameter over the processes that hold a part of it."""
    reduced = list(values)
    shards: dict[tuple, list[int]] = {}
    for i, param in enumerate(params):
        if is_sharded(param):
            shards.setdefault((param.device_mesh, tuple(param.placements)), []).append(i)
    for (mesh, placements), indices in shards.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        # Not is_shard(): the strided shards of FSDP over tensor parallelism say no to it.
        partial = [Replicate() if p.is_replicate() else Partial(reduction) for p in placements]
        mine = torch.tensor([values[i] for i in indices], dtype=torch.float64, device="cpu")
        mine = mine.to(mesh.device_type)
        whole = DTensor.from_local(mine, mesh, partial, run_check=False).full_tensor()
        for i, value in zip(indices, whole.tolist(), strict=True):
            reduced[i] = value
    return reduced


def all_finite(params: Sequence[Tensor], finite: Sequence[bool]) -> list[bool]:
    """Return which gradients are finite in all processes, given which are so in this one."""
    return [not bad for bad in reduce_shards([float(not ok) for ok in finite], params, "max")]


def dual_norms(params: Sequence[Tensor], grads: Sequence[Tensor], q: float) -> list[float]:
    """Return ||g||_q of each gradient, divided by the largest entry while it is summed."""
    largest = reduce_shards([_largest(g) for g in grads], params, "max")
    sums = []
    for g, scale in zip(grads, largest, strict=True):
        wide = g.to(torch.promote_types(g.dtype, torch.float32))
        # One at a time: scale may be too small for its reciprocal to be finite.
        counted = scale and g.numel() and has_values(g)
        sums.append(float(power(wide.abs() / scale, q).sum()) if counted else 0.0)
    totals = reduce_shards(sums, params, "sum")
    return [scale * total ** (1 / q) for scale, total in zip(largest, totals, strict=True)]


def combine_norms(norms: Sequence[float], q: float) -> float:
    """Return the q-norm of all tensors together from the q-norms of each."""
    largest = max(norms)
    return largest * sum((norm / largest) ** q for norm in norms) ** (1 / q) if largest > 0 else 0.0


def root_mean_squares(params: Sequence[Tensor]) -> list[float]:
    """Return the root mean square of each parameter; 1 for meta and fake tensors."""
    sums = []
    for param in params:
        part = local(param)
        counted = has_values(part)
        sums.append(float(part.double().square().sum()) if counted else float(param.numel()))
    totals = reduce_shards(sums, params, "sum")
    return [
        (total / max(param.numel(), 1)) ** 0.5 for total, param in zip(totals, params, strict=True)
    ]


def _largest(g: Tensor) -> float:
    return float(g.abs().max()) if g.numel() and has_values(g) else 0.0
