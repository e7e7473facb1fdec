"""Steepest descent in any norm: sign descent, normalized SGD, coordinate descent, Muon."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mirrorhead.geometry._base import Norm
from mirrorhead.geometry._choice import as_norm
from mirrorhead.optim._any_geometry import AnyPlan, move_steepest
from mirrorhead.optim._base import MirrorOptimizer, Params, as_geometry
from mirrorhead.optim._options import check_number
from mirrorhead.optim._step import Group, StepPlan, wide_dtype
from mirrorhead.optim.directions import momentum


class SteepestDescent(MirrorOptimizer):
    r"""Steps of length `lr` in a norm, along the direction that gains most in it.

    .. math::
        m &\leftarrow \mu m + g, \qquad d = m \text{ or, with Nesterov's momentum, } g + \mu m, \\
        w &\leftarrow (1 - \eta\lambda)\, w
            - \eta \mathrm{arg\,max}_{\|s\| \le 1} \langle d, s \rangle.

    | geometry | known as |
    | --- | --- |
    | `PNorm(inf)`, or `inf` | sign descent; with momentum Signum |
    | `PNorm(2)` | normalized SGD |
    | `PNorm(1)` | greedy coordinate descent |
    | `Schatten(inf)` | spectral descent; with momentum Muon, with an exact polar factor |
    | `Schatten(inf, newton_schulz=5)` | the same by Muon's Newton-Schulz steps: much faster |
    | `Grouped(inf, dim=0)` | normalized rows |

    On separable data the weights tend to the max-margin direction of the norm. Each tensor is
    normalized by itself. Matrices that FSDP2 spreads over processes are gathered for the step.

    Args:
        params: parameters, named parameters or groups; every option can differ by group.
        lr: learning rate, a number or a tensor of one element: the length of a step in the norm.
        geometry: a norm, or an exponent p from 1 to inf, which stands for the p-norm. Schatten
            norms take matrices: `matrix_param_groups` puts them in a group of their own.
        momentum: m <- momentum m + g.
        nesterov: d = g + momentum m.
        weight_decay: decoupled, as in AdamW.
        match_rms: scale the step of each tensor to this root mean square, so that one `lr` suits
            all shapes. 0.2 is that of AdamW, so AdamW's learning rates carry over; it is Muon's
            `adjust_lr_fn="match_rms_adamw"`.
        maximize: maximize the objective instead of minimizing it.
        error_if_nonfinite: as in `MirrorDescent`.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2, bias=False)
    >>> optimizer = SteepestDescent(model.parameters(), lr=0.02, geometry=float("inf"))
    >>> before = model.weight.detach().clone()
    >>> model(torch.ones(3)).sum().backward()
    >>> optimizer.step()
    >>> torch.allclose(model.weight, before - 0.02)
    True
    """

    _tensor_state = frozenset({"wide", "momentum_buffer"})
    _scalar_state = frozenset()
    _own_option = "match_rms"
    _own_flags = ("nesterov",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        geometry: float | Norm = math.inf,
        momentum: float = 0,
        weight_decay: float = 0,
        *,
        nesterov: bool = False,
        match_rms: float | None = None,
        maximize: bool = False,
        error_if_nonfinite: bool = True,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        super().__init__(params, options)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        check_number("momentum", options["momentum"], below=1)
        if options["match_rms"] is not None:
            check_number("match_rms", options["match_rms"], positive=True)
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("nesterov=True needs momentum greater than 0")

    @classmethod
    def _check_geometry(cls, options: dict[str, Any]) -> None:
        as_norm(options["geometry"], "geometry")

    def _direction(self, group: Group, param: Tensor, g: Tensor) -> Tensor:
        if not group["momentum"]:
            return g
        m = self._buffer(param, "momentum_buffer", g.dtype)
        return momentum(g, m, group["momentum"], group["nesterov"])

    def _any_plan(self, group: Group, params: list[Tensor]) -> AnyPlan:
        norm, rate = as_geometry(group["geometry"]), self._rate(group)

        def move(param: Tensor, d: Tensor) -> None:
            copy, wide = None, wide_dtype(param.dtype)
            if wide != param.dtype:
                state = self.state[param]
                copy = state["wide"] = state.get("wide", param.detach().to(wide))
            decay = rate * group["weight_decay"]
            move_steepest(param, copy, d, norm, rate, decay, group["match_rms"])

        return AnyPlan(group, params, lambda param, g: self._direction(group, param, g), move)

    def _is_plain(self, group: Group, param: Tensor) -> bool:
        return False

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        wide = {"wide"} if param.dtype != wide_dtype(param.dtype) else set()
        return wide | ({"momentum_buffer"} if options["momentum"] else set())

    def _keeps_wide(self, options: Group, param: Tensor) -> bool:
        return False

    def _plan(self, group: Group, params: list[Tensor], options: dict[str, Any]) -> StepPlan:
        raise NotImplementedError
