"""The state of any torch optimizer as plain tensors, for a checkpoint that holds nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirrorhead._checks import is_number
from mirrorhead.bias._trainer import MakeOptimizer, Tensors, Trainer
from mirrorhead.geometry._choice import describe
from mirrorhead.paths._checkpoint import Progress, fingerprint, load_checkpoint, save_checkpoint


@dataclass
class Run:
    """How far a run is: the trainer with its weights and state, the step, what was recorded."""

    trainer: Trainer
    step: int
    records: dict[int, Tensors]


def resume(
    file: Path,
    data: Tensors,
    options: dict[str, Any],
    make: MakeOptimizer,
    run: Run,
    record: Tensors,
) -> Callable[[], None]:
    """Bring a run to where the file is, if there is one; return the function that saves it.

    record: what a record looks like.
    """
    trainer = run.trainer
    key = fingerprint(data, {**options, **_options_of(trainer)})
    # What a state looks like is seen after a step of a copy.
    copy = Trainer(make, trainer.weights, trainer.layout)
    copy.step()
    look = _states(copy) | {"scale": {"exponent": trainer.exponent}}
    stored = load_checkpoint(file, key, Progress(0, look, {}), record)
    if stored is not None:
        run.step, run.records = stored.step, stored.records
        trainer.exponent = stored.states["scale"]["exponent"]
        _restore(trainer, copy, stored.states)

    def save() -> None:
        states = _states(trainer) | {"scale": {"exponent": trainer.exponent}}
        save_checkpoint(file, key, Progress(run.step, states, run.records))

    return save


def _options_of(trainer: Trainer) -> dict[str, Any]:
    """What identifies an optimizer in a checkpoint: its class and its options."""
    kind = type(trainer.optimizers[0])
    groups = [
        {key: _words(value) for key, value in group.items() if key != "params"}
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    return {
        "optimizer": f"{kind.__module__}.{kind.__qualname__}",
        "groups": groups,
        "layout": trainer.layout,
    }


def _words(value: object) -> str:
    return repr(value.tolist()) if isinstance(value, Tensor) else describe(value)


def _states(trainer: Trainer) -> dict[str, Tensors]:
    """The weights, and what the optimizers keep, as tensors."""
    found: dict[str, Tensors] = {"weights": dict(trainer.weights)}
    for number, optimizer in enumerate(trainer.optimizers):
        saved = optimizer.state_dict()
        for key, state in saved["state"].items():
            found[f"state {number} {key}"] = _numbers(optimizer, state)
        for key, group in enumerate(saved["param_groups"]):
            changing = {
                name: value
                for name, value in group.items()
                if (is_number(value) or isinstance(value, Tensor)) and name != "params"
            }
            found[f"group {number} {key}"] = _numbers(optimizer, changing)
    return found


def _numbers(optimizer: Optimizer, state: dict[str, Any]) -> Tensors:
    found = {}
    for name, value in state.items():
        if value is None:
            continue
        if not (isinstance(value, Tensor | bool) or is_number(value)):
            raise TypeError(
                f"a checkpoint holds numbers and tensors, and {type(optimizer).__qualname__} keeps"
                f" {name!r} as {type(value).__name__}: run it without a checkpoint"
            )
        tensor = isinstance(value, Tensor)
        found[name] = value if tensor else torch.tensor(value, dtype=_dtype(value))
    return found


def _dtype(value: object) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.float64


def _restore(trainer: Trainer, copy: Trainer, states: dict[str, Tensors]) -> None:
    """Put stored tensors back; `copy` shows which of them were plain numbers."""
    for name, w in trainer.weights.items():
        w.copy_(states["weights"][name])
    for number, (optimizer, other) in enumerate(
        zip(trainer.optimizers, copy.optimizers, strict=True)
    ):
        saved = other.state_dict()
        for key, state in saved["state"].items():
            _fill(state, states[f"state {number} {key}"])
        for key, group in enumerate(saved["param_groups"]):
            _fill(group, states[f"group {number} {key}"])
        optimizer.load_state_dict(saved)


def _fill(target: dict[str, Any], values: Tensors) -> None:
    for name, x in values.items():
        target[name] = x if isinstance(target[name], Tensor) else x.item()
