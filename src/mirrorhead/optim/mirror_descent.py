"""Mirror descent with the p-norm potential, as a torch optimizer and as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from mirrorhead.optim.base import MirrorOptimizer, Params, check_number
from mirrorhead.optim.engine import dither as dither_of
from mirrorhead.optim.engine import implementation, row_of, run, wide_dtype
from mirrorhead.optim.kernels import DECAY, DITHER, GRAD_SCALE, LR, MOMENTUM, Rule
from mirrorhead.optim.leaf import is_finite
from mirrorhead.optim.sharded import combine_norms, dual_norms, local
from mirrorhead.potentials import dual_exponent

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
        lr: learning rate, a number or a tensor of one element.
        p: exponent of the norm, greater than 1.
        momentum: m <- momentum m + g, and d = m.
        weight_decay: decoupled, and in the dual: see docs/optimizer.md.
        normalize: divide the gradient by its dual norm ||g||_q, q = p/(p-1), by "tensor" or
            over the whole group ("global"). A zero gradient stays zero.
        nesterov: d = g + momentum m.
        maximize: go up instead of down.
        foreach: True for torch's foreach operations (the default), False for a plain loop.
        fused: True for kernels compiled by torch.compile: fastest, after some seconds.
        keep_dual: keep u (p < 2) or a float32 copy of w (bf16, fp16) as state. False keeps no
            state at all, and leaves weights at 0 stuck where p < 2.
        stochastic_rounding: round bf16 parameters at random, without bias.
        error_if_nonfinite: raise after a step in which a gradient had inf or NaN. Those
            entries count as zero in any case, and never reach weights or state.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = MirrorDescent(model.parameters(), lr=0.1, p=1.1)
    >>> model(torch.ones(3)).backward()
    >>> optimizer.step()
    """

    _tensor_state = frozenset({"dual", "wide", "momentum_buffer"})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        p: float = 1.1,
        momentum: float = 0,
        weight_decay: float = 0,
        normalize: Normalize = None,
        *,
        nesterov: bool = False,
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
        if not isinstance(options["nesterov"], bool):
            raise TypeError(f"nesterov must be True or False, got {options['nesterov']!r}")
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("nesterov=True needs momentum greater than 0")

    def _buffer_dtype(self, group: dict[str, Any], param: Tensor) -> torch.dtype:
        if is_sgd(group["p"], group["stochastic_rounding"])(param):
            return param.dtype  # as torch's SGD has it
        return super()._buffer_dtype(group, param)

    def _step_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[bool]:
        scales, finite = [1.0] * len(params), [True] * len(params)
        if group["normalize"]:
            finite, grads = cleaned(grads)
            scales = _inverse_norms(params, grads, group["p"], group["normalize"])
        buffers = [
            self._buffer(group, param, "momentum_buffer") if group["momentum"] else None
            for param in params
        ]
        plain = is_sgd(group["p"], group["stochastic_rounding"])
        found = mirror_descent(
            [local(param) for param in params],
            grads,
            [None if plain(param) else self._kept(group, param) for param in params],
            buffers,
            scales=scales,
            dither=dither_of(group["step"]),
            seed=group["step"],
            **{
                name: group[name]
                for name in (
                    "lr",
                    "p",
                    "momentum",
                    "nesterov",
                    "weight_decay",
                    "maximize",
                    "foreach",
                    "fused",
                    "stochastic_rounding",
                )
            },
        )
        return [a and b for a, b in zip(finite, found, strict=True)]


def is_sgd(p: float, stochastic_rounding: bool) -> Any:
    """Which parameters torch's own SGD moves: at p = 2, but for bf16 rounded at random."""
    return lambda w: p == 2 and not (stochastic_rounding and w.dtype == torch.bfloat16)


def mirror_descent(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    stored: Sequence[Tensor | None],
    momentum_buffers: Sequence[Tensor | None],
    *,
    lr: float | Tensor,
    p: float,
    momentum: float = 0,
    nesterov: bool = False,
    weight_decay: float = 0,
    maximize: bool = False,
    foreach: bool | None = None,
    fused: bool | None = None,
    stochastic_rounding: bool = False,
    scales: Sequence[float] | None = None,
    dither: float = 0.0,
    seed: int = 0,
) -> list[bool]:
    """One step of `MirrorDescent` on plain tensors, in place.

    Returns, for each gradient, whether it was finite; inf and NaN in it counted as 0.

    Args:
        params, grads: the weights and their gradients.
        stored: for each weight, u = sign(w)|w|^(p-1) in float32 or better (p < 2), a float32
            copy of w (p > 2), or None to keep nothing.
        momentum_buffers: zeros at the start; None where momentum is 0.
        scales: what to multiply each gradient by first, such as 1/||g||_q.
        dither: from -1/2 to 1/2; see `kernels._dithered`.
        seed: of the noise for stochastic rounding; another one for every step.

    >>> w, u = torch.tensor([0.5, 0.0]), torch.tensor([0.5**0.5, 0.0])
    >>> mirror_descent([w], [torch.tensor([0.0, -1.0])], [u], [None], lr=0.1, p=1.5)
    [True]
    >>> w, u
    (tensor([0.5000, 0.0100]), tensor([0.7071, 0.1000]))
    """
    scales = [1.0] * len(params) if scales is None else scales
    how = implementation(foreach, fused)
    rate = float(lr)
    plain = is_sgd(p, stochastic_rounding)
    finite = [True] * len(params)
    if sgd_indices := [i for i, w in enumerate(params) if plain(w)]:
        weights = [params[i] for i in sgd_indices]
        if weight_decay:
            torch._foreach_mul_(weights, 1 - rate * weight_decay)
        found, clean = cleaned([grads[i] for i in sgd_indices])
        for i, ok in zip(sgd_indices, found, strict=True):
            finite[i] = ok
        sgd(
            weights,
            [
                g if scales[i] == 1 else g * scales[i]
                for i, g in zip(sgd_indices, clean, strict=True)
            ],
            [momentum_buffers[i] for i in sgd_indices],
            foreach=how == "foreach",
            fused=how == "fused",
            weight_decay=0,
            momentum=momentum,
            lr=rate,
            dampening=0,
            nesterov=nesterov,
            maximize=maximize,
        )
    if indices := [i for i, w in enumerate(params) if not plain(w)]:
        sign = -1.0 if maximize else 1.0
        rule = Rule(
            p=p,
            kind="descent",
            storage="primal",
            dtype=torch.float32,
            momentum=momentum != 0,
            nesterov=nesterov,
            decay=weight_decay != 0,
            scaled=maximize or any(scale != 1 for scale in scales),
        )
        found = run(
            rule,
            [params[i] for i in indices],
            [grads[i] for i in indices],
            [stored[i] for i in indices],
            [momentum_buffers[i] for i in indices],
            [None] * len(indices),
            [
                row_of(
                    {
                        LR: rate,
                        DECAY: rate * weight_decay,
                        DITHER: dither,
                        GRAD_SCALE: sign * scales[i],
                        MOMENTUM: momentum,
                    }
                )
                for i in indices
            ],
            how,
            stochastic_rounding,
            seed,
        )
        for i, ok in zip(indices, found, strict=True):
            finite[i] = ok
    return finite


def cleaned(grads: Sequence[Tensor]) -> tuple[list[bool], list[Tensor]]:
    """Which gradients are finite, and all of them with 0 for inf and NaN."""
    finite = [is_finite(g) for g in grads]
    return finite, [
        g if ok else g.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        for g, ok in zip(grads, finite, strict=True)
    ]


def _inverse_norms(
    params: Sequence[Tensor], grads: Sequence[Tensor], p: float, by: Normalize
) -> list[float]:
    """1/||g||_q for each gradient, or for all of them together; 0 for a zero gradient."""
    q = dual_exponent(p)
    norms = dual_norms(params, grads, q)
    if by == "global":
        norms = combine_norms(norms, q).expand(len(params))
    # A norm of subnormal size has no reciprocal in its dtype: the largest number must do.
    largest = [torch.finfo(wide_dtype(g.dtype)).max for g in grads]
    return [
        min(1 / norm, big) if norm > 0 else 0.0
        for norm, big in zip(norms.tolist(), largest, strict=True)
    ]
