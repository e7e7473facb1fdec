"""Checkpoints: everything a run needs to resume to the bit, in files that hold no code.

A checkpoint is a folder step-00000042/ with model.safetensors, optimizer.safetensors and
state.json, which has the checksums of the others and of itself. It appears whole (renamed into
place) or not at all, so that a process may be killed at any moment. Sharded tensors are gathered:
a run may resume with another number of processes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead._files import new_folder, remove_folder, sha256_of, write_json
from mirrorhead.optim._sharded import is_sharded
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.runtime.json_files import read_bytes, read_json

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class _OptimizerOptions:
    """The part of the optimizers' states that is not tensors: by parameter, and their groups."""

    numbers: dict[str, Any]
    groups: list[list[dict[str, Any]]]


@dataclass(frozen=True)
class _State:
    """state.json."""

    step: int
    optimizers: _OptimizerOptions
    run: dict[str, Any]
    sha256: dict[str, str]


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state: dict[str, Any],
    weights: bytes,
    *,
    keep: int,
    twin: Path | None = None,
    write: bool = True,
) -> None:
    """Save to folder/step-..., then remove all but the last `keep` checkpoints.

    Every process must call it, as sharded tensors are gathered; only one has `write`.

    Args:
        weights: of the model, as `packed` returns them.
        twin: a file that has them already. Where the file system has links, the checkpoint's
            file is another name of it, so that they are not written twice.
    """
    tensors, options = _optimizer_parts(model, optimizers)
    if not write:
        return
    with new_folder(folder / f"step-{step:08d}", durable=True, shared=True) as fresh:
        files = {MODEL: weights, OPTIMIZER: save(tensors)}
        if twin is not None:
            with suppress(OSError):
                os.link(twin, fresh / MODEL)
        for name, data in files.items():
            if not (fresh / name).exists():
                (fresh / name).write_bytes(data)
        content = {"step": step, "optimizers": options, "run": state}
        sums = {name: sha256_of(data) for name, data in files.items()}
        write_json(fresh / STATE, {**content, "sha256": {**sums, STATE: _sha256_json(content)}})
    for old in checkpoints(folder)[:-keep]:
        remove_folder(old)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first; other names in it are ignored."""
    found = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.glob("step-*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def load_checkpoint(path: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> Any:
    """Load a checkpoint into model and optimizers; return the run's own state."""
    try:
        state = read_json(path / STATE, _State)
        weights, tensors = (_load_tensors(path / name, state) for name in (MODEL, OPTIMIZER))
        content = json.loads((path / STATE).read_bytes())
        del content["sha256"]
        if state.sha256.get(STATE) != _sha256_json(content):
            raise RunError(f"{path / STATE} is damaged: its content does not have its checksum")
    except RunError as error:
        raise RunError(f"{error}. Delete {path} to resume from an earlier checkpoint") from error
    load_weights(model, weights, path)
    try:
        _load_optimizers(model, optimizers, tensors, state.optimizers)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        remedy = "Delete it to resume from an earlier checkpoint"
        raise RunError(f"{path} does not fit this optimizer ({error!r}). {remedy}") from error
    return state.run


def _load_tensors(path: Path, state: _State) -> dict[str, Tensor]:
    content = read_bytes(path)
    if state.sha256.get(path.name) != sha256_of(content):
        raise RunError(f"{path} is damaged: its checksum is not the one in {STATE}")
    try:
        return load(content)
    except SafetensorError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _sha256_json(content: Any) -> str:
    return sha256_of(json.dumps(content, sort_keys=True).encode())


def packed(model: nn.Module, about: dict[str, str]) -> bytes:
    """Return a file of the model's weights and buffers, with at most one entry about them.

    With several, safetensors would write them in any order, and files should be the same.
    """
    return save({name: _whole(tensor) for name, tensor in model.state_dict().items()}, about)


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    """Copy weights into a model, which must have the same names and shapes."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise RunError(f"{where} is of another model: they differ in {', '.join(odd[:5])}")
    for name, tensor in own.items():
        saved = weights[name]
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise RunError(
                f"{where} is of another model: {name} is {tuple(saved.shape)} {saved.dtype} there,"
                f" {tuple(tensor.shape)} {tensor.dtype} here"
            )
        tensor.copy_(_like(saved, tensor))


def _optimizer_parts(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizers' tensors by "name of parameter/name of state", and the rest."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    states = [item for optimizer in optimizers for item in optimizer.state.items()]
    entries = {f"{names[p]}/{k}": v for p, own in states for k, v in own.items()}
    tensors = {key: _whole(value) for key, value in entries.items() if isinstance(value, Tensor)}
    numbers = {key: value for key, value in entries.items() if key not in tensors}
    groups = [[_options(group) for group in one.param_groups] for one in optimizers]
    return tensors, {"numbers": numbers, "groups": groups}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    # torch adds "differentiable" to groups that are loaded: without it, files are the same.
    return {
        key: float(value) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names", "differentiable")
    }


def _load_optimizers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tensors: dict[str, Tensor],
    options: _OptimizerOptions,
) -> None:
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    fresh = [optimizer.state_dict() for optimizer in optimizers]
    states: list[dict[int, dict[str, Any]]] = [{} for _ in optimizers]
    place: dict[str, tuple[dict[int, dict[str, Any]], int, Tensor]] = {}
    for optimizer, empty, state in zip(optimizers, fresh, states, strict=True):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        indices = [index for group in empty["param_groups"] for index in group["params"]]
        place |= {names[p]: (state, i, p) for i, p in zip(indices, params, strict=True)}
    # Sharding a tensor is a collective operation: every process must do them in one order, and
    # safetensors gives names in any.
    for full_name, value in [*sorted(tensors.items()), *options.numbers.items()]:
        name, key = full_name.rsplit("/", 1)
        state, index, param = place[name]
        if isinstance(value, Tensor) and value.shape == param.shape:
            value = _like(value, param)
        state.setdefault(index, {})[key] = value
    parts = zip(optimizers, fresh, states, options.groups, strict=True)
    for optimizer, empty, state, saved_groups in parts:
        groups = [
            group | {key: tuple(v) if isinstance(v, list) else v for key, v in saved.items()}
            for group, saved in zip(empty["param_groups"], saved_groups, strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if is_sharded(tensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True).contiguous()


def _like(saved: Tensor, tensor: Tensor) -> Tensor:
    """Return the whole tensor `saved` on the device of `tensor`, sharded in the same way."""
    saved = saved.to(tensor.device)
    if not is_sharded(tensor):
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved, tensor.device_mesh, tensor.placements)
