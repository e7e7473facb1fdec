"""Directions of a step: pure functions of the gradient and its moments.

    gradient          d = g
    momentum          m+ = mu m + g,  d = m+  or, with Nesterov's, g + mu m+
    Adam              m+ = m + (1 - beta1)(g - m),  v+ = beta2 v + (1 - beta2) g^2,
                      d = m+ / (sqrt(v+) / sqrt(1 - beta2^t) + eps); lr has 1 / (1 - beta1^t)
    Signum, Muon      the steepest direction of one of these in a norm

They work on any tensors, eagerly and through torch.compile. native/step.c computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mirrorhead.geometry._base import Norm
from mirrorhead.optim._rule import Hyper, Method
from mirrorhead.optim._sharded import is_sharded

Split = Callable[[Tensor], Tensor]


def accumulate(
    method: Method, g: Tensor, m: Tensor | None, v: Tensor | None, h: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the direction and the moments after a gradient, whose inf and NaN count as 0."""
    g = torch.where(g.abs() <= torch.finfo(g.dtype).max, g, 0.0) * h.grad_scale
    if method is Method.DESCENT:
        return g, m, v
    assert m is not None
    if method is Method.ADAM:
        assert v is not None
        first: Tensor = m + h.gain1 * (g - m)
        second: Tensor = h.beta2 * v + h.gain2 * (g * g)
        return first / (second.sqrt() * h.root_bias + h.eps), first, second
    moved: Tensor = h.momentum * m + g
    return (g + h.momentum * moved if method is Method.NESTEROV else moved), moved, v


def steepest(param: Tensor, d: Tensor, norm: Norm, match_rms: float | None) -> Tensor:
    """Return the steepest direction of d in a norm, this process's part, as d is."""
    if not param.numel():
        return d
    gather, part = gathered(param)
    found = norm.steepest(gather(d))
    if match_rms is not None:
        size = found.square().mean().sqrt()
        found = found * (match_rms / torch.where(size > 0, size, 1.0))
    return part(found)


def gathered(param: Any) -> tuple[Split, Split]:
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


def _same(x: Tensor) -> Tensor:
    return x
