"""Steps of a group whose potential is centred at w0, such as pretrained weights.

    u+ = (1 - decay) u - lr d,      S = max(reach, max |u+|),
    w+ = w0 + S sign(u+) |u+/S|^(1/(p-1))

u starts at 0 where w starts at w0, and is measured in units of weights. No number above 1 is
ever raised to the power 1/(p-1), so no change can explode: |w - w0| <= S. As long as |u| stays
below `reach`, S = reach and the map is that of the p-norm; beyond, S grows with the largest |u|
of the tensor, which keeps the direction of mirror(w - w0).

A weight whose change rounds away has the bits of w0, in any dtype. On a CPU native/step.c takes
these steps; what is here in torch is for other devices, and the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirrorhead.geometry._powers import inverse_exponent, signed_power
from mirrorhead.optim._formula import UpdateRule, accumulate, dithered
from mirrorhead.optim._native import call_native
from mirrorhead.optim._param_state import ParamState, has_values, is_finite, number, waits
from mirrorhead.optim._sharded import Number, is_sharded, largest_entry, local, reduce_shards
from mirrorhead.optim._step import Implementation, StepPlan

_PIECE = 1 << 20  # weights at a time: bounds the scratch memory


@dataclass
class CenteredPlan:
    """One step of a centred group; nothing has moved yet."""

    plan: StepPlan  # of the same states without their centers; they have u as `stored`
    params: Sequence[Tensor]
    entries: Sequence[dict[str, Any]]  # of the parameters in the optimizer's state
    reach: float

    def run(self) -> list[bool | Tensor]:
        finite = self.plan.finite
        states = [
            replace(state, center=local(entry["center"]))
            for state, entry in zip(self.plan.states, self.entries, strict=True)
        ]
        for counter in self.plan.counters:
            counter.add_(1)
        kept = [entry["scale"] for entry in self.entries]  # S of the last step
        old = [scale if waits(scale) else number(scale) for scale in kept]  # not read on a device
        largest: list[Number] = [0.0] * len(states)
        in_c = self._in_c(states)
        for batch in in_c:
            results = call_native("step", [*batch.values()], [number(kept[i]) for i in batch])
            for i, (ok, its_largest) in zip(batch, results, strict=True):
                finite[i] &= ok
                largest[i] = its_largest
        done = {i for batch in in_c for i in batch}
        moved: dict[int, Tensor] = {}
        for i, state in enumerate(states):
            if i not in done:
                assert state.stored is not None
                finite[i] &= is_finite(state.grad)
                moved[i] = _move_dual(state, old[i])
                largest[i] = largest_entry(state.stored)
        new = [
            x.clamp_min(self.reach) if isinstance(x, Tensor) else max(self.reach, x)
            for x in reduce_shards(largest, self.params, "max")
        ]
        for batch in in_c:
            again = [i for i in batch if new[i] != old[i]]  # S has changed: write all weights
            call_native("rescale", [batch[i] for i in again], [float(new[i]) for i in again])
        for i, its_moved in moved.items():
            _write(states[i], new[i], its_moved | torch.as_tensor(new[i] != old[i]))
        for scale, value in zip(kept, new, strict=True):
            scale.copy_(value) if isinstance(value, Tensor) else scale.fill_(value)
        return finite

    def _in_c(self, states: list[ParamState]) -> list[dict[int, ParamState]]:
        """Return flat views of what native/step.c moves, by position, for each rule."""
        batches: dict[UpdateRule, dict[int, ParamState]] = {}
        for i, state in enumerate(states):
            if self.plan.implementation.on(state.weight) is not Implementation.NATIVE:
                continue
            if (view := state if state.contiguous() else state.flat()) is not None:
                batches.setdefault(state.rule, {})[i] = view
        return list(batches.values())


def mirror_around(w: Tensor, center: Tensor, p: float, scale: Number) -> Tensor:
    """Return u = S sign(x)|x/S|^(p-1) with x = w - w0, in float32 or better."""
    wide = torch.promote_types(w.dtype, torch.float32)
    scale = scale.to(wide) if isinstance(scale, Tensor) else scale
    return scale * signed_power((w.to(wide) - center.to(wide)) / scale, p - 1)


def weights_at(u: Tensor, center: Tensor, p: float, scale: Number) -> Tensor:
    """Return w0 + S sign(u)|u/S|^(1/(p-1)), with the bits of w0 where the change rounds away."""
    scale = scale.to(u.dtype) if isinstance(scale, Tensor) else scale
    exponent = inverse_exponent(p)
    x = u / scale
    # A change that would be subnormal, and slow, is 0.
    x = torch.where(x.abs() < torch.finfo(u.dtype).tiny ** (1 / exponent), 0.0, x)
    change = scale * signed_power(x, exponent)
    w = (center.to(u.dtype) + change).to(center.dtype)
    return torch.where(w == center, center, w)


def first_scale(params: Sequence[Tensor], centers: Sequence[Tensor], reach: float) -> list[float]:
    """Return the S of weights that have not taken a step yet: max(reach, max |w - w0|)."""
    largest = [
        largest_entry(local(param).double() - local(center).double())
        for param, center in zip(params, centers, strict=True)
    ]
    return [max(reach, float(x)) for x in reduce_shards(largest, params, "max")]


def matched_centers(center: Any, names: Sequence[str], params: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensor of `center` for each parameter, from a state dict or a list."""
    if hasattr(center, "keys"):
        if not names:
            raise ValueError(
                "center is a state dict, so the parameters need names: give"
                " model.named_parameters() or attention_param_groups(model)"
            )
        if missing := [name for name in names if name not in center]:
            raise ValueError(f"center has no tensor for {', '.join(map(repr, missing[:5]))}")
        center = [center[name] for name in names]
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
        # A copy: the model's own state dict, an average of weights or a teacher will move.
        result.append(tensor.detach().to(dtype=param.dtype, copy=True))
    return result


def like_param(center: Tensor, param: Tensor) -> Tensor:
    """Return the center on the parameter's device, sharded as the parameter is."""
    if is_sharded(param) and not is_sharded(center):
        from torch.distributed.tensor import distribute_tensor

        device = param.device_mesh.device_type
        return distribute_tensor(center.to(device), param.device_mesh, param.placements)
    return center.to(param.device)


def _move_dual(state: ParamState, scale: Number) -> Tensor:
    """Move u and the moments in place. Return where u has moved."""
    moved = torch.ones_like(state.weight, dtype=torch.bool)
    for piece, its_moved in _pieces(state, moved):
        rule, h, u, center = piece.rule, piece.hyper, piece.stored, piece.center
        assert u is not None and center is not None
        d, m, v = accumulate(rule, piece.grad, piece.m, piece.v, h)
        edited = weights_at(u, center, rule.p, scale) != piece.weight
        start = torch.where(edited, mirror_around(piece.weight, center, rule.p, scale), u)
        new = dithered(rule, start, h.lr * d, h)
        its_moved.copy_(new != start)
        for old, value in ((u, new), (piece.m, m), (piece.v, v)):
            if old is not None and value is not None:
                old.copy_(value)
    return moved


def _write(state: ParamState, scale: Number, moved: Tensor) -> None:
    """Write the weights whose u has moved; the others keep their bits."""
    for piece, its_moved in _pieces(state, moved):
        assert piece.stored is not None and piece.center is not None
        new = weights_at(piece.stored, piece.center, piece.rule.p, scale)
        piece.weight.copy_(torch.where(its_moved, new, piece.weight))


def _pieces(state: ParamState, moved: Tensor) -> Iterable[tuple[ParamState, Tensor]]:
    """Return (state, moved) in flat pieces, or whole where memory has gaps."""
    flat = state.flat() if has_values(state.weight) and state.contiguous() else None
    if flat is None:
        return [(state, moved)]
    return zip(flat.pieces(_PIECE), moved.view(-1).split(_PIECE), strict=True)
