"""Adam in the dual of the p-norm, as a torch optimizer and as a function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mirrorhead._checks import is_number
from mirrorhead.geometry._base import Potential
from mirrorhead.optim._any_geometry import speed
from mirrorhead.optim._base import Center, MirrorOptimizer, Params, check_number
from mirrorhead.optim._formula import Hyper, Method, Storage, UpdateRule
from mirrorhead.optim._param_state import number, readable
from mirrorhead.optim._sharded import root_mean_squares
from mirrorhead.optim._step import Group, StepPlan, knee_numbers, wide_dtype
from mirrorhead.optim.directions import adam


class MirrorAdam(MirrorOptimizer):
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
        center: None, "init" (the weights at the first step), or a state dict or list of tensors,
            which are copied. The potential is then that of w - center, so training stays close to
            the center in the p-norm, and few weights change. `lr` is then the *reach*: how far a
            weight moves in the whole run if its gradient never changes sign. See
            docs/optimizer.md.
        steps: the number of steps at full learning rate, required with `center`. It is the length
            of the run for a constant rate, and half of it for linear or cosine decay, but at most
            about 8 times its root: in long runs no gradient keeps its sign.
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

    _tensor_state = frozenset({"dual", "wide", "center", "exp_avg", "exp_avg_sq"})
    _scalar_state = frozenset({"step", "rms", "scale"})
    _own_option = "betas"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        geometry: float | Potential = 1.5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        center: Center = None,
        steps: float | None = None,
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
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        betas = options["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        check_number("betas[0]", betas[0], below=1)
        check_number("betas[1]", betas[1], below=1)
        check_number("eps", options["eps"])
        if options["center"] is not None and options["steps"] is None:
            raise ValueError(
                "center needs steps, the number of steps at full learning rate (half of the run"
                " for linear or cosine decay)"
            )
        for name in ("steps", "knee", "rms_floor"):
            if options[name] is not None:
                check_number(name, options[name], positive=True)

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
        # Before the first step, not earlier: a center can be set in a group that is there already.
        groups, steps, knee = self.param_groups, group["steps"], group["knee"]
        if steps is not None and all(one["center"] is None for one in groups):
            warnings.warn(f"steps={steps:g} has no effect without center", stacklevel=2)
        exponents = [one["geometry"] for one in groups if is_number(one["geometry"])]
        if knee not in (None, 1) and exponents and min(exponents) > 2:
            warnings.warn(f"knee={knee:g} has no effect for p > 2", stacklevel=2)

    def _is_plain(self, group: Group, param: Tensor) -> bool:
        return is_adamw(group["geometry"], param.dtype)

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        moments = {"step", "exp_avg", "exp_avg_sq"}
        if "rms" in saved and saved["rms"] is None:  # of AdamW: no step was ours yet
            return moments
        return super()._needed_state(options, param, saved) | moments | {"rms"}

    def _direction(self, group: Group, param: Tensor, g: Tensor) -> Tensor:
        m, v = (self._buffer(param, name, g.dtype) for name in ("exp_avg", "exp_avg_sq"))
        count = self.state[param]["step"].add_(1)
        eps = max(group["eps"], torch.finfo(torch.float32).tiny)
        return adam(g, m, v, *group["betas"], eps, float(count))

    def _speed(self, group: Group, param: Tensor) -> float:
        return speed(group["geometry"], self._rms(group, param), tuple(param.shape))

    def _plan(self, group: Group, params: list[Tensor], options: dict[str, Any]) -> StepPlan:
        if options["centered"]:
            options["lr"] /= group["steps"]
        return plan_adam(
            exp_avgs=self._buffers(group, params, "exp_avg"),
            exp_avg_sqs=self._buffers(group, params, "exp_avg_sq"),
            steps=[self.state[param]["step"] for param in params],
            rms=[self._rms(group, param) for param in params],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            knee=group["knee"],
            **options,
        )

    def _reach(self, options: dict[str, Any]) -> float:
        lr = float(options["lr"])
        full = float(options.get("max_lr", options.get("initial_lr", lr)))
        if lr != full:
            raise ValueError(
                f"lr is the reach of a group with a center, and a scheduler has set it to {lr:g} on"
                f" its way from or to {full:g}: set the center before the scheduler is made, or set"
                " the group's 'reach', how far a weight moves in the whole run if its gradient"
                " never changes sign"
            )
        check_number("lr, the reach of a group with a center,", lr, positive=True)
        return lr

    def _rms(self, group: Group, param: Tensor) -> float:
        floor = group["rms_floor"]
        if floor is None:
            p = group["geometry"]
            floor = 1e-8 if is_number(p) and p < 2 else 1e-2
        return max(number(self.state[param]["rms"]), floor)

    def _mirror(self, group: Group, param: Tensor, weight: Tensor) -> Tensor:
        p = group["geometry"]
        numbers = knee_numbers(p, group["knee"], self._rms(group, param))
        rule = UpdateRule(p, Method.ADAM, Storage.PRIMAL, weight.dtype, knee=bool(numbers))
        return rule.mirror(weight, Hyper(lr=0.0, **numbers))

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


def is_adamw(p: float, dtype: torch.dtype) -> bool:
    """Return whether torch's own AdamW moves the parameter: at p = 2, in full precision."""
    return p == 2 and dtype == wide_dtype(dtype)


def mirror_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    stored: Sequence[Tensor | None],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    **options: Any,
) -> list[bool]:
    """Take one step of `MirrorAdam` on plain tensors, in place.

    Return, for each gradient, whether it was finite; inf and NaN in it count as 0.

    Args:
        params, grads: the weights and their gradients.
        stored: as in `mirror_descent`.
        exp_avgs, exp_avg_sqs: the moments, zeros at the start, in float32 or better.
        steps: how many steps each weight has taken, as tensors of one element; one is added.
        options: those of `plan_adam` and `StepPlan`; lr and p are required.
    """
    grads = [readable(g, w) for g, w in zip(grads, params, strict=True)]
    plan = plan_adam(params, grads, stored, exp_avgs, exp_avg_sqs, steps, **options)
    return plan.run_checked()


def plan_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    stored: Sequence[Tensor | None],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    rms: Sequence[float],
    beta1: float,
    beta2: float,
    eps: float,
    knee: float | None = None,
    **options: Any,
) -> StepPlan:
    """Plan one step of `mirror_adam`; nothing moves before the plan is run.

    Args:
        rms: the typical size r of each weight. Where the plan is centered it does not count, and
            neither does the knee.
        options: those of `StepPlan`.
    """
    plan = StepPlan(Method.ADAM, params, grads, stored, **options)
    eps = max(eps, torch.finfo(torch.float32).tiny)  # 0/0 is not a number: no gradient, no step
    p, rate, centered = plan.p, plan.rate, plan.centered
    plan.plain = [i for i, w in enumerate(params) if is_adamw(p, w.dtype) and not centered]

    def torch_step(plan: StepPlan, weights: list[Tensor], clean: list[Tensor]) -> None:
        ms, vs, counts = ([of[i] for i in plan.plain] for of in (exp_avgs, exp_avg_sqs, steps))
        own = plan.torch_options(weights, clean, ms, vs)
        own |= {"beta1": beta1, "beta2": beta2, "eps": eps, "amsgrad": False}
        adamw(weights, clean, ms, vs, [], counts, weight_decay=plan.weight_decay, **own)

    plan.torch_step = torch_step
    fixed = {"gain1": 1 - beta1, "beta2": beta2, "gain2": 1 - beta2, "eps": eps}
    fixed["grad_scale"] = -1.0 if plan.maximize else 1.0
    for i, w in enumerate(params):
        if i in plan.plain:
            continue
        count = number(steps[i], missing=0.0) + 1
        scale = 1.0 if centered else (p - 1) * rms[i] ** (p - 2)  # s
        wide = wide_dtype(w.dtype)
        if rate and w.numel() and rate * scale < torch.finfo(wide).tiny:
            warnings.warn(
                f"p={p:g} with weights of about {rms[i]:.1g} (shape {tuple(w.shape)}): the step in"
                f" the dual, {rate * scale:.0e}, is 0 in {wide}, so they do not move. Use a"
                " smaller p, or float64",
                stacklevel=2,
            )
        numbers = {} if centered else knee_numbers(p, knee, rms[i])
        numbers["lr"] = rate * scale / (1 - beta1**count)
        numbers["root_bias"] = (1 - beta2**count) ** -0.5
        plan.add(i, exp_avgs[i], exp_avg_sqs[i], scale, **numbers, **fixed)
        plan.counters.append(steps[i])
    return plan
