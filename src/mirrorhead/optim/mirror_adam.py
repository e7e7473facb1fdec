"""Adam in the dual of the p-norm, as a torch optimizer and as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mirrorhead.optim.base import MirrorOptimizer, Params, check_number
from mirrorhead.optim.engine import dither as dither_of
from mirrorhead.optim.engine import implementation, row_of, run, wide_dtype
from mirrorhead.optim.kernels import (
    BETA2,
    DECAY,
    DITHER,
    EPS,
    GAIN1,
    GAIN2,
    GRAD_SCALE,
    LR,
    ROOT_BIAS,
    Rule,
)
from mirrorhead.optim.mirror_descent import cleaned
from mirrorhead.optim.sharded import local, root_mean_squares


class MirrorAdam(MirrorOptimizer):
    r"""Adam's step, taken by the dual variable u = sign(w)|w|^(p-1).

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1-\beta_2) g^2, \\
        u &\leftarrow (1 - \eta\lambda)\, u
            - \eta\, s\, \frac{\hat m}{\sqrt{\hat v} + \epsilon},
            \qquad s = (p-1)\, r^{p-2}, \\
        w &\leftarrow \mathrm{sign}(u)\,|u|^{1/(p-1)}.

    r is the root mean square of the tensor before the first step, so that a weight of
    typical size first moves by about `lr`, as with Adam: learning rates carry over from
    AdamW. p = 2 is AdamW.

    Args:
        params: parameters, named parameters or groups; every option can differ by group.
        lr: learning rate, a number or a tensor of one element.
        p: exponent of the norm, greater than 1.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, and in the dual: 1/(p-1) times as strong in the weights
            as AdamW's. See docs/optimizer.md.
        rms_floor: the least r. Tensors that start at zero take it as their typical size.
        maximize, foreach, fused, keep_dual, stochastic_rounding, error_if_nonfinite: as in
            `MirrorDescent`.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = MirrorAdam(model.parameters(), lr=1e-3, p=1.5)
    >>> model(torch.ones(3)).backward()
    >>> optimizer.step()
    """

    _tensor_state = frozenset({"dual", "wide", "exp_avg", "exp_avg_sq"})
    _scalar_state = frozenset({"step", "rms"})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        p: float = 1.5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        rms_floor: float = 1e-2,
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
        betas = options["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        check_number("betas[0]", betas[0], below=1)
        check_number("betas[1]", betas[1], below=1)
        check_number("eps", options["eps"])
        check_number("rms_floor", options["rms_floor"], low_open=True)

    def _step_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[bool]:
        new = [param for param in params if "rms" not in self.state[param]]
        for param, rms in zip(new, root_mean_squares(new).tolist() if new else [], strict=True):
            self.state[param]["rms"] = torch.tensor(rms, dtype=torch.float64)
            self.state[param]["step"] = torch.tensor(0.0)
        states = [self.state[param] for param in params]
        return mirror_adam(
            [local(param) for param in params],
            grads,
            [None if is_adamw(group["p"], w.dtype) else self._kept(group, w) for w in params],
            [self._buffer(group, param, "exp_avg") for param in params],
            [self._buffer(group, param, "exp_avg_sq") for param in params],
            [state["step"] for state in states],
            rms=[max(float(state["rms"]), group["rms_floor"]) for state in states],
            lr=group["lr"],
            p=group["p"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            fused=group["fused"],
            stochastic_rounding=group["stochastic_rounding"],
            dither=dither_of(group["step"]),
            seed=group["step"],
        )


def is_adamw(p: float, dtype: torch.dtype) -> bool:
    """Whether torch's own AdamW moves the parameter: at p = 2, in full precision."""
    return p == 2 and dtype == wide_dtype(dtype)


def mirror_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    stored: Sequence[Tensor | None],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    rms: Sequence[float],
    lr: float | Tensor,
    p: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float = 0,
    maximize: bool = False,
    foreach: bool | None = None,
    fused: bool | None = None,
    stochastic_rounding: bool = False,
    dither: float = 0.0,
    seed: int = 0,
) -> list[bool]:
    """One step of `MirrorAdam` on plain tensors, in place.

    Returns, for each gradient, whether it was finite; inf and NaN in it counted as 0.

    Args:
        params, grads: the weights and their gradients.
        stored: as in `mirror_descent`.
        exp_avgs, exp_avg_sqs: the moments, zeros at the start, in float32 or better.
        steps: how many steps each weight has taken, as tensors of one element; one is added.
        rms: the typical size r of each weight.
        dither, seed: as in `mirror_descent`.
    """
    how = implementation(foreach, fused)
    rate = float(lr)
    plain = [i for i, w in enumerate(params) if is_adamw(p, w.dtype)]
    finite = [True] * len(params)
    if plain:
        found, clean = cleaned([grads[i] for i in plain])
        for i, ok in zip(plain, found, strict=True):
            finite[i] = ok
        adamw(
            [params[i] for i in plain],
            clean,
            [exp_avgs[i] for i in plain],
            [exp_avg_sqs[i] for i in plain],
            [],
            [steps[i] for i in plain],
            foreach=how == "foreach",
            fused=how == "fused",
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )
    others = [i for i, w in enumerate(params) if not is_adamw(p, w.dtype)]
    if not others:
        return finite
    numbers = []
    for i in others:
        steps[i].add_(1)
        count = float(steps[i])
        scale = (p - 1) * rms[i] ** (p - 2)
        row = {
            LR: rate * scale / (1 - beta1**count),
            DECAY: rate * weight_decay,
            DITHER: dither,
            GRAD_SCALE: -1.0 if maximize else 1.0,
            GAIN1: 1 - beta1,
            BETA2: beta2,
            GAIN2: 1 - beta2,
            EPS: eps,
            ROOT_BIAS: (1 - beta2**count) ** -0.5,
        }
        numbers.append(row_of(row))
    rule = Rule(
        p=p,
        kind="adam",
        storage="primal",
        dtype=torch.float32,
        decay=weight_decay != 0,
        scaled=maximize,
    )
    found = run(
        rule,
        [params[i] for i in others],
        [grads[i] for i in others],
        [stored[i] for i in others],
        [exp_avgs[i] for i in others],
        [exp_avg_sqs[i] for i in others],
        numbers,
        how,
        stochastic_rounding,
        seed,
    )
    for i, ok in zip(others, found, strict=True):
        finite[i] = ok
    return finite
