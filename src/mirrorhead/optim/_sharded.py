"""Sums and maxima over parameters that may be spread over several processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
from torch import Tensor

from mirrorhead.geometry._powers import power
from mirrorhead.optim._native import serves, sum_of_squares
from mirrorhead.optim._tensors import has_values, readable, waits

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Number = float | Tensor  # a tensor of one element on a device, which is not read


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether x is a DTensor."""
    # It takes a second to import, so it is only looked up: else there is no DTensor.
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
    return readable(local(grad), local(param))


def reduce_shards(
    values: Sequence[Number], params: Sequence[Tensor], reduction: Literal["sum", "max"]
) -> list[Number]:
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
        parts = [
            x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")
            for x in (values[i] for i in indices)
        ]
        mine = torch.stack(parts).to(mesh.device_type)
        whole = DTensor.from_local(mine, mesh, partial, run_check=False).full_tensor()
        unread = any(isinstance(values[i], Tensor) for i in indices)
        for i, value in zip(indices, whole.unbind() if unread else whole.tolist(), strict=True):
            reduced[i] = value
    return reduced


def all_finite(params: Sequence[Tensor], finite: Sequence[bool | Tensor]) -> list[bool | Tensor]:
    """Return which gradients are finite in all processes, given which are so in this one."""
    bad = [(~ok).double() if isinstance(ok, Tensor) else float(not ok) for ok in finite]
    return [x == 0 for x in reduce_shards(bad, params, "max")]


def all_true(flags: Sequence[bool | Tensor]) -> bool:
    """Return whether all hold. Flags on a device are read at once: the only wait of a step."""
    waiting: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        if isinstance(flag, Tensor):
            waiting.setdefault(flag.device, []).append(flag)
        elif not flag:
            return False
    return all(bool(torch.stack(some).all()) for some in waiting.values())


def dual_norms(params: Sequence[Tensor], grads: Sequence[Tensor], q: float) -> list[Number]:
    """Return ||g||_q of each gradient, divided by the largest entry while it is summed."""
    largest = reduce_shards([largest_entry(g) for g in grads], params, "max")
    sums: list[Number] = []
    for g, scale in zip(grads, largest, strict=True):
        wide = g.to(torch.promote_types(g.dtype, torch.float32))
        if isinstance(scale, Tensor):
            divisor = torch.where(scale > 0, scale, 1.0).to(wide.dtype)
            sums.append(power(wide.abs() / divisor, q).sum(dtype=torch.float64))
            continue
        # One at a time: scale may be too small for its reciprocal to be finite.
        counted = scale and g.numel() and has_values(g)
        sums.append(float(power(wide.abs() / scale, q).sum()) if counted else 0.0)
    totals = reduce_shards(sums, params, "sum")
    return [scale * total ** (1 / q) for scale, total in zip(largest, totals, strict=True)]


def combine_norms(norms: Sequence[Number], q: float) -> Number:
    """Return the q-norm of all tensors together from the q-norms of each."""
    if any(isinstance(norm, Tensor) for norm in norms):
        every = torch.stack([norm for norm in norms if isinstance(norm, Tensor)])
        largest = every.max()
        return largest * (every / torch.where(largest > 0, largest, 1.0)).pow(q).sum().pow(1 / q)
    largest = max(norms)
    return largest * sum((norm / largest) ** q for norm in norms) ** (1 / q) if largest > 0 else 0.0


def root_mean_squares(params: Sequence[Tensor]) -> list[float]:
    """Return the root mean square of each parameter; 1 for meta and fake tensors."""
    sums = [
        _sum_of_squares(part) if has_values(part) else float(param.numel())
        for param, part in zip(params, map(local, params), strict=True)
    ]
    totals = zip(reduce_shards(sums, params, "sum"), params, strict=True)
    return [(float(total) / max(param.numel(), 1)) ** 0.5 for total, param in totals]


def _sum_of_squares(x: Tensor) -> float:
    if waits(x):
        return float(x.double().square().sum())
    x = x.detach().contiguous()
    if serves(x):
        return sum_of_squares(x)
    # By pieces that one thread adds up, in an order that does not depend on where memory begins.
    return sum(float(piece.double().square().sum()) for piece in x.view(-1).split(1 << 14))


def largest_entry(x: Tensor) -> Number:
    """Return max |x|; on a device as a tensor, not read."""
    if not has_values(x):
        return 0.0
    largest = x.abs().max() if x.numel() else x.new_zeros(())
    return largest.double() if waits(x) else float(largest)
