"""Adam in the dual of a potential."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mirrorhead._checks import is_number
from mirrorhead.geometry._base import Potential, Separable
from mirrorhead.geometry._choice import as_potential
from mirrorhead.optim._base import GeometryOptimizer, Params, as_geometry
from mirrorhead.optim._native import exponent_of
from mirrorhead.optim._options import check_number
from mirrorhead.optim._rule import Group, Method
from mirrorhead.optim._sharded import root_mean_squares
from mirrorhead.optim._tensors import number, wide_dtype
from mirrorhead.optim.mirror_descent import unit_knee, without_knee

_SMALLEST_SIZE = 1e-3  # r of a trained tensor; that of a smaller one says nothing about its weights


class MirrorAdam(GeometryOptimizer):
    r"""Adam in the dual of the p-norm: the step updates u = sign(w)|w|^(p-1) instead of w.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1-\beta_2) g^2, \\
        u &\leftarrow (1 - \eta\lambda)\, u
            - \eta\, s\, \frac{\hat m}{\sqrt{\hat v} + \epsilon},
            \qquad s = (p-1)\, r^{p-2}, \\
        w &\leftarrow \mathrm{sign}(u)\,|u|^{1/(p-1)}.

    r is the root mean square of the tensor before its first step; a tensor with inf or NaN is
    refused there. For p < 2 the potential is quadratic beyond |w| = `knee` r. With the default knee
    a step moves a weight by about

    .. math:: \eta\, \min(1, |w|/r)^{2-p}

    times Adam's direction. Weights of size r and above move exactly as far as with AdamW, and
    smaller ones less. No weight moves further than with AdamW, so a learning rate that is safe
    with AdamW is safe for every p below 2. docs/optimizer.md has losses by p and learning rate.
    For p < 2 a tensor that starts at zero (LoRA's second factor, biases) moves as with AdamW,
    whatever `knee` is. p = 2 is AdamW.

    With the knee, p shapes the path of training but not its limit. Where weights grow without
    bound, they end where AdamW's do, near the largest margin in the maximum norm. After 5,000
    steps on separable linear data, p = 1.1 has 0.55, 0.78 and 0.96 of the largest margin in l1.1,
    l2 and the maximum norm. AdamW has the same, and `knee=None` 0.95, 0.76 and 0.28
    (docs/optimizer.md). For the limit in the p-norm use `MirrorDescent` or `knee=None`.

    Args:
        params: parameters, named parameters or groups; every option can differ by group.
        lr: learning rate, a number or a tensor of one element.
        geometry: a potential, such as `Schatten(1.2)`, or an exponent p > 1, which stands for the
            p-norm. The default is not `MirrorDescent`'s 1.1, which is the paper's: this class
            replaces AdamW, and at 1.5 its accuracy on IMDb was AdamW's. For a potential that is
            not a p-norm, s is its curvature at r, and there is no knee.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, and applied to u. It acts up to 1/(p-1) times as strongly as
            AdamW's: multiply your usual value by p - 1.
        knee: where the potential becomes quadratic, in units of r, for p < 2. The largest weights
            move by about eta max(knee, 1)^(2-p). None keeps the pure power |w|^p, and so the bias
            to the p-norm in the limit. The larger a weight, the faster it then moves, and at
            p = 1.1 a learning rate of 3e-3 can be too large. A tensor with r < 1e-3 has its knee
            at r whatever is given: it has no typical size yet.
        rms_floor: the smallest r. The default is 1e-8 for p < 2, with which a tensor at zero
            moves as with AdamW, and 1e-2 for p > 2. From 1e-3 on, a tensor at zero has the knee
            that is given; with `knee=None` it then moves by the pure power.
        maximize, foreach, fused, keep_dual, stochastic_rounding, error_if_nonfinite: as in
            `MirrorDescent`.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = MirrorAdam(model.parameters(), lr=1e-3, geometry=1.5)
    >>> model(torch.ones(3)).backward()
    >>> optimizer.step()
    """

    _tensor_state = frozenset({"dual", "wide", "exp_avg", "exp_avg_sq"})
    _scalar_state = frozenset({"step", "rms"})
    _own_option = "betas"
    _own_flags = ("keep_dual", "stochastic_rounding")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        geometry: float | Potential = 1.5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        knee: float | None = 1.0,
        rms_floor: float | None = None,
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

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        betas = options["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        check_number("betas[0]", betas[0], below=1)
        check_number("betas[1]", betas[1], below=1)
        check_number("eps", options["eps"])
        for name in ("knee", "rms_floor"):
            if options[name] is not None:
                check_number(name, options[name], positive=True)

    def _method(self, group: Group) -> Method:
        return Method.ADAM

    def _potential(self, group: Group, param: Tensor) -> tuple[Potential, float | None]:
        psi = as_geometry(group["geometry"])
        if is_number(group["geometry"]) and psi.p < 2:
            rms, knee = self._rms(group, param), group["knee"]
            # Beyond the knee a weight moves by lr knee^(2-p), without one by lr (|w|/r)^(2-p). So
            # the knee of a tensor that has no size yet must be at r: a bias at 0 would be at 1e32
            # after one step.
            knee = 1.0 if rms < _SMALLEST_SIZE else knee
            if knee is not None:
                return unit_knee(psi), knee * rms
        return without_knee(psi)

    def _speed(self, group: Group, param: Tensor, psi: Potential, knee: float | None) -> float:
        rms, p = self._rms(group, param), exponent_of(psi)
        if p is None:
            return speed(psi, rms, tuple(param.shape))
        result = (p - 1) * rms ** (p - 2)
        wide, rate = wide_dtype(param.dtype), self._checked[id(group)][2]
        if rate and param.numel() and rate * result < torch.finfo(wide).tiny:
            warnings.warn(
                f"p={p:g} with weights of about {rms:.1g} (shape {tuple(param.shape)}): the step in"
                f" the dual, {rate * result:.0e}, is 0 in {wide}, so they do not move. Use a"
                " smaller p, or float64",
                stacklevel=2,
            )
        return result

    def _prepare_state(self, group: Group, params: list[Tensor]) -> None:
        new = [param for param in params if self.state.get(param, {}).get("rms") is None]
        sizes = root_mean_squares(new)
        for param, rms in zip(new, sizes, strict=True):
            if not math.isfinite(rms):
                raise RuntimeError(
                    f"{self._name(group, param)} has the root mean square {rms}: its weights and"
                    " their squares must be finite. Nothing has moved"
                )
        if new:
            self._warn_of_unused(group)
        for param, rms in zip(new, sizes, strict=True):
            state = self.state[param]
            state["rms"] = torch.tensor(rms, dtype=torch.float64, device="cpu")
            state.setdefault("step", torch.tensor(0.0, device="cpu"))

    def _warn_of_unused(self, group: Group) -> None:
        # Before the first step, not earlier: options can be set in a group that is there already.
        exponents = [one["geometry"] for one in self.param_groups if is_number(one["geometry"])]
        if group["knee"] not in (None, 1) and exponents and min(exponents) > 2:
            warnings.warn(f"knee={group['knee']:g} has no effect for p > 2", stacklevel=2)

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        moments = {"step", "exp_avg", "exp_avg_sq"}
        if "rms" in saved and saved["rms"] is None:  # of AdamW: no step was ours yet
            return moments
        return super()._needed_state(options, param, saved) | moments | {"rms"}

    def _rms(self, group: Group, param: Tensor) -> float:
        floor = group["rms_floor"]
        if floor is None:
            p = group["geometry"]
            floor = 1e-8 if is_number(p) and p < 2 else 1e-2
        return max(number(self.state[param]["rms"]), floor)

    def _translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Accept checkpoints of torch's AdamW, and those of versions before the knee."""
        groups, decays, state = [], [], dict(state_dict["state"])
        for k, saved in enumerate(state_dict["param_groups"]):
            if "geometry" in saved:
                groups.append({**saved, "knee": saved.get("knee")} if "betas" in saved else saved)
                continue
            if not {"betas", "eps", "amsgrad"} <= saved.keys() or k >= len(self.param_groups):
                groups.append(saved)
                continue
            coupled = saved["weight_decay"] and not saved.get("decoupled_weight_decay", True)
            if saved["amsgrad"] or coupled:
                raise ValueError(
                    f"state_dict group {k} is of Adam with"
                    f" {'amsgrad' if saved['amsgrad'] else 'l2 weight decay'},"
                    " which MirrorAdam does not have: only AdamW's can be loaded"
                )
            mine = {name: self.param_groups[k][name] for name in self.defaults}
            taken = ("lr", "betas", "eps", "weight_decay", "maximize")
            taken += ("params", "param_names", "initial_lr")
            theirs = {name: saved[name] for name in taken if name in saved}
            if mine["geometry"] != 2 and saved["weight_decay"] != mine["weight_decay"]:
                decays.append(f"{saved['weight_decay']:g} (group {k}) for {mine['weight_decay']:g}")
            entries = {i: state[i] for i in saved["params"] if i in state}
            counts = (float(entry.get("step", 0)) for entry in entries.values())
            step = max(map(int, filter(math.isfinite, counts)), default=0)
            state.update({i: {**entry, "rms": None} for i, entry in entries.items()})
            groups.append({**mine, **theirs, "step": step})
        if decays:
            warnings.warn(
                f"the state_dict of AdamW replaces weight_decay: {', '.join(decays)}. It acts up to"
                " 1/(p-1) times as strongly here: set the groups' weight_decay again",
                stacklevel=6,
            )
        return {**state_dict, "param_groups": groups, "state": state}


@lru_cache(maxsize=1024)
def speed(psi: Potential, rms: float, shape: tuple[int, ...]) -> float:
    """Return how far u moves when weights of typical size `rms` move by 1, along themselves."""
    if isinstance(psi, Separable):
        return float(psi.curvature(torch.tensor(rms, dtype=torch.float64)))
    generator = torch.Generator("cpu").manual_seed(0)
    w = rms * torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    apart = psi.lift(1.001 * w) - psi.lift(0.999 * w)
    size = float(torch.linalg.vector_norm(w))
    found = float(torch.linalg.vector_norm(apart)) / (0.002 * size) if size else 1.0
    return found if 0 < found < math.inf else 1.0
