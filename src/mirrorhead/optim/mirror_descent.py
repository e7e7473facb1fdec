"""Mirror descent: gradients move the weights in the dual of a potential."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mirrorhead._checks import is_number
from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._choice import as_norm, as_potential
from mirrorhead.geometry._powers import dual_exponent
from mirrorhead.geometry.knee import Knee
from mirrorhead.geometry.pnorm import PNorm
from mirrorhead.optim._base import Params, as_geometry
from mirrorhead.optim._batches import Finite, Scales
from mirrorhead.optim._centers import Center, WithCenter
from mirrorhead.optim._options import check_number
from mirrorhead.optim._rule import Group, Method
from mirrorhead.optim._sharded import Number, combine_norms, dual_norms, local
from mirrorhead.optim._tensors import cleaned, wide_dtype
from mirrorhead.optim.directions import gathered

Normalize = Literal["tensor", "global"] | None


class MirrorDescent(WithCenter):
    r"""Mirror descent in the dual of a potential psi, such as the p-norm's.

    .. math::
        u &\leftarrow (1 - \eta\lambda)\, u - \eta\, d, \\
        w &\leftarrow (\nabla\psi)^{-1}(u),

    where u is the gradient of psi at w, eta is `lr`, lambda is `weight_decay` and d is the gradient
    of the loss, or its momentum. For a p-norm, psi(w) = (1/p) sum |w|^p, u = sign(w)|w|^(p-1) and
    w = sign(u)|u|^(1/(p-1)): p = 2 is SGD, to the bit, and p near 1 gives sparse weights. On
    separable data the weights tend to the max-margin direction of `geometry.limit`.

    Args:
        params: parameters, named parameters or groups; every option can differ by group.
        lr: learning rate, a number or a tensor of one element. The default is that of SGD; the best
            rate depends on the geometry (docs/how-to-choose.md).
        geometry: a potential, such as `Schatten(1.2)`, or an exponent p > 1, which stands for the
            p-norm. The default is the paper's.
        momentum: m <- momentum m + g, and d = m.
        weight_decay: decoupled, and applied to u. In a p-norm it acts about 1/(p-1) times as
            strongly as the same number in SGD: multiply your usual value by p - 1.
        normalize: divide the gradient by its dual norm, ||g||_q with q = p/(p-1) for a p-norm, of
            each tensor ("tensor") or of the whole group ("global"). A zero gradient stays zero.
        direction: a norm, or an exponent from 1 to inf: move u along the steepest direction of d in
            this norm instead of d. `inf` is Signum's, `Schatten(inf)` Muon's.
        center: None, "init" (the weights at the first step), or a state dict or list of tensors,
            which are copied. The potential, a p-norm's, is then that of w - center: of all
            solutions, training tends to the one closest to the center. See docs/optimizer.md.
        reach: with `center`, the distance that weights can move from it before the potential is
            rescaled; u is in units of weights.
        nesterov: d = g + momentum m.
        maximize: maximize the objective instead of minimizing it.
        foreach: True for eager torch, with many tensors at a time, False for one by one. The
            default is the C library on a CPU, and many at a time elsewhere.
        fused: True for kernels compiled by torch.compile on a device. On a CPU it is the default.
        keep_dual: for p-norms, keep u (p < 2) or a float32 copy of w (bf16, fp16) as state. False
            keeps neither; with p < 2, weights at 0 then stay at 0.
        stochastic_rounding: round bf16 parameters at random, without bias, in p-norms.
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
    _own_flags = ("nesterov", "keep_dual", "stochastic_rounding")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        geometry: float | Potential = 1.1,
        momentum: float = 0,
        weight_decay: float = 0,
        normalize: Normalize = None,
        *,
        direction: float | Norm | None = None,
        center: Center = None,
        reach: float = 1.0,
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
    def _check_geometry(cls, options: Group) -> None:
        as_potential(options["geometry"], "geometry")
        super()._check_geometry(options)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        check_momentum(options)
        normalize, psi = options["normalize"], as_geometry(options["geometry"])
        if normalize not in (None, "tensor", "global"):
            raise ValueError(f'normalize must be None, "tensor" or "global", got {normalize!r}')
        if normalize == "global" and not isinstance(psi, PNorm):
            raise ValueError(f'normalize="global" needs a p-norm, got {psi!r}: use "tensor"')
        if normalize and not hasattr(psi, "limit"):
            raise TypeError(f"normalize needs a potential with a limit, and {psi!r} has none")
        if options["direction"] is not None:
            as_norm(options["direction"], "direction")
            if options["center"] is not None:
                raise ValueError("direction cannot be used with center: give Centered(...)")

    def _method(self, group: Group) -> Method:
        return momentum_method(group)

    def _potential(self, group: Group, param: Tensor) -> tuple[Potential, float | None]:
        return without_knee(as_geometry(group["geometry"]))

    def _along(self, group: Group) -> Norm | None:
        return as_geometry(group["direction"])

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        momentum = {"momentum_buffer"} if options["momentum"] else set()
        return super()._needed_state(options, param, saved) | momentum

    def _scales(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> tuple[Finite, list[Tensor], Scales]:
        if not group["normalize"]:
            return super()._scales(group, params, grads)
        finite, grads = cleaned(grads)
        geometry = group["geometry"]
        if is_number(geometry):
            q = dual_exponent(geometry)
            norms = dual_norms(params, grads, q)
            if group["normalize"] == "global":
                norms = [combine_norms(norms, q)] * len(params)
        else:
            wide = [g.to(wide_dtype(g.dtype)) for g in grads]
            norms = [
                geometry.limit.dual_norm(gathered(param)[0](g)) if param.numel() else 0.0
                for param, g in zip(params, wide, strict=True)
            ]
        wides = [wide_dtype(local(param).dtype) for param in params]
        return finite, grads, list(map(_inverse, norms, wides))


def check_momentum(options: Group) -> None:
    check_number("momentum", options["momentum"], below=1)
    if options["nesterov"] and not options["momentum"]:
        raise ValueError("nesterov=True needs momentum greater than 0")


def momentum_method(group: Group) -> Method:
    if not group["momentum"]:
        return Method.DESCENT
    return Method.NESTEROV if group["nesterov"] else Method.MOMENTUM


def without_knee(psi: Potential) -> tuple[Potential, float | None]:
    """Return a p-norm with a knee as one whose knee is at 1, and its knee; others as they are."""
    if type(psi) is Knee and type(psi.potential) is PNorm and psi.potential.p < 2:
        return unit_knee(psi.potential), psi.at
    return psi, None


@lru_cache(maxsize=256)
def unit_knee(psi: PNorm) -> Knee:
    """Return a p-norm with a knee at 1, whatever kind of tensors torch makes here."""
    with _disable_current_modes(), torch.device("cpu"):
        return Knee(psi, 1.0)


def _inverse(norm: Number, dtype: torch.dtype) -> Number:
    # A norm of subnormal size has no reciprocal in its dtype: the largest number must do.
    largest = torch.finfo(dtype).max
    if isinstance(norm, Tensor):  # on a device: not read
        return torch.where(norm > 0, (1 / norm).clamp_max(largest), 0.0).to(dtype)
    return min(1 / norm, largest) if norm > 0 else 0.0
