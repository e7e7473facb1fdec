"""Checkpoints: saved with plain values only, and whole: a run that resumes is the run saved."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirrorhead._checks import is_number
from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._choice import describe
from mirrorhead.optim._native import exponent_of
from mirrorhead.optim._options import plain_numbers, with_tensors, without_foreign
from mirrorhead.optim._rule import Group
from mirrorhead.optim._sharded import local
from mirrorhead.optim._tensors import has_values, wide_dtype

_GEOMETRIES = ("geometry", "direction")  # options that may be objects


class WithCheckpoints(Optimizer):
    """An optimizer that saves and loads its state as torch's do, and refuses what is not whole."""

    _tensor_state: frozenset[str]  # state with a number for every weight
    _scalar_state: frozenset[str] = frozenset()  # all other state
    _own_option: str  # that other optimizers do not have: it tells whose checkpoint one is

    @abstractmethod
    def _forget(self) -> None: ...

    @classmethod
    @abstractmethod
    def check_options(cls, options: dict[str, Any]) -> None: ...

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for options in (self.defaults, *self.param_groups):
            without_foreign(options)  # torch adds one to the defaults, and so did we to the groups
        for group in self.param_groups:
            for name, value in {**self.defaults, "step": 0}.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. A geometry that is no p-norm is there as its description."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in _GEOMETRIES:
                if isinstance(group.get(name), Norm | Potential):
                    group[name] = describe(group[name])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict. State keeps its float32 where parameters are bf16 or fp16.

        Options come from the checkpoint, as in torch.optim. A p that differs from the present one
        gives a warning, and so does another weight_decay in a checkpoint of AdamW. Geometries that
        are no p-norms must be those of this optimizer. State must be complete and finite.
        Everything is checked before anything changes.
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
        for _, param, saved in self._paired(final):
            for name, value in saved.items():
                if not isinstance(value, Tensor):
                    continue
                device, dtype = param.device, value.dtype
                if name in self._tensor_state - {"center"}:  # the next step may choose another
                    dtype = torch.promote_types(value.dtype, wide_dtype(param.dtype))
                    dtype = wide_dtype(param.dtype) if name in ("dual", "wide") else dtype
                elif name != "center":
                    device = placed(name, value, param)
                self.state[param][name] = value.to(device=device, dtype=dtype, copy=True)
        self._forget()

    def _translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state_dict in our own form, if it is of an optimizer we can resume from."""
        return state_dict

    def _with_geometries(self, group: Group, position: int) -> Group:
        """Return a loaded group with the optimizer's own geometries for their descriptions."""
        own = self.param_groups[position] if position < len(self.param_groups) else {}
        result = dict(group)
        for name in _GEOMETRIES:
            saved, mine = group.get(name), own.get(name)
            if not isinstance(saved, str):
                continue
            described = describe(mine) if isinstance(mine, Norm | Potential) else f"{mine}"
            if saved != described:
                raise ValueError(
                    f"state_dict group {position} was saved with {name}={saved}, and this optimizer"
                    f" has {name}={described}: build it with the same"
                )
            result[name] = mine
        return result

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
            needed_names = self._needed_state(options_of[id(group)], param, saved)
            if id(group) not in widened:  # without any, the weights were in full precision
                needed_names -= {"wide"}
            check_complete(owner, saved, needed_names)

    def _needed_state(self, options: Group, param: Tensor, saved: dict[str, Any]) -> set[str]:
        """Return the names of the state that steps with these options leave behind."""
        center = options.get("center")
        if center == "init" or (center == "given" and "center" in saved):
            return {"center", "scale", "dual"}
        geometry = options["geometry"]
        p = geometry if is_number(geometry) else exponent_of(geometry)
        if center is not None or (p is not None and not options.get("keep_dual", True)):
            return set()
        if p is None or p < 2:
            return {"dual"}
        half = param.dtype != wide_dtype(param.dtype)
        return {"wide"} if half and not (p == 2 and self._own_option == "normalize") else set()

    def _name(self, group: Group, param: Tensor) -> str:
        position = next(i for i, p in enumerate(group["params"]) if p is param)
        names = group.get("param_names", ())
        if len(names) == len(group["params"]):
            return repr(names[position])
        number = next(i for i, g in enumerate(self.param_groups) if g is group)
        return f"parameter {position} of group {number}, shape {tuple(param.shape)}"


def check_complete(owner: str, saved: dict[str, Any], needed: Collection[str]) -> None:
    """Raise if state that the next step would need is missing; without any, it is the first."""
    missing = [name for name in sorted(needed) if name not in saved]
    if saved and missing:
        raise ValueError(
            f"state_dict has no {', '.join(map(repr, missing))} for {owner}; it has"
            f" {', '.join(map(repr, sorted(saved)))}. If geometry, momentum, keep_dual or center"
            " was changed after the last step, load the state_dict with the old value and change it"
            " again"
        )


def check_tensor(owner: str, name: str, value: Any, param: Tensor) -> None:
    """Raise unless `value` is a tensor like the parameter whose numbers a run can have."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        given = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be a floating point tensor,"
            f" got {given}"
        )
    if value.shape != param.shape:
        raise ValueError(
            f"state_dict holds {name!r} of shape {tuple(value.shape)}"
            f" for a parameter of shape {tuple(param.shape)}"
        )
    part = local(value)
    if not has_values(part):
        return
    if name == "exp_avg_sq":  # inf follows from a gradient of 1e20, and is part of a run
        allowed, good = "at least 0", part >= 0
    else:
        allowed, good = "finite", part.isfinite()
    if not good.all():
        first = part[~good][0].item()
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be {allowed}, got {first} among its"
            " entries"
        )


def check_scalar(owner: str, name: str, value: Any) -> None:
    """Raise unless `value` is a tensor of one number that a run can have, or a plain step."""
    if isinstance(value, Tensor) and value.numel() == 1:
        if not has_values(value):
            return
        value = value.item()
    elif name != "step":
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be a tensor of one number, got a"
            f" {type(value).__name__}"
        )
    least = "greater than 0" if name == "scale" else "at least 0"
    number = float(value) if is_number(value) else math.nan
    if not 0 <= number < math.inf or (name == "scale" and number == 0):
        raise ValueError(
            f"state_dict holds {name!r} for {owner}: it must be a finite number {least},"
            f" got {value!r}"
        )


def placed(name: str, value: Tensor, param: Tensor) -> torch.device:
    """Return where state of one number belongs: S with the weights, the others on the CPU.

    A checkpoint loaded with map_location has them on a device, where each step would wait for them.
    """
    on_cpu = name != "scale" and value.device.type != "meta"
    return torch.device("cpu") if on_cpu else param.device
