"""What MirrorDescent and MirrorAdam share: checks, state, checkpoints, the order of a step."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead._checks import is_number
from mirrorhead.geometry import PNorm
from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._choice import as_potential, describe
from mirrorhead.geometry._powers import signed_power
from mirrorhead.optim._any_geometry import AnyPlan, move_mirror
from mirrorhead.optim._cached_plan import CachedPlan, can_be_kept, identical, option_values
from mirrorhead.optim._centered import CenteredPlan, first_scale, like_param, matched_centers
from mirrorhead.optim._checkpoints import check_complete, check_scalar, check_tensor, placed
from mirrorhead.optim._native import Checksums
from mirrorhead.optim._options import (
    FOREIGN,
    check_number,
    check_one_element,
    plain_numbers,
    with_tensors,
    without_foreign,
)
from mirrorhead.optim._param_state import has_values, number, waits, zeros_like_param
from mirrorhead.optim._sharded import all_finite, all_true, local, local_gradient
from mirrorhead.optim._step import Group, Implementation, StepPlan, dither_of, wide_dtype

Center = Literal["init"] | Mapping[str, Tensor] | Sequence[Tensor] | None
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Plan = StepPlan | CenteredPlan | CachedPlan | AnyPlan

_CENTER = 'center must be None, "init", a state dict or a list of tensors'


class MirrorOptimizer(Optimizer):
    """An optimizer that moves parameters in the dual of a p-norm; see its subclasses."""

    _tensor_state: frozenset[str]  # state with a number for every weight
    _scalar_state: frozenset[str]  # all other state
    _own_option: str  # that other optimizers do not have: it tells whose checkpoint one is
    _own_flags: tuple[str, ...] = ()  # options of a subclass that are True or False

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        defaults = plain_numbers(defaults)
        self.check_options(defaults)
        given: Any = params if isinstance(params, Tensor) else _listed(params)
        if isinstance(given, list) and not given:
            raise ValueError("params is an empty list: give the parameters to optimize")
        self._checked: dict[int, list[Any]] = {}
        self._rates: dict[int, tuple[float | None, float]] = {}  # see _check_changed_options
        self._centers: dict[Tensor, Tensor] = {}  # given by the caller, until the first step
        self._checksums: dict[Tensor, Checksums] = {}
        self._plans: dict[int, CachedPlan] = {}  # by id of the group
        self._written_in: dict[Tensor, Potential] = {}  # the potential of the last step
        super().__init__(given, defaults)
        if self._is_given(defaults.get("center")):
            self.defaults["center"] = None  # the groups have what was given

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, with any option of the constructor as its own, p included."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        param_group.update(plain_numbers(param_group))
        self._check_group(len(self.param_groups), {**self.defaults, **param_group})
        without_foreign(param_group)
        params = param_group["params"]
        params = param_group["params"] = [params] if isinstance(params, Tensor) else _listed(params)
        for entry in params:
            param = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(param, Tensor) and not param.is_floating_point():
                raise TypeError(
                    f"parameters must be real floating point tensors, got {param.dtype}"
                    " (a complex parameter can be given as torch.view_as_real of it)"
                )
            if isinstance(param, Tensor) and param.dtype.itemsize < 2:
                raise TypeError(
                    f"parameters must have 16 bits or more, got {param.dtype}: train a copy in"
                    " bfloat16 or float32"
                )
        if param_group.get("center", self.defaults.get("center")) == "given":
            raise ValueError(_CENTER)
        super().add_param_group({"step": 0, **param_group})
        try:
            self._check_fit(self.param_groups[-1])
            self._take_center(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _check_fit(self, group: Group) -> None:
        """Refuse parameters that the geometries of their group cannot measure."""
        for geometry in (group["geometry"], group.get("direction")):
            if isinstance(geometry, Norm | Potential):
                for param in group["params"]:
                    geometry.check(param.shape, self._name(group, param).rstrip(","))

    def _check_group(self, number: int, options: Group) -> None:
        """Check the options of a group; an error names the group."""
        try:
            self.check_options(options)
        except (TypeError, ValueError) as error:
            name = f" {options['name']!r}" if "name" in options else ""
            raise type(error)(f"param group {number}{name}: {error}") from None

    def _reach(self, options: Group) -> float:
        """Return how far the weights of a centred group can move before S grows."""
        return 1.0

    @classmethod
    def _check_geometry(cls, options: Group) -> None:
        psi = as_potential(options["geometry"], "geometry")
        if options["center"] is not None and not isinstance(psi, PNorm):
            raise ValueError(f"center needs a p-norm, got geometry={psi!r}: give Centered(...)")

    @staticmethod
    def _is_given(center: Any) -> bool:
        return center is not None and not isinstance(center, str)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Raise on the first option that has no meaning, naming it."""
        cls._check_geometry(options)
        lr = options["lr"]
        if isinstance(lr, Tensor):
            check_one_element("lr", lr)
        if not isinstance(lr, Tensor) or has_values(lr):
            check_number("lr", lr.item() if isinstance(lr, Tensor) else lr)
        check_number("weight_decay", options["weight_decay"])
        flags = ("maximize", "keep_dual", "stochastic_rounding", "error_if_nonfinite")
        for name in (*flags, *cls._own_flags):
            has = name in cls.__init__.__code__.co_varnames
            if has and not isinstance(options[name], bool):
                raise TypeError(f"{name} must be True or False, got {options[name]!r}")
        for name in ("foreach", "fused"):
            if options.get(name) not in (None, True, False):
                raise TypeError(f"{name} must be True, False or None, got {options[name]!r}")
        center = options.get("center")
        if isinstance(center, str) and center not in ("init", "given"):
            raise ValueError(f"{_CENTER}, got {center!r}")
        if cls._is_given(center) and (isinstance(center, Tensor) or not hasattr(center, "__len__")):
            raise TypeError(f"{_CENTER}, got {type(center).__name__}")
        if center is not None and options["stochastic_rounding"]:
            raise ValueError(
                "stochastic_rounding cannot be used with center: unchanged weights would not keep"
                " the bits of the center"
            )
        if center is not None and not options["keep_dual"]:
            raise ValueError("keep_dual=False cannot be used with center, which needs its state")
        if options.get("foreach") and options.get("fused"):
            raise ValueError("foreach and fused cannot both be True: choose one implementation")
        for name in FOREIGN:
            if options.get(name):
                raise TypeError(f"{name}=True is not supported by {cls.__name__}: leave it out")

    # torch.compile(optimizer.step) would break the graph at every number that is read. Our own
    # kernels are compiled already, so the step runs as it is.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step. `closure` re-evaluates the model and returns the loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        # State made in inference mode could not be changed outside of it, nor can such weights.
        params = (param for group in self.param_groups for param in group["params"])
        with torch.inference_mode(any(map(Tensor.is_inference, params))), torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        # Everything that can fail comes first; then all groups move.
        steps = self._planned()
        for _, _, plan in steps:
            if isinstance(plan, StepPlan):
                plan.prepare()
        checked: list[tuple[Group, Tensor, bool | Tensor]] = []
        newly_planned: list[Tensor] = []
        for group, params, plan in steps:
            group["step"] += 1
            finite = plan.run()
            if not isinstance(plan, CachedPlan):
                finite = all_finite(params, finite)
                newly_planned += params
                self._plans.pop(id(group), None)
                if isinstance(plan, StepPlan) and can_be_kept(plan, group, params, self.state):
                    kept = CachedPlan(group, params, plan, self.state, self._checksums)
                    self._plans[id(group)] = kept
            if group["error_if_nonfinite"]:
                checked += [(group, q, ok) for q, ok in zip(params, finite, strict=True)]
        if self.state:  # torch's distributed checkpoint wants an entry for all or for none
            for param in newly_planned:
                self.state.setdefault(param, {})
        if not all_true([ok for _, _, ok in checked]):
            bad = [(group, param) for group, param, ok in checked if not ok]
            raise RuntimeError(self._nonfinite_message(bad))

    def _planned(self) -> list[tuple[Group, list[Tensor], Plan]]:
        """Check all groups. Return those that have gradients, the weights to move, and how."""
        for position, group in enumerate(self.param_groups):
            self._check_changed_options(group, position)
        steps: list[tuple[Group, list[Tensor], CachedPlan | None]] = []
        for group in self.param_groups:
            plan = self._plans.get(id(group))
            if plan and plan.refreshed(group, self._rate(group), self.state, self._checksums):
                steps.append((group, plan.params, plan))
            elif params := [param for param in group["params"] if param.grad is not None]:
                for param in params:
                    self._check_shapes(group, param)
                steps.append((group, params, None))
        return [(group, q, plan or self._new_plan(group, q)) for group, q, plan in steps]

    def _new_plan(self, group: Group, params: list[Tensor]) -> StepPlan | CenteredPlan | AnyPlan:
        """Plan the next step of one group, and make the state that is missing."""
        if "center" not in group or group.get("direction") or not is_number(group["geometry"]):
            self._prepare_state(group, params)
            return self._any_plan(group, params)
        centered = group["center"] is not None
        names = ("weight_decay", "maximize", "foreach", "fused", "stochastic_rounding")
        options = {"lr": self._rate(group), **{name: group[name] for name in names}}
        options["p"] = group["geometry"]
        options["params"] = [local(param) for param in params]
        options["grads"] = [local_gradient(param) for param in params]
        self._prepare_state(group, params)
        if centered:
            self._place_centers(group, params)
        options["stored"] = [self._stored(group, param) for param in params]
        options["checksums"] = [self._checksums.setdefault(param, Checksums()) for param in params]
        step = group["step"] + 1
        options |= {"centered": centered, "dither": dither_of(step), "seed": step}
        plan = self._plan(group, params, options)
        if not centered:
            return plan
        return CenteredPlan(plan, params, [self.state[param] for param in params], group["reach"])

    def _prepare_state(self, group: Group, params: list[Tensor]) -> None:
        """Measure weights before their first step, if the optimizer needs it."""

    def _any_plan(self, group: Group, params: list[Tensor]) -> AnyPlan:
        psi, rate = as_geometry(group["geometry"]), self._rate(group)

        def move(param: Tensor, d: Tensor) -> None:
            before, state = self._written_in.get(param, psi), self.state[param]
            if "dual" not in state:
                wide = wide_dtype(param.dtype)
                state["dual"] = psi.lift(param.detach().to(wide)).to(wide).clone()
            lr, decay = rate * self._speed(group, param), rate * group["weight_decay"]
            move_mirror(param, state["dual"], d, psi, before, lr, decay)
            self._written_in[param] = psi

        return AnyPlan(group, params, lambda param, g: self._direction(group, param, g), move)

    def _speed(self, group: Group, param: Tensor) -> float:
        """Return what lr is multiplied by in the dual."""
        return 1.0

    @abstractmethod
    def _direction(self, group: Group, param: Tensor, g: Tensor) -> Tensor:
        """Return the direction of the step of one parameter, given its gradient."""

    @abstractmethod
    def _is_plain(self, group: Group, param: Tensor) -> bool:
        """Return whether torch's own optimizer moves the parameter, unless it has a center."""

    @abstractmethod
    def _plan(self, group: Group, params: list[Tensor], options: dict[str, Any]) -> StepPlan:
        """Plan the next step of one group, given what both optimizers hand to their plans."""

    def _place_centers(self, group: Group, params: list[Tensor]) -> None:
        """Make w0 and S of the weights of a centred group where they are missing."""
        elsewhere = []  # weights that do not start at their center
        for param in params:
            state = self.state[param]
            if "center" in state:
                continue
            given = self._centers.pop(param, None)
            if given is None and group["center"] == "given":
                raise RuntimeError(
                    f"the center of {self._name(group, param)} is missing: the checkpoint was saved"
                    " before the first step. Set the group's center again"
                )
            if given is not None:
                elsewhere.append(param)
            state["center"] = param.detach().clone() if given is None else like_param(given, param)
            where = local(param).device if has_values(local(param)) else "cpu"
            state["scale"] = torch.tensor(group["reach"], dtype=torch.float64, device=where)
            state.pop("dual", None)  # of steps without a center
        centers = [self.state[param]["center"] for param in elsewhere]
        scales = first_scale(elsewhere, centers, group["reach"])
        for param, scale in zip(elsewhere, scales, strict=True):
            self.state[param]["scale"].fill_(scale)
        for param in params:
            if "dual" not in self.state[param]:  # zeros: weights elsewhere are found to be edited
                self._checksums.pop(param, None)

    def _check_changed_options(self, group: Group, position: int) -> None:
        """Check the options of a group again if any is not the object it was, or lr was edited."""
        same = identical(option_values(group), self._checked.get(id(group), []))
        edition = _edition(group["lr"])
        if not same or edition != self._rates[id(group)][0]:
            group.update(plain_numbers(group))
            self._check_group(position, group)
            self._check_fit(group)
            self._take_center(group)
            self._checked[id(group)] = option_values(group)
            self._rates[id(group)] = edition, number(group["lr"], missing=0.0)

    def _rate(self, group: Group) -> float:
        """Return lr as a number, as it was read when the options were checked."""
        return self._rates[id(group)][1]

    def _take_center(self, group: Group) -> None:
        """Make a center that was set in a group, after it was added, that of the next step."""
        if group.get("center") is not None:
            reach = group["reach"] = group.get("reach") or self._reach(group)
            check_number("reach", reach, positive=True)
        if self._is_given(group.get("center")):
            params = group["params"]
            centers = matched_centers(group["center"], group.get("param_names", ()), params)
            self._centers.update(zip(params, centers, strict=True))
            for param in params:
                self._drop_center(param)
            group["center"] = "given"

    def _drop_center(self, param: Tensor) -> None:
        for name in ("center", "scale", "dual"):
            self.state.get(param, {}).pop(name, None)

    def _check_shapes(self, group: Group, param: Tensor) -> None:
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {self._name(group, param)} is sparse ({param.grad.layout}),"
                " which mirror descent does not support: use dense gradients"
                " (for nn.Embedding, sparse=False)"
            )
        if param.grad.shape != param.shape:
            raise RuntimeError(
                f"{self._name(group, param)} has another shape than its gradient,"
                f" {tuple(param.grad.shape)}: it was resized after the backward pass. Call"
                " zero_grad and compute the gradient again; nothing has moved"
            )
        for name, value in self.state.get(param, {}).items():
            if name in self._tensor_state and value.shape != param.shape:
                raise RuntimeError(
                    f"{self._name(group, param)} has another shape than its state {name!r},"
                    f" {tuple(value.shape)}: it was resized in the middle of the run. Build a new"
                    " optimizer, or delete optimizer.state[param]; nothing has moved"
                )

    def _nonfinite_message(self, bad: list[tuple[Group, Tensor]]) -> str:
        def listed(some: list[tuple[Group, Tensor]]) -> str:
            names = ", ".join(self._name(group, param) for group, param in some[:5])
            return f"{names} and others" if some[5:] else names

        text = (
            f"the gradient of {listed(bad)} is not finite. Its entries that are inf or NaN were"
            " left out of the step."
        )
        every = [(group, param) for group in self.param_groups for param in group["params"]]
        parts = [local(param) for _, param in every]
        finite = [not has_values(part) or bool(part.isfinite().all()) for part in parts]
        if broken := [pair for pair, ok in zip(every, finite, strict=True) if not ok]:
            return (
                f"{text} The weights of {listed(broken)} are not finite either: an earlier step or"
                " an edit made them so. Load an earlier checkpoint and lower lr"
            )
        return (
            f"{text} Weights and state are finite, as before. Lower lr, clip the gradients or use a"
            " GradScaler; error_if_nonfinite=False leaves such entries out without this error"
        )

    def _name(self, group: Group, param: Tensor) -> str:
        position = next(i for i, p in enumerate(group["params"]) if p is param)
        names = group.get("param_names", ())
        if len(names) == len(group["params"]):
            return repr(names[position])
        number = next(i for i, g in enumerate(self.param_groups) if g is group)
        return f"parameter {position} of group {number}, shape {tuple(param.shape)}"

    def _stored(self, group: Group, param: Tensor) -> Tensor | None:
        """Return what is kept beside the weight (local part), made from it where missing."""
        wide = wide_dtype(param.dtype)
        if group["center"] is not None:
            return self._buffer(param, "dual", wide)
        if self._is_plain(group, param):
            return None
        if "center" in self.state.get(param, ()):  # the group's center is None now
            self._drop_center(param)
        if not group["keep_dual"] or (group["geometry"] >= 2 and param.dtype == wide):
            return None
        name = "dual" if group["geometry"] < 2 else "wide"
        if name not in self.state.get(param, ()):
            self._checksums.pop(param, None)
            # The C library finds zeros where the weights are not zero, and computes u itself.
            how = Implementation.chosen(group["foreach"], group["fused"]).on(local(param))
            if how is not Implementation.NATIVE:
                weight = local(param).to(wide)
                kept = self._buffer(param, name, wide)
                kept.copy_(weight if name == "wide" else self._mirror(group, param, weight))
        return self._buffer(param, name, wide)

    def _mirror(self, group: Group, param: Tensor, weight: Tensor) -> Tensor:
        return signed_power(weight, group["geometry"] - 1)

    def _buffer(self, param: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """Return a buffer (local part); it follows a parameter whose dtype was changed."""
        state = self.state[param]
        if name not in state:
            state[name] = zeros_like_param(param, dtype)
        elif state[name].dtype != dtype:
            state[name] = state[name].to(dtype)
        return local(state[name])

    def _buffers(self, group: Group, params: list[Tensor], name: str) -> list[Tensor]:
        return [self._buffer(param, name, self._buffer_dtype(group, param)) for param in params]

    def _buffer_dtype(self, group: Group, param: Tensor) -> torch.dtype:
        return wide_dtype(param.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_centers": self._centers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checked, self._rates, self._checksums, self._plans = {}, {}, {}, {}
        self._written_in = {}
        self._centers = self.__dict__.get("_centers", {})
        for options in (self.defaults, *self.param_groups):
            without_foreign(options)  # torch adds one to the defaults, and so did we to the groups
        for group in self.param_groups:
            for name, value in {**self.defaults, "step": 0}.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; geometries that are no p-norm are there as their descriptions."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in ("geometry", "direction"):
                if isinstance(group.get(name), Norm | Potential):
                    group[name] = describe(group[name])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict. State keeps its float32 where parameters are bf16 or fp16.

        Options come from the checkpoint, as in torch.optim, p included. A p that differs from the
        present one gives a warning, and so does another weight_decay in a checkpoint of AdamW.
        State must be complete and finite. Everything is checked before anything changes.
        """
        with torch.inference_mode(False), torch.no_grad():  # as in `step`
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        final: dict[str, Any] = {}

        def check(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            loaded = self._translated(with_tensors(loaded))
            groups = [plain_numbers(group) for group in loaded["param_groups"]]
            groups = list(map(self._with_geometries, groups, range(len(groups))))
            loaded = {**loaded, "param_groups": groups}
            self._check_state_dict(loaded)
            final.update(loaded)
            return loaded

        # torch casts state to the parameter's dtype while loading, which would lose the
        # float32 state of bf16 parameters: take it again from what the last hook returned.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, param, saved in self._paired(final):
            for name, value in saved.items():
                if not isinstance(value, Tensor):
                    continue
                device, dtype = param.device, value.dtype
                if name == "center":
                    self._centers.pop(param, None)
                elif name in ("dual", "wide"):
                    dtype = wide_dtype(param.dtype)
                elif name in self._tensor_state:
                    dtype = self._buffer_dtype(group, param)
                else:
                    device = placed(name, value, param)
                self.state[param][name] = value.to(device=device, dtype=dtype, copy=True)
        self._checksums.clear()
        self._plans.clear()
        self._written_in.clear()

    def _with_geometries(self, group: Group, position: int) -> Group:
        """Return a loaded group with the optimizer's own geometries for their descriptions."""
        own = self.param_groups[position] if position < len(self.param_groups) else {}
        result = dict(group)
        for name in ("geometry", "direction"):
            saved, mine = group.get(name), own.get(name)
            if not isinstance(saved, str):
                continue
            if saved != (described := describe(as_geometry(mine)) if mine is not None else "None"):
                raise ValueError(
                    f"state_dict group {position} was saved with {name}={saved}, and this optimizer"
                    f" has {name}={described}: build it with the same"
                )
            result[name] = mine
        return result

    def _translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state_dict in our own form, if it is of an optimizer we can resume from."""
        return state_dict

    def _paired(self, state_dict: dict[str, Any]) -> Iterator[tuple[Group, Tensor, dict[str, Any]]]:
        """Yield (group, parameter, saved state) for the parameters that have any."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(group["params"], saved["params"], strict=True):
                if index in state_dict["state"]:
                    yield group, param, state_dict["state"][index]

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, mine = state_dict["param_groups"], type(self).__name__
        sizes, own = ([len(g["params"]) for g in some] for some in (groups, self.param_groups))
        if sizes != own:
            raise ValueError(
                f"state_dict has parameter groups of sizes {sizes}, this optimizer {own}"
            )
        needed = {"geometry": "it is not of a mirrorhead optimizer"}
        needed[self._own_option] = f"it was not saved by {mine}"
        for position, (group, present) in enumerate(zip(groups, self.param_groups, strict=True)):
            for name, problem in needed.items():
                if name not in group:
                    raise ValueError(f"state_dict group {position} has no {name}: {problem}")
            self.check_options({**self.defaults, **group})
            saved, own = group["geometry"], present["geometry"]
            if saved != own:
                warnings.warn(
                    f"the state_dict was saved with geometry={saved} in group {position}, where"
                    f" this optimizer has geometry={own}; {saved} is used from now on",
                    stacklevel=6,
                )
        options_of = {
            id(own): {**self.defaults, **saved}
            for own, saved in zip(self.param_groups, groups, strict=True)
        }
        entries = list(self._paired(state_dict))
        widened = {id(group) for group, _, saved in entries if "wide" in saved}
        for group, param, saved in entries:
            owner = self._name(group, param).rstrip(",")
            for name, value in saved.items():
                if name in self._tensor_state:
                    check_tensor(owner, name, value, param)
                elif name not in self._scalar_state:
                    raise ValueError(f"state_dict holds {name!r}, unknown to {mine}")
                elif value is not None or name != "rms":
                    check_scalar(owner, name, value)
            options = options_of[id(group)]
            needed = self._needed_state(options, param, saved)
            if "dual" not in needed and id(group) in widened and self._keeps_wide(options, param):
                needed |= {"wide"}  # without any, the weights were in full precision
            check_complete(owner, saved, needed)

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        """Return the names of the state that steps with these options leave behind."""
        center = options["center"]
        if not is_number(options["geometry"]) or options.get("direction"):
            return {"dual"}
        if center == "init" or (center == "given" and "center" in saved):
            return {"center", "scale", "dual"}
        return (
            {"dual"}
            if center is None and options["keep_dual"] and options["geometry"] < 2
            else set()
        )

    def _keeps_wide(self, options: Group, param: Tensor) -> bool:
        if not is_number(options["geometry"]) or options.get("direction"):
            return False
        half = param.dtype != wide_dtype(param.dtype)
        plain = self._is_plain(options, param)
        return half and not plain and options["keep_dual"] and options["center"] is None


def as_geometry(geometry: Any) -> Any:
    return PNorm(geometry) if is_number(geometry) else geometry


def _edition(lr: Any) -> float | None:
    """Return what differs once a tensor lr has been edited in place.

    That is its number or, on a device, torch's count of edits: to read the number would wait.
    """
    if not isinstance(lr, Tensor):
        return None
    return number(lr, missing=0.0) if lr.is_inference() or not waits(lr) else lr._version


def _listed(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        given = type(params).__name__
        raise TypeError(
            f"params must be parameters, got the model {given}: give model.parameters()"
        )
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            f"params must be in ordered collections, such as lists, got a {type(params).__name__}:"
            " its order changes from run to run, and state would go to other parameters"
        )
    return list(params)
