"""The formula through torch.compile: one pass over memory, on CPU and GPU.

A kernel is compiled once for each `UpdateRule`, for flat tensors of any length. It takes all
numbers (lr, momentum, ...) from a tensor, so that neither another shape nor a schedule
compiles anything again. A call costs about 30 us, so tensors are passed four at a time.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mirrorhead.optim import _formula
from mirrorhead.optim._formula import Hyper, Storage, UpdateRule
from mirrorhead.optim._param_state import ParamState, is_finite, waits

_logger = logging.getLogger("mirrorhead")
_PER_CALL = 4
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EEXIST, errno.ENOTDIR)
_SCRATCH_LENGTHS = (11, 13, 17, 19)  # all different: equal lengths would be compiled as equal
_traced: set[tuple] = set()

Kernel = Callable[..., list[Tensor]]


def prepare_compiled(states: Sequence[ParamState]) -> None:
    """Compile every kernel that flat states will need, on scratch tensors, before any moves."""
    for call in _calls(states):
        first = call[0][1]
        rule, device = _kernel_rule(first), first.weight.device
        key = (rule, device, len(call), first.grad.dtype)
        if key not in _traced:
            _compile(rule, device, len(call), first)
            _traced.add(key)


def step_compiled(states: Sequence[ParamState]) -> list[bool | Tensor]:
    """Move tensors that `prepare_compiled` has seen. Return which gradients were finite."""
    finite: list[bool | Tensor] = [True] * len(states)
    numbers: dict[Hyper, Tensor] = {}
    for call in _calls(states):
        rule, device = _kernel_rule(call[0][1]), call[0][1].weight.device
        for _, state in call:
            if state.hyper not in numbers:
                numbers[state.hyper] = _as_tensor(state.hyper, rule, device)
        marks = _kernel(rule, device.type, len(call))(
            *zip(*(state.tensors() for _, state in call), strict=True),
            [numbers[state.hyper] for _, state in call],
        )
        torch.autograd.graph.increment_version([states[i].weight for i, _ in call])
        if waits(call[0][1].weight):  # where nothing is left to finish: do not read the marks
            for i, state in call:
                finite[i] = is_finite(state.grad)
            continue
        for (i, state), mark in zip(call, torch.stack(marks).tolist(), strict=True):
            if not math.isfinite(mark):
                finite[i] = is_finite(state.grad)
                if rule.defer:
                    _finish(state, replace(rule, defer=False))
    return finite


def _calls(states: Sequence[ParamState]) -> list[list[tuple[int, ParamState]]]:
    """Return the states of each call, by position: four at a time, then one by one."""
    # Without .data each would be known as a view, and compiled for its base's shape.
    bare = [state.of([x if x is None else x.data for x in state.tensors()]) for state in states]
    entries = list(enumerate(bare))
    whole = len(entries) - len(entries) % _PER_CALL
    calls = [entries[i : i + _PER_CALL] for i in range(0, whole, _PER_CALL)]
    return calls + [[entry] for entry in entries[whole:]]


def _kernel_rule(state: ParamState) -> UpdateRule:
    rule = state.rule
    # On a CPU, handling edited weights inline would cost a power for every weight: mark them,
    # and finish those few afterwards. A GPU has powers to spare and would have to wait.
    defer = rule.storage is Storage.DUAL and not waits(state.weight)
    return replace(rule, polynomial=rule.wide == torch.float32, defer=defer)


def _as_tensor(hyper: Hyper, rule: UpdateRule, device: torch.device) -> Tensor:
    numbers = torch.tensor(hyper, dtype=rule.wide, device=device)
    # Else a weight as long as this would be taken to be so in every call.
    torch._dynamo.mark_static(numbers)
    return numbers


def _compile(rule: UpdateRule, device: torch.device, count: int, like: ParamState) -> None:
    once = "(once for each p and dtype; torch keeps it in its cache)"
    _logger.warning(f"mirrorhead: compiling the fused step for p={rule.p:g}, {rule.dtype} {once}")
    scratch = [
        [None if x is None else torch.ones(n, dtype=x.dtype, device=device) for x in like.tensors()]
        for n in _SCRATCH_LENGTHS[:count]
    ]
    numbers = [_as_tensor(like.hyper, rule, device) for _ in scratch]
    try:
        kernel = _kernel(rule, device.type, count)
        # The numbers of the rule are constants of the kernel, not arguments of it.
        with torch._dynamo.config.patch(specialize_float=True):
            kernel(*zip(*scratch, strict=True), numbers)
    except Exception as error:
        raise RuntimeError(
            "fused=True: torch.compile could not build the kernel"
            f" ({type(error).__name__}, above); nothing has moved. {_hint(error)};"
            " foreach=True needs no compiler"
        ) from error


def _hint(error: BaseException) -> str:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = " ".join(f"{type(cause).__name__} {cause}" for cause in causes)
    if any(isinstance(cause, OSError) and cause.errno in _UNWRITABLE for cause in causes):
        where = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "its default place")
        to_do = "set TORCHINDUCTOR_CACHE_DIR to a folder that can"
        return f"torch's compile cache ({where}) cannot be written: {to_do}"
    if "InvalidCxxCompiler" in text or "CppCompileError" in text or "FileNotFoundError" in text:
        return "On a CPU it needs a C++ compiler such as g++"
    return "The error above says why"


def _finish(state: ParamState, rule: UpdateRule) -> None:
    """Move the weights that the kernel found edited from outside."""
    w, stored, h = state.weight, state.stored, state.hyper
    assert stored is not None
    d = _formula.direction(rule, _formula.clean_gradient(rule, state.grad, h), state.m, state.v, h)
    new_w, moved = _formula.move_dual(rule, w, rule.mirror(w.to(rule.wide), h), d, h, state.noise)
    edited = stored.isnan()
    w.copy_(torch.where(edited, new_w, w))
    stored.copy_(torch.where(edited, moved, stored))


@cache
def _kernel(rule: UpdateRule, device: str, count: int) -> Kernel:
    def kernel(ws, gs, stores, ms, vs, noises, _centers, hs):
        marks = []
        for w, g, stored, m, v, noise, numbers in zip(ws, gs, stores, ms, vs, noises, hs):  # noqa: B905
            h = Hyper(*numbers.unbind())
            d, new_m, new_v = _formula.accumulate(rule, g, m, v, h)
            new_w, new_stored = _formula.move(rule, w, stored, d, h, noise)
            for old, new in ((w, new_w), (stored, new_stored), (m, new_m), (v, new_v)):
                if old is not None:
                    old.copy_(new)
            # NaN if any weight was marked or any gradient is not finite; from what the
            # step has just written, so that it takes no loop of its own.
            written = new_w.to(rule.wide) if new_stored is None else new_stored
            marks.append((written + 0.0 * g).sum())
        return marks

    # torch.compile counts recompilations by code object: give each rule its own.
    name = f"mirror_{rule.method.value}_p{rule.p:g}_{rule.storage.name.lower()}_{count}"
    kernel = types.FunctionType(
        kernel.__code__.replace(co_name=name), globals(), name, None, kernel.__closure__
    )
    on_cpu: dict[str, Any] = {
        # The sum of marks reads what the step just wrote: one loop instead of two.
        "realize_opcount_threshold": 3,
        # Multiply-adds for the polynomials. Rounding is as good or better.
        "cpp.enable_floating_point_contract_flag": "fast",
    }
    options = on_cpu if device == "cpu" else {}
    return torch.compile(kernel, dynamic=True, fullgraph=True, options=options)
