"""Adam around a center: fine-tuning that changes few weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mirrorhead.geometry._base import Potential
from mirrorhead.optim._base import Params, as_geometry
from mirrorhead.optim._centers import Center, WithCenter, full_steps
from mirrorhead.optim._options import check_number
from mirrorhead.optim._rule import Group
from mirrorhead.optim.mirror_adam import MirrorAdam


class CenteredAdam(WithCenter, MirrorAdam):
    r"""Adam in the dual of the p-norm of w - w0: training that stays close to w0.

    .. math::
        u &\leftarrow (1 - \eta\lambda R/N)\, u
            - \eta\, \frac{R}{N} \frac{\hat m}{\sqrt{\hat v} + \epsilon}, \\
        w &\leftarrow w_0 + S\, \mathrm{sign}(u)\,|u/S|^{1/(p-1)}, \qquad S = \max(R, \max |u|).

    u starts at 0, and a weight whose gradient never changes its sign moves by the reach R in the
    whole run. All others move far less, and for p near 1 most of them not at all: they keep the
    bits of w0, in any dtype. No change can explode. See docs/patches.md.

    Args:
        params: parameters, named parameters or groups; every option can differ by group.
        geometry: exponent p > 1.
        reach: R, how far a weight moves if its gradient never changes its sign.
        total_steps: the steps of the run, each counted by its share of the full rate: for linear
            or cosine decay, half of their number. N is the same, but at most 8 times its root,
            since no gradient keeps its sign in a long run.
        lr: the share of the full rate, for learning rate schedulers: it decays from 1. A group
            without a center (`center=None`) is one of `MirrorAdam`, with the usual `lr`.
        center: "init" (the weights at the first step), or a state dict or list of tensors, which
            are copied.
        betas, eps, weight_decay, maximize, foreach, fused, error_if_nonfinite: as in `MirrorAdam`.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> pretrained = model.weight.detach().clone()
    >>> optimizer = CenteredAdam(model.parameters(), 1.5, reach=0.1, total_steps=10)
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(3)).backward()
    ...     optimizer.step()
    >>> (model.weight.detach() - pretrained).abs().max()  # this gradient never changed its sign
    tensor(0.1000)
    """

    _tensor_state = MirrorAdam._tensor_state | {"center"}
    _scalar_state = MirrorAdam._scalar_state | {"scale"}
    _own_option = "total_steps"

    def __init__(
        self,
        params: Params,
        geometry: float | Potential = 1.1,
        *,
        reach: float | None = None,
        total_steps: float | None = None,
        lr: float | Tensor = 1.0,
        center: Center = "init",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        error_if_nonfinite: bool = True,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        options |= {"knee": 1.0, "rms_floor": None, "keep_dual": True, "stochastic_rounding": False}
        WithCenter.__init__(self, params, options)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        if options["total_steps"] is not None:
            check_number("total_steps", options["total_steps"], positive=True)

    def _take_group(self, group: Group) -> None:
        for name in ("reach", "total_steps"):
            if group["center"] is not None and group[name] is None:
                raise TypeError(f"CenteredAdam needs {name}, or in each group with a center")
        super()._take_group(group)

    def _speed(self, group: Group, param: Tensor, psi: Potential, knee: float | None) -> float:
        if group["center"] is None:
            return super()._speed(group, param, psi, knee)
        return group["reach"] / full_steps(group["total_steps"])

    def _potential(self, group: Group, param: Tensor) -> tuple[Potential, float | None]:
        psi, knee = super()._potential(group, param)
        return (psi, knee) if group["center"] is None else (as_geometry(group["geometry"]), None)
