"""What MirrorDescent and MirrorAdam share: checks, state, checkpoints, the order of a step."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirrorhead.optim.engine import storage_for, wide_dtype
from mirrorhead.optim.sharded import all_finite, local, local_gradient
from mirrorhead.potentials import check_p, signed_power

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class MirrorOptimizer(Optimizer):
    """An optimizer that moves parameters in the dual of a p-norm; see its subclasses."""

    #: State with a number for every weight.
    _tensor_state: frozenset[str]
    #: All other state.
    _scalar_state: frozenset[str] = frozenset()

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self.check_options(defaults)
        given: Any = params if isinstance(params, Tensor) else list(params)
        if isinstance(given, list) and not given:
            raise ValueError("params is an empty list: give the parameters to optimize")
        super().__init__(given, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with any option of the constructor as its own, p included."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        self.check_options({**self.defaults, **param_group})
        params = param_group["params"]
        if not isinstance(params, Tensor):
            params = param_group["params"] = list(params)
        for entry in [params] if isinstance(params, Tensor) else params:
            param = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(param, Tensor) and not param.is_floating_point():
                raise TypeError(
                    f"parameters must be real floating point tensors, got {param.dtype}"
                    " (a complex parameter can be given as torch.view_as_real of it)"
                )
        super().add_param_group({"step": 0, **param_group})

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Raise on the first option that cannot be, naming it."""
        check_p(options["p"])
        lr = options["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr as a tensor must have one element, got shape {tuple(lr.shape)}")
        check_number("lr", lr if not isinstance(lr, Tensor) else lr.item())
        check_number("weight_decay", options["weight_decay"])
        for name in ("maximize", "keep_dual", "stochastic_rounding", "error_if_nonfinite"):
            if not isinstance(options[name], bool):
                raise TypeError(f"{name} must be True or False, got {options[name]!r}")
        for name in ("foreach", "fused"):
            if options[name] not in (None, True, False):
                raise TypeError(f"{name} must be True, False or None, got {options[name]!r}")
        if options["foreach"] and options["fused"]:
            raise ValueError("foreach and fused cannot both be True: choose one implementation")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step. `closure` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [self._with_gradient(group) for group in self.param_groups]
        bad = []
        for group, (params, grads) in zip(self.param_groups, work, strict=True):
            if not params:
                continue
            group["step"] += 1
            finite = all_finite(params, self._step_group(group, params, grads))
            if group["error_if_nonfinite"]:
                names = [
                    self._name(group, q) for q, ok in zip(params, finite, strict=True) if not ok
                ]
                bad.extend(names)
        if self.state:  # torch's distributed checkpoint wants an entry for all or for none
            for params, _ in work:
                for param in params:
                    self.state.setdefault(param, {})
        if bad:
            raise RuntimeError(
                f"the gradient of {', '.join(bad[:5])}{' and others' if bad[5:] else ''} is not"
                " finite. Its entries that are inf or NaN were left out of the step, so weights and"
                " state are as good as before. Lower lr, clip the gradients or use a GradScaler;"
                " error_if_nonfinite=False leaves such entries out without this error"
            )
        return loss

    @abstractmethod
    def _step_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[bool]:
        """Move the parameters of one group; which of the local gradients were finite."""

    def _with_gradient(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {self._name(group, param)} is sparse ({param.grad.layout}),"
                    " which mirror descent does not support: use dense gradients"
                    " (for nn.Embedding, sparse=False)"
                )
        return params, [local_gradient(param) for param in params]

    def _name(self, group: dict[str, Any], param: Tensor) -> str:
        position = next(i for i, p in enumerate(group["params"]) if p is param)
        if "param_names" in group:
            return repr(group["param_names"][position])
        number = next(i for i, g in enumerate(self.param_groups) if g is group)
        return f"parameter {position} of group {number}, shape {tuple(param.shape)},"

    def _kept(self, group: dict[str, Any], param: Tensor) -> Tensor | None:
        """What is kept beside the weight (local part), made from it where it is missing."""
        storage = storage_for(group["p"], param.dtype, group["keep_dual"])
        if storage == "primal":
            return None
        state = self.state[param]
        if storage not in state:
            state[storage] = self._zeros(param, wide_dtype(param.dtype))
            weight = local(param).to(wide_dtype(param.dtype))
            if storage == "dual":
                weight = signed_power(weight, group["p"] - 1)
            local(state[storage]).copy_(weight)
        return local(state[storage])

    def _buffer(self, group: dict[str, Any], param: Tensor, name: str) -> Tensor:
        """A buffer (local part) that starts at zero."""
        state = self.state[param]
        if name not in state:
            state[name] = self._zeros(param, self._buffer_dtype(group, param))
        return local(state[name])

    def _buffer_dtype(self, group: dict[str, Any], param: Tensor) -> torch.dtype:
        return wide_dtype(param.dtype)

    def _zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros laid out and sharded like the parameter."""
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.setdefault("step", 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict. State keeps its float32 where parameters are bf16 or fp16.

        Options come from the checkpoint, as in torch.optim, p included: a p that differs
        from the present one gives a warning. Everything is checked before anything changes.
        """
        final: dict[str, Any] = {}

        def check(_: Optimizer, loaded: dict[str, Any]) -> None:
            self._check_state_dict(loaded)
            final.update(loaded)

        # torch casts state to the parameter's dtype while loading, which would lose the
        # float32 state of bf16 parameters: take it again from what the last hook returned.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, param, saved in self._paired(final):
            for name, value in saved.items():
                if name in self._tensor_state:
                    wide = name in ("dual", "wide")
                    dtype = wide_dtype(param.dtype) if wide else self._buffer_dtype(group, param)
                    self.state[param][name] = value.to(device=param.device, dtype=dtype, copy=True)
                elif isinstance(value, Tensor):
                    self.state[param][name] = value.clone()

    def _paired(
        self, state_dict: dict[str, Any]
    ) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
        """(group, parameter, saved state) of the parameters that have any."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(group["params"], saved["params"], strict=True):
                if index in state_dict["state"]:
                    yield group, param, state_dict["state"][index]

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                "state_dict has parameter groups of sizes"
                f" {sizes}, this optimizer {[len(g['params']) for g in self.param_groups]}"
            )
        for number, (group, mine) in enumerate(zip(groups, self.param_groups, strict=True)):
            if "p" not in group:
                raise ValueError(f"state_dict group {number} has no p: it is not of mirrorhead")
            self.check_options({**self.defaults, **group})
            if group["p"] != mine["p"]:
                warnings.warn(
                    f"the state_dict was saved with p={group['p']:g} in group {number}, where"
                    f" this optimizer has p={mine['p']:g}; p={group['p']:g} is used from now on",
                    stacklevel=5,
                )
        for _, param, saved in self._paired(state_dict):
            for name, value in saved.items():
                if name not in self._tensor_state | self._scalar_state:
                    raise ValueError(f"state_dict holds {name!r}, unknown to {type(self).__name__}")
                if name in self._tensor_state and value.shape != param.shape:
                    raise ValueError(
                        f"state_dict holds {name!r} of shape {tuple(value.shape)}"
                        f" for a parameter of shape {tuple(param.shape)}"
                    )


def check_number(
    name: str, value: Any, low: float = 0.0, below: float = math.inf, low_open: bool = False
) -> None:
    """Raise unless low <= value < below (low < value if `low_open`)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (low < value if low_open else low <= value) or not value < below:
        bound = "finite" if below == math.inf else f"less than {below:g}"
        than = "greater than" if low_open else "at least"
        raise ValueError(f"{name} must be {than} {low:g} and {bound}, got {value!r}")
