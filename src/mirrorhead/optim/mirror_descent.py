"""Mirror descent with the p-norm potential, as a torch optimizer and as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._choice import as_norm
from mirrorhead.geometry._powers import dual_exponent
from mirrorhead.optim._any_geometry import gathered, steepest
from mirrorhead.optim._base import Center, MirrorOptimizer, Params, as_geometry, check_number
from mirrorhead.optim._formula import Method
from mirrorhead.optim._native import takes_sgd
from mirrorhead.optim._param_state import cleaned, readable
from mirrorhead.optim._sharded import Number, combine_norms, dual_norms
from mirrorhead.optim._step import Group, Implementation, StepPlan, wide_dtype
from mirrorhead.optim.directions import momentum

Normalize = Literal["tensor", "global"] | None


class MirrorDescent(MirrorOptimizer):
    r"""Mirror descent with the potential :math:`\psi(w) = \frac1p \|w\|_p^p` (lp-MD).

    .. math::
        u &\leftarrow (1 - \eta\lambda)\, u - \eta\, d, \\
        w &\leftarrow \mathrm{sign}(u)\,|u|^{1/(p-1)},

    where u = sign(w)|w|^(p-1), eta is `lr`, lambda is `weight_decay` and d is the gradient,
    or its momentum. p = 2 is SGD, to the bit. p near 1 gives sparse weights.

    Args:
        params: parameters, named parameters or groups; every option can differ by group.
        lr: learning rate, a number or a tensor of one element. The default is that of SGD; the best
            rate depends on p (docs/how-to-choose.md).
        geometry: a potential, such as `Schatten(1.2)`, or an exponent p > 1, which stands for the
            p-norm. The default is the paper's.
        momentum: m <- momentum m + g, and d = m.
        weight_decay: decoupled, and applied to u. It acts about 1/(p-1) times as strongly as the
            same number in SGD: multiply your usual value by p - 1.
        normalize: divide the gradient by its dual norm ||g||_q, q = p/(p-1), of each tensor
            ("tensor") or of the whole group ("global"). A zero gradient stays zero.
        center: None, "init" (the weights at the first step), or a state dict or list of tensors,
            which are copied. The potential is then that of w - center: of all solutions, training
            tends to the one closest to the center in the p-norm. See docs/optimizer.md.
        nesterov: d = g + momentum m.
        direction: a norm, or an exponent from 1 to inf: move u along the steepest direction of d in
            this norm instead of d. `inf` is Signum's, `Schatten(inf)` Muon's.
        maximize: maximize the objective instead of minimizing it.
        foreach: True for torch's foreach operations, False for a plain loop. The default is the
            C library on a CPU, and foreach elsewhere.
        fused: True for kernels compiled by torch.compile. Compiling takes 5 to 40 seconds.
        keep_dual: keep u (p < 2) or a float32 copy of w (bf16, fp16) as state. False keeps
            neither; with p < 2, weights at 0 then stay at 0.
        stochastic_rounding: round bf16 parameters at random, without bias.
        error_if_nonfinite: raise after a step in which a gradient had inf or NaN. Either way,
            these entries count as zero and never reach weights or state. The new weights are not
            checked: a step so large that a weight becomes inf raises nothing, and the error of a
            later step, whose gradient is then NaN, names the weights.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = MirrorDescent(model.parameters(), lr=0.1, geometry=1.1)
    >>> model(torch.ones(3)).backward()
    >>> optimizer.step()
    """

    _tensor_state = frozenset({"dual", "wide", "center", "momentum_buffer"})
    _scalar_state = frozenset({"scale"})
    _own_option = "normalize"

    _own_flags = ("nesterov",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        geometry: float | Potential = 1.1,
        momentum: float = 0,
        weight_decay: float = 0,
        normalize: Normalize = None,
        *,
        center: Center = None,
        nesterov: bool = False,
        direction: float | Norm | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        keep_dual: bool = True,
        stochastic_rounding: bool = False,
        error_if_nonfinite: bool = True,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        super().__init__(params, options)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        check_number("momentum", options["momentum"], below=1)
        if options["normalize"] not in (None, "tensor", "global"):
            raise ValueError(
                f'normalize must be None, "tensor" or "global", got {options["normalize"]!r}'
            )
        if options["direction"] is not None:
            as_norm(options["direction"], "direction")
            if options["center"] is not None:
                raise ValueError("direction cannot be used with center: give Centered(...)")
        if options["normalize"] == "global" and isinstance(options["geometry"], Potential):
            raise ValueError('normalize="global" needs a p-norm: use "tensor"')
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("nesterov=True needs momentum greater than 0")

    def _is_plain(self, group: Group, param: Tensor) -> bool:
        return is_sgd(group["geometry"], param.dtype, group["stochastic_rounding"])

    def _buffer_dtype(self, group: Group, param: Tensor) -> torch.dtype:
        if self._is_plain(group, param) and group["center"] is None:
            return param.dtype  # as torch's SGD has it
        return super()._buffer_dtype(group, param)

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        momentum = {"momentum_buffer"} if options["momentum"] else set()
        return super()._needed_state(options, param, saved) | momentum

    def _direction(self, group: Group, param: Tensor, g: Tensor) -> Tensor:
        if group["normalize"]:
            norm = as_geometry(group["geometry"]).limit.dual_norm(gathered(param)[0](g))
            g = torch.where(norm > 0, g / norm, 0.0)
        if group["momentum"]:
            m = self._buffer(param, "momentum_buffer", g.dtype)
            g = momentum(g, m, group["momentum"], group["nesterov"])
        if group["direction"] is not None:
            g = steepest(param, g, as_geometry(group["direction"]))
        return g

    def _plan(self, group: Group, params: list[Tensor], options: dict[str, Any]) -> StepPlan:
        finite = None
        if group["normalize"]:
            finite, grads = cleaned(options["grads"])
            scales = _inverse_norms(params, grads, group["geometry"], group["normalize"])
            options |= {"grads": grads, "scales": scales}
        options["momentum_buffers"] = [None] * len(params)
        if group["momentum"]:
            options["momentum_buffers"] = self._buffers(group, params, "momentum_buffer")
        options |= {name: group[name] for name in ("momentum", "nesterov")}
        plan = plan_descent(**options)
        plan.finite = finite or plan.finite
        return plan


def is_sgd(p: float, dtype: torch.dtype, stochastic_rounding: bool) -> bool:
    """Return whether the step is that of torch's SGD: at p = 2, unless rounded at random."""
    return p == 2 and not (stochastic_rounding and dtype == torch.bfloat16)


def mirror_descent(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    stored: Sequence[Tensor | None],
    momentum_buffers: Sequence[Tensor | None],
    **options: Any,
) -> list[bool]:
    """Take one step of `MirrorDescent` on plain tensors, in place.

    Return, for each gradient, whether it was finite; inf and NaN in it count as 0.

    Args:
        params, grads: the weights and their gradients.
        stored: for each weight, u = sign(w)|w|^(p-1) in float32 or better (p < 2), a float32
            copy of w (p > 2), or None to keep nothing.
        momentum_buffers: zeros at the start; None where momentum is 0.
        options: those of `plan_descent` and `StepPlan`; lr and p are required.

    >>> w, u = torch.tensor([0.5, 0.0]), torch.tensor([0.5**0.5, 0.0])
    >>> mirror_descent([w], [torch.tensor([0.0, -1.0])], [u], [None], lr=0.1, p=1.5)
    [True]
    >>> w, u
    (tensor([0.5000, 0.0100]), tensor([0.7071, 0.1000]))
    """
    grads = [readable(g, w) for g, w in zip(grads, params, strict=True)]
    return plan_descent(params, grads, stored, momentum_buffers, **options).run_checked()


def plan_descent(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    stored: Sequence[Tensor | None],
    momentum_buffers: Sequence[Tensor | None],
    *,
    momentum: float = 0,
    nesterov: bool = False,
    scales: Sequence[Number] | None = None,
    **options: Any,
) -> StepPlan:
    """Plan one step of `mirror_descent`; nothing moves before the plan is run.

    Args:
        scales: what to multiply each gradient by first, such as 1/||g||_q.
        options: those of `StepPlan`.
    """
    scales = [1.0] * len(params) if scales is None else scales
    plan = StepPlan(Method.DESCENT, params, grads, stored, **options)
    plan.plain = [
        i
        for i, w in enumerate(params)
        if is_sgd(plan.p, w.dtype, plan.stochastic_rounding)
        and not plan.centered
        # The C library saves torch's second pass over the gradient, which looks for inf and NaN.
        and (momentum or plan.implementation.on(w) is not Implementation.NATIVE or not takes_sgd(w))
    ]

    def torch_step(plan: StepPlan, weights: list[Tensor], clean: list[Tensor]) -> None:
        if plan.weight_decay:
            torch._foreach_mul_(weights, 1 - plan.rate * plan.weight_decay)
        clean = [
            g if isinstance(scale := scales[i], float) and scale == 1 else g * scale
            for i, g in zip(plan.plain, clean, strict=True)
        ]
        buffers = [momentum_buffers[i] for i in plan.plain]
        # torch's fused SGD leaves the last elements of half-precision tensors undefined.
        full = all(w.dtype.itemsize >= 4 for w in weights)
        own = plan.torch_options(weights, clean, buffers, fusible=full)
        if nesterov and own["foreach"]:  # torch adds the momentum to the gradients in place
            clean = [
                g.clone() if g is plan.grads[i] else g
                for i, g in zip(plan.plain, clean, strict=True)
            ]
        own |= {"momentum": momentum, "nesterov": nesterov, "dampening": 0, "weight_decay": 0}
        sgd(weights, clean, buffers, **own)

    plan.torch_step = torch_step
    plan.scaled |= any(isinstance(scale, Tensor) or scale != 1 for scale in scales)
    plan.nesterov = nesterov
    for i in range(len(params)):
        if i in plan.plain:
            continue
        grad_scale = -scales[i] if plan.maximize else scales[i]
        numbers = {"lr": plan.rate, "grad_scale": grad_scale, "momentum": momentum}
        plan.add(i, momentum_buffers[i], None, **numbers)
    return plan


def _inverse_norms(
    params: Sequence[Tensor], grads: Sequence[Tensor], p: float, by: Normalize
) -> list[Number]:
    """Return 1/||g||_q for each gradient, or for all of them together; 0 for a zero gradient."""
    q = dual_exponent(p)
    norms = dual_norms(params, grads, q)
    if by == "global":
        norms = [combine_norms(norms, q)] * len(params)
    return [_inverse(norm, wide_dtype(g.dtype)) for norm, g in zip(norms, grads, strict=True)]


def _inverse(norm: Number, dtype: torch.dtype) -> Number:
    # A norm of subnormal size has no reciprocal in its dtype: the largest number must do.
    largest = torch.finfo(dtype).max
    if isinstance(norm, Tensor):  # on a device: not read
        return torch.where(norm > 0, (1 / norm).clamp_max(largest), 0.0).to(dtype)
    return min(1 / norm, largest) if norm > 0 else 0.0
