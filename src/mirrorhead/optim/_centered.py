"""Steps of a group whose potential is centred at w0, such as pretrained weights.

    u+ = (1 - decay) u - lr d,      S = max(reach, max |u+|),
    w+ = w0 + S sign(u+) |u+/S|^(1/(p-1))

u starts at 0 where w starts at w0, and is measured in units of weights. No number above 1 is
ever raised to the power 1/(p-1), so no change can explode: |w - w0| <= S. As long as |u| stays
below `reach`, S = reach and the map is that of the p-norm; beyond, S grows with the largest |u|
of the tensor, which keeps the direction of mirror(w - w0).

A weight whose change rounds away has the bits of w0, in any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirrorhead.optim._formula import accumulate, direction, dithered
from mirrorhead.optim._param_state import ParamState, has_values, is_finite
from mirrorhead.optim._sharded import local, reduce_shards
from mirrorhead.potentials import inverse_exponent, signed_power

_PIECE = 1 << 20  # weights at a time: bounds the scratch memory


@dataclass
class CenteredPlan:
    """One step of a centred group; nothing has moved yet. `StepPlan` has the same methods.

    `states` have u as `stored`. `centers` are the local parts of w0. `scales` hold the S of the
    last step, as tensors of one element. `params` are what the maximum is reduced over.
    """

    params: Sequence[Tensor]
    states: Sequence[ParamState]
    centers: Sequence[Tensor]
    scales: Sequence[Tensor]
    reach: float
    counters: Sequence[Tensor]
    finite: list[bool]

    def prepare(self) -> None:
        """Do nothing: there is no kernel to compile."""

    def run(self) -> list[bool]:
        """Take the step. Return which gradients were finite."""
        for counter in self.counters:
            counter.add_(1)
        old_scales = [number(scale) for scale in self.scales]
        moved = []
        for i, (state, center) in enumerate(zip(self.states, self.centers, strict=True)):
            self.finite[i] &= is_finite(state.grad)
            moved.append(_move_dual(state, center, old_scales[i]))
        largest = [_largest(state.stored) for state in self.states]
        new_scales = [max(self.reach, x) for x in reduce_shards(largest, self.params, "max")]
        for i, (state, center) in enumerate(zip(self.states, self.centers, strict=True)):
            if new_scales[i] != old_scales[i]:
                moved[i] = torch.ones_like(moved[i])
            _write(state, center, new_scales[i], moved[i])
            self.scales[i].fill_(new_scales[i])
        return self.finite


def mirror_around(w: Tensor, center: Tensor, p: float, scale: float) -> Tensor:
    """Return u = S sign(x)|x/S|^(p-1) with x = w - w0, in float32 or better."""
    wide = torch.promote_types(w.dtype, torch.float32)
    return scale * signed_power((w.to(wide) - center.to(wide)) / scale, p - 1)


def weights_at(u: Tensor, center: Tensor, p: float, scale: float) -> Tensor:
    """Return w0 + S sign(u)|u/S|^(1/(p-1)), with the bits of w0 where the change rounds away."""
    change = scale * signed_power(u / scale, inverse_exponent(p))
    w = (center.to(u.dtype) + change).to(center.dtype)
    return torch.where(w == center, center, w)


def first_scale(params: Sequence[Tensor], centers: Sequence[Tensor], reach: float) -> list[float]:
    """Return the S of weights that have not taken a step yet: max(reach, max |w - w0|)."""
    largest = [
        _largest(local(param).double() - local(center).double())
        for param, center in zip(params, centers, strict=True)
    ]
    return [max(reach, x) for x in reduce_shards(largest, params, "max")]


def number(x: Tensor) -> float:
    """Return the value of a tensor of one element; 1 for meta and fake tensors."""
    return float(x) if has_values(x) else 1.0


def matched_centers(center: Any, names: Sequence[str], params: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensor of `center` for each parameter, from a state dict or a list.

    The tensors themselves are kept, not copies, unless dtype or device differ.
    """
    if hasattr(center, "keys"):
        if not names:
            raise ValueError(
                "center is a state dict, so the parameters need names: give"
                " model.named_parameters() or attention_param_groups(model)"
            )
        if missing := [name for name in names if name not in center]:
            raise ValueError(f"center has no tensor for {', '.join(map(repr, missing[:5]))}")
        tensors = [center[name] for name in names]
    else:
        tensors = list(center)
        if len(tensors) != len(params):
            raise ValueError(
                f"center has {len(tensors)} tensors for a group of {len(params)} parameters"
            )
    result = []
    for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        label = repr(names[i]) if names else f"parameter {i}"
        if not isinstance(tensor, Tensor) or tensor.shape != param.shape:
            given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"center of {label} must be a tensor of shape {tuple(param.shape)}, got {given}"
            )
        if has_values(local(tensor)) and not local(tensor).isfinite().all():
            raise ValueError(f"center of {label} has inf or NaN")
        result.append(tensor.detach().to(dtype=param.dtype))
    return result


def like_param(center: Tensor, param: Tensor) -> Tensor:
    """Return the center on the parameter's device, sharded as the parameter is."""
    from mirrorhead.optim._sharded import is_sharded

    if is_sharded(param) and not is_sharded(center):
        from torch.distributed.tensor import distribute_tensor

        device = param.device_mesh.device_type
        return distribute_tensor(center.to(device), param.device_mesh, param.placements)
    return center.to(param.device)


def _move_dual(state: ParamState, center: Tensor, scale: float) -> Tensor:
    """Move u and the moments in place. Return where u has moved."""
    moved = torch.ones_like(state.weight, dtype=torch.bool)
    for piece, its_center, its_moved in _pieces(state, center, moved):
        rule, h, u = piece.rule, piece.hyper, piece.stored
        assert u is not None
        g, m, v = accumulate(rule, piece.grad, piece.m, piece.v, h)
        d = direction(rule, g, m, v, h)
        edited = weights_at(u, its_center, rule.p, scale) != piece.weight
        start = torch.where(edited, mirror_around(piece.weight, its_center, rule.p, scale), u)
        new = dithered(rule, start, h.lr * d, h)
        its_moved.copy_(new != start)
        for old, value in ((u, new), (piece.m, m), (piece.v, v)):
            if old is not None and value is not None:
                old.copy_(value)
    return moved


def _write(state: ParamState, center: Tensor, scale: float, moved: Tensor) -> None:
    """Write the weights whose u has moved; the others keep their bits."""
    for piece, its_center, its_moved in _pieces(state, center, moved):
        assert piece.stored is not None
        new = weights_at(piece.stored, its_center, piece.rule.p, scale)
        piece.weight.copy_(torch.where(its_moved, new, piece.weight))


def _pieces(state: ParamState, center: Tensor, moved: Tensor) -> Any:
    """Yield (state, center, moved) in flat pieces, or whole where memory has gaps."""
    flat = state.flat() if state.weight.is_contiguous() else None
    if flat is None or not center.is_contiguous() or not has_values(state.weight):
        yield state, center, moved
        return
    views = center.view(-1).split(_PIECE), moved.view(-1).split(_PIECE)
    yield from zip(flat.pieces(_PIECE), *views, strict=True)


def _largest(x: Tensor | None) -> float:
    assert x is not None
    return float(x.abs().max()) if x.numel() and has_values(x) else 0.0
