"""Sums and maxima over parameters that may be spread over several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from mirrorhead.potentials import power


def local(x: Tensor) -> Tensor:
    """The part of x that lives in this process, detached: the same memory."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def local_gradient(param: Tensor) -> Tensor:
    """The gradient of this process's part of the parameter."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def reduce_shards(
    values: Tensor, params: Sequence[Tensor], reduction: Literal["sum", "max"]
) -> Tensor:
    """One number a parameter, reduced over the processes that hold a part of it."""
    spread: dict[tuple, list[int]] = {}
    for i, param in enumerate(params):
        if isinstance(param, DTensor):
            spread.setdefault((param.device_mesh, tuple(param.placements)), []).append(i)
    for (mesh, placements), indices in spread.items():
        # Not is_shard(): the strided shards of FSDP over tensor parallelism say no to it.
        partial = [Replicate() if p.is_replicate() else Partial(reduction) for p in placements]
        mine = values[indices].to(mesh.device_type)
        whole = DTensor.from_local(mine, mesh, partial, run_check=False).full_tensor()
        values[indices] = whole.to(values.device)
    return values


def all_finite(params: Sequence[Tensor], finite: Sequence[bool]) -> list[bool]:
    """Which gradients are finite in all processes, given which are so in this one."""
    bad = torch.tensor([0.0 if ok else 1.0 for ok in finite])
    return [not flag for flag in reduce_shards(bad, params, "max").tolist()]


def dual_norms(params: Sequence[Tensor], grads: Sequence[Tensor], q: float) -> Tensor:
    """||g||_q of each gradient, in float64, divided by the largest entry on the way."""
    largest = torch.tensor([_largest(g) for g in grads], dtype=torch.float64)
    largest = reduce_shards(largest, params, "max")
    sums = []
    for g, scale in zip(grads, largest.tolist(), strict=True):
        wide = g.to(torch.promote_types(g.dtype, torch.float32))
        # One at a time: scale may be too small for its reciprocal to be finite.
        sums.append(float(power(wide.abs() / scale, q).sum()) if scale and g.numel() else 0.0)
    total = reduce_shards(torch.tensor(sums, dtype=torch.float64), params, "sum")
    return largest * total.pow(1 / q)


def combine_norms(norms: Tensor, q: float) -> Tensor:
    """The q-norm of all tensors together from the q-norms of each."""
    largest = norms.max()
    return largest * (norms / largest).pow(q).sum().pow(1 / q) if largest > 0 else largest


def root_mean_squares(params: Sequence[Tensor]) -> Tensor:
    """The root mean square of each parameter, in float64."""
    parts = [local(p).to(torch.promote_types(p.dtype, torch.float32)).flatten() for p in params]
    sums = torch.tensor([float(x.double().square().sum()) for x in parts], dtype=torch.float64)
    counts = torch.tensor([float(p.numel()) for p in params], dtype=torch.float64)
    return (reduce_shards(sums, params, "sum") / counts.clamp_min(1)).sqrt()


def _largest(g: Tensor) -> float:
    return float(g.abs().max()) if g.numel() else 0.0
