"""What the optimizers share: checks, state, the record of each parameter, the order of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from mirrorhead._checks import is_number
from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry.pnorm import PNorm
from mirrorhead.optim._batches import Batch, EagerBatch, Finite, NativeBatch, Scales, TorchBatch
from mirrorhead.optim._checkpoints import WithCheckpoints
from mirrorhead.optim._native import exponent_of, serves, takes_sgd
from mirrorhead.optim._options import (
    FOREIGN,
    check_number,
    check_one_element,
    plain_numbers,
    without_foreign,
)
from mirrorhead.optim._rule import (
    Checksums,
    Group,
    Method,
    Mover,
    Record,
    Rule,
    Storage,
    fixed_numbers,
    knee_numbers,
)
from mirrorhead.optim._sharded import all_finite, all_true, local, local_gradient
from mirrorhead.optim._tensors import alike, has_values, number, waits, wide_dtype, zeros_like_param

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
_PLAIN = {Tensor, nn.Parameter}


@dataclass(eq=False)
class _Kept:
    """The batches of a group, for as long as nothing that they were made from has changed."""

    params: list[Tensor]
    batches: list[tuple[Batch, list[int]]]  # with the positions of their parameters
    plain: bool  # whether all tensors are plain ones
    look: list[Any] | None = None
    versioned: Sequence[Tensor] = ()  # whose edits count, and no step makes any
    versions: Sequence[int] = ()


class GeometryOptimizer(WithCheckpoints):
    """An optimizer whose step is a direction in a geometry; see its subclasses."""

    _own_flags: tuple[str, ...] = ()  # options of a subclass that are True or False

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        defaults = plain_numbers(defaults)
        self.check_options(defaults)
        given: Any = params if isinstance(params, Tensor) else _listed(params)
        if isinstance(given, list) and not given:
            raise ValueError("params is an empty list: give the parameters to optimize")
        self._forget()
        super().__init__(given, defaults)

    def _forget(self) -> None:
        """Forget what was derived from options and state."""
        # By id of the group: lr, its edition and its number; the other options.
        self._checked: dict[int, tuple[Any, float | None, float, list[Any]]] = {}
        self._kept: dict[int, _Kept] = {}  # by id of the group
        self._last: dict[Tensor, Record] = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, with any option of the constructor as its own, geometry included."""
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
        super().add_param_group({"step": 0, **param_group})
        try:
            self._take_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _take_group(self, group: Group) -> None:
        """Refuse parameters that the geometries of their group, new or changed, cannot measure."""
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
        for name in ("maximize", "error_if_nonfinite", *cls._own_flags):
            if not isinstance(options[name], bool):
                raise TypeError(f"{name} must be True or False, got {options[name]!r}")
        for name in ("foreach", "fused"):
            if options.get(name) not in (None, True, False):
                raise TypeError(f"{name} must be True, False or None, got {options[name]!r}")
        if options.get("foreach") and options.get("fused"):
            raise ValueError("foreach and fused cannot both be True: choose one implementation")
        for name in FOREIGN:
            if options.get(name):
                raise TypeError(f"{name}=True is not supported by {cls.__name__}: leave it out")

    @classmethod
    @abstractmethod
    def _check_geometry(cls, options: Group) -> None:
        """Raise if the geometry has no meaning for this optimizer."""

    # torch.compile(optimizer.step) would break the graph at every number that is read. Our own
    # kernels are compiled already, so the step runs as it is.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
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
        for position, group in enumerate(self.param_groups):
            self._check_changed_options(group, position)
        steps = [(group, self._fresh(group)) for group in self.param_groups]
        steps = [(group, kept) for group, kept in steps if kept.params]
        ready = []
        for group, kept in steps:
            if not kept.batches:
                self._make_batches(group, kept)
            # The C library looks itself where the numbers of a gradient are.
            quick = kept.plain and all(isinstance(batch, NativeBatch) for batch, _ in kept.batches)
            grads = [
                g if quick and type(g := param.grad) is Tensor else local_gradient(param)
                for param in kept.params
            ]
            finite, grads, scales = self._scales(group, kept.params, grads)
            for batch, positions in kept.batches:
                batch.prepare([grads[i] for i in positions])
            ready.append((group, kept, grads, finite, scales))
        if self.state:  # torch's distributed checkpoint wants an entry for all or for none
            for _, kept, *_ in ready:
                for param in kept.params if kept.look is None else ():
                    self.state.setdefault(param, {})
        checked: list[tuple[Group, Tensor, bool | Tensor]] = []
        for group, kept, grads, finite, scales in ready:
            group["step"] += 1
            rate, finite = self._checked[id(group)][2], list(finite)
            for batch, positions in kept.batches:
                own = None if scales is None else [scales[i] for i in positions]
                ok = batch.run(rate, [grads[i] for i in positions], own)
                for i, its_ok in zip(positions, ok, strict=True):
                    finite[i] &= its_ok
            if not kept.plain:
                finite = all_finite(kept.params, finite)
            elif kept.look is None:
                kept.look = self._look(group, kept.params)
                kept.versions = [x._version for x in kept.versioned]
                self._kept[id(group)] = kept
            if group["error_if_nonfinite"] and not all(ok is True for ok in finite):
                checked += [(group, q, ok) for q, ok in zip(kept.params, finite, strict=True)]
        if not all_true([ok for _, _, ok in checked]):
            bad = [(group, param) for group, param, ok in checked if not ok]
            raise RuntimeError(self._nonfinite_message(bad))

    def _fresh(self, group: Group) -> _Kept:
        """Return the batches of a group, none of them if they must be made again."""
        kept, params = self._kept.get(id(group)), [q for q in group["params"] if q.grad is not None]
        if kept is not None:
            same = [x._version for x in kept.versioned] == kept.versions
            if same and self._look(group, params) == kept.look:
                return kept
        for param in params:
            self._check_shapes(group, param)
        return _Kept(params, [], plain=False)

    def _look(self, group: Group, params: list[Tensor]) -> list[Any]:
        """Return everything that batches depend on, but for options and the numbers of a step."""
        entries = [self.state.get(param) or {} for param in params]
        held = [x for entry in entries for x in entry.values()]
        large = [x for entry in entries for name, x in entry.items() if name in self._tensor_state]
        large += params
        grads = [param.grad for param in params]
        return [
            list(map(id, held)), list(map(id, params)), len(group["params"]),
            [x.data_ptr() for x in large], [x.dtype for x in large], [x.shape for x in large],
            [x.is_contiguous() or x.stride() for x in large], [x.device for x in params],
            [g.dtype for g in grads], [g.shape for g in grads], [g.layout for g in grads],  # pyright: ignore
        ]  # fmt: skip

    def _make_batches(self, group: Group, kept: _Kept) -> None:
        """Make the records of parameters with a gradient, and the state that is missing."""
        params, batches = kept.params, {}
        self._prepare_state(group, params)
        records = [self._record(group, param) for param in params]
        for i, (param, record) in enumerate(zip(params, records, strict=True)):
            self._last[param] = record
            grad = local_gradient(param).dtype if record.mover is not Mover.NATIVE else None
            key = (record.mover, record.rule, record.weight.device, record.weight.dtype, grad)
            batches.setdefault(key, []).append(i)
        kept.batches = [
            (_batch(key[0], group, [records[i] for i in where]), where)
            for key, where in batches.items()
        ]
        entries = [self.state.get(param) or {} for param in params]
        tensors = [*params, *(x for entry in entries for x in entry.values())]
        kept.plain = all(type(x) in _PLAIN and not x.is_inference() for x in tensors)
        if kept.plain:
            native = [r.stored for r in records if r.mover is Mover.NATIVE and r.stored is not None]
            kept.versioned = [*native, *(entry["rms"] for entry in entries if "rms" in entry)]

    def _record(self, group: Group, param: Tensor) -> Record:
        """Decide how a parameter moves, and make the state that this needs."""
        weight, wide = local(param), wide_dtype(param.dtype)
        psi, knee = self._potential(group, param)
        method, direction = self._method(group), self._along(group)
        p, centered = exponent_of(psi), group.get("center") is not None
        stochastic = group.get("stochastic_rounding", False) and param.dtype == torch.bfloat16
        plain = p == 2 and not centered and direction is None and not stochastic
        plain = plain and (method is not Method.ADAM or param.dtype == wide)
        storage = Storage.PRIMAL
        if centered:
            storage = Storage.CENTERED
        elif p is None or (p < 2 and group.get("keep_dual", True)):
            storage = Storage.DUAL
        elif param.dtype != wide and not plain and p >= 2 and group.get("keep_dual", True):
            storage = Storage.WIDE
        rule = Rule(psi, method, storage, param.dtype, knee is not None, stochastic, direction)
        if not centered:
            self._drop_center(param)
        state = self.state[param] if storage or method or param in self.state else {}
        if centered:
            self._place_center(group, param)
        names = {"stored": {Storage.PRIMAL: None, Storage.WIDE: "wide"}.get(storage, "dual")}
        first = "exp_avg" if method is Method.ADAM else "momentum_buffer" if method else None
        names |= {"m": first, "v": "exp_avg_sq" if method is Method.ADAM else None}
        moments = param.dtype if plain else wide  # plain ones as torch's SGD has them
        buffers = {
            part: name and self._buffer(param, name, moments if part in "mv" else wide)
            for part, name in names.items()
        }
        last, numbers = self._last.get(param), fixed_numbers(group) | knee_numbers(p or 2, knee)
        record = Record(
            param, rule, Mover.EAGER, weight, **buffers,
            center=local(state["center"]) if centered else None,
            scale=state["scale"] if centered else None, count=state.get("step"),
            numbers=numbers, speed=self._speed(group, param, psi, knee),
            checksums=last.checksums if last else Checksums(),
            before=last.rule.psi if last else None, reach=group.get("reach", 1.0),
            match_rms=group.get("match_rms"),
        )  # fmt: skip
        record.mover = self._mover(group, record, plain)
        return record

    def _mover(self, group: Group, record: Record, plain: bool) -> Mover:
        """Choose what moves a parameter."""
        foreach, fused, rule, w = (
            group.get("foreach"),
            group.get("fused"),
            record.rule,
            record.weight,
        )
        parts = (w, record.stored, record.m, record.v, record.center)
        dense = alike([x for x in parts if x is not None])
        default = (foreach is None and fused is None) or (fused and not waits(w))
        native = default and has_values(w) and dense and rule.norm is None and serves(w)
        native = native and exponent_of(rule.psi) is not None
        if plain:
            ours = native and rule.method is Method.DESCENT and takes_sgd(w)
            return Mover.NATIVE if ours else Mover.TORCH
        if native:
            return Mover.NATIVE
        if foreach is False or not has_values(w) or rule.norm is not None or rule.whole:
            return Mover.EAGER
        return Mover.COMPILED if fused and waits(w) else Mover.PACKED

    @abstractmethod
    def _method(self, group: Group) -> Method:
        """Return how the direction follows from gradients."""

    @abstractmethod
    def _potential(self, group: Group, param: Tensor) -> tuple[Potential, float | None]:
        """Return the potential in which a parameter moves, with its knee at 1, and the knee."""

    def _along(self, group: Group) -> Norm | None:
        """Return the norm along whose steepest direction the step goes."""
        return None

    def _speed(self, group: Group, param: Tensor, psi: Potential, knee: float | None) -> float:
        """Return what lr is multiplied by in the dual."""
        return 1.0

    def _prepare_state(self, group: Group, params: list[Tensor]) -> None:
        """Measure weights before their first step, if the optimizer needs it."""

    def _scales(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> tuple[Finite, list[Tensor], Scales]:
        """Return which gradients are known to have bad entries, all without, and their scales."""
        return [True] * len(params), grads, None

    def _place_center(self, group: Group, param: Tensor) -> None:
        raise NotImplementedError

    def _drop_center(self, param: Tensor) -> None:
        """Forget the center of a parameter, and the u around it."""
        if "center" in self.state.get(param, {}):
            for name in ("center", "scale", "dual"):
                self.state[param].pop(name, None)
            self._last.pop(param, None)

    def _buffer(self, param: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """Return a buffer (local part); it follows a parameter whose dtype was changed.

        A new u is 0. Weights that are not 0 are then found to be edited, and it starts from them.
        """
        state = self.state[param]
        if name not in state:
            state[name] = zeros_like_param(param, dtype)
            if name in ("dual", "wide"):
                self._last.pop(param, None)
        elif state[name].dtype != dtype:
            state[name] = state[name].to(dtype)
        return local(state[name])

    def _check_changed_options(self, group: Group, position: int) -> None:
        """Check the options of a group again if any is not the object it was, or lr was edited."""
        lr, edition, values = group["lr"], _edition(group["lr"]), _option_values(group)
        seen_lr, seen_edition, _, seen = self._checked.get(id(group), (None, None, 0.0, []))
        same = len(values) == len(seen) and not any(map(is_not, values, seen))
        if same and lr is seen_lr and edition == seen_edition:
            return
        group.update(plain_numbers(group))
        self._check_group(position, group)
        if not same:
            self._take_group(group)
            self._kept.pop(id(group), None)
        lr, rate = group["lr"], number(group["lr"], missing=0.0)
        self._checked[id(group)] = lr, _edition(lr), rate, _option_values(group)

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


def _batch(mover: Mover, group: Group, records: list[Record]) -> Batch:
    if mover is Mover.COMPILED:
        from mirrorhead.optim._compiled import CompiledBatch

        return CompiledBatch(group, records)
    kinds = {Mover.NATIVE: NativeBatch, Mover.TORCH: TorchBatch}
    return kinds.get(mover, EagerBatch)(group, records)


def as_geometry(geometry: Any) -> Any:
    """Return a geometry; a number stands for the p-norm."""
    return PNorm(geometry) if is_number(geometry) else geometry


def _option_values(group: Group) -> list[Any]:
    """Return the options of a group but lr, and each beta: a list of them can change in place."""
    others = ("params", "param_names", "step", "lr")
    return [*(x for name, x in group.items() if name not in others), *group.get("betas", ())]


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
