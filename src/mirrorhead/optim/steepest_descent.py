"""Steepest descent in any norm: sign descent, normalized SGD, coordinate descent, Muon."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._choice import as_norm
from mirrorhead.geometry.pnorm import PNorm
from mirrorhead.optim._base import GeometryOptimizer, Params, as_geometry
from mirrorhead.optim._options import check_number
from mirrorhead.optim._rule import Group, Method
from mirrorhead.optim.mirror_descent import check_momentum, momentum_method


class SteepestDescent(GeometryOptimizer):
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
        check_momentum(options)
        if options["match_rms"] is not None:
            check_number("match_rms", options["match_rms"], positive=True)

    @classmethod
    def _check_geometry(cls, options: Group) -> None:
        as_norm(options["geometry"], "geometry")

    def _method(self, group: Group) -> Method:
        return momentum_method(group)

    def _potential(self, group: Group, param: Tensor) -> tuple[Potential, float | None]:
        return PNorm(2), None

    def _along(self, group: Group) -> Norm | None:
        return as_geometry(group["geometry"])

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        momentum = {"momentum_buffer"} if options["momentum"] else set()
        return super()._needed_state({**options, "geometry": 2.0}, param, saved) | momentum
