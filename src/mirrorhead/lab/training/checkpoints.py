"""Checkpoints: everything a run needs to go on, to the bit, in files that hold no code.

A checkpoint is a folder step-00000042/ with model.safetensors, optimizer.safetensors and
state.json. It appears whole (renamed into place) or not at all, so that a process may be
killed at any moment. Sharded tensors are gathered: a run may go on with another number of
processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mirrorhead._files import new_folder, remove_folder, write_json

FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint that is damaged, or of another model."""


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    *,
    keep: int,
    write: bool = True,
) -> None:
    """Save to folder/step-..., then remove all but the last `keep`.

    Every process of a team must call it, as sharded tensors are gathered; one has `write`.
    """
    weights = model_tensors(model)
    tensors, options = _optimizer_parts(model, optimizer)
    if not write:
        return
    name = f"step-{step:08d}"
    with new_folder(folder / name, durable=True) as fresh:
        save_file(weights, fresh / "model.safetensors")
        save_file(tensors, fresh / "optimizer.safetensors")
        write_json(
            fresh / "state.json",
            {"format": FORMAT, "step": step, "optimizer": options, "run": state},
        )
    for old in checkpoints(folder)[:-keep]:
        remove_folder(old)


def checkpoints(folder: Path) -> list[Path]:
    """Those that are there, oldest first."""
    return sorted(folder.glob("step-*"))


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Put a checkpoint into model and optimizer; returns the run's own state."""
    try:
        about = json.loads((path / "state.json").read_text())
        weights = load_file(path / "model.safetensors")
        tensors = load_file(path / "optimizer.safetensors")
        if about["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {about['format']}, this is {FORMAT}")
        load_tensors(model, weights, path)
        _load_optimizer(model, optimizer, tensors, about["optimizer"])
        return about["run"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} can not be loaded ({error!r}): delete it to go on from an earlier one"
        ) from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, whole, on the CPU, each with memory of its own."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def load_tensors(model: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    """Copy weights into a model, which must have the same names and shapes."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise CheckpointError(f"{where} is of another model: they differ in {', '.join(odd[:5])}")
    for name, tensor in own.items():
        saved = weights[name]
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise CheckpointError(
                f"{where} is of another model: {name} is {tuple(saved.shape)} {saved.dtype} there,"
                f" {tuple(tensor.shape)} {tensor.dtype} here"
            )
        tensor.copy_(_like(saved, tensor))


def _optimizer_parts(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state: tensors by "name of parameter/name of state", and all else."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{names[param]}/{key}"] = _whole(value)
            else:
                numbers[f"{names[param]}/{key}"] = value
    # torch adds "differentiable" to groups that are loaded: without it, files are the same.
    groups = [
        {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names", "differentiable")
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"numbers": numbers, "groups": groups}


def _load_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], options: dict[str, Any]
) -> None:
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    fresh = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in fresh["param_groups"] for index in group["params"]]
    place = {names[param]: (index, param) for index, param in zip(indices, params, strict=True)}
    state: dict[int, dict[str, Any]] = {}
    for full_name, value in [*tensors.items(), *options["numbers"].items()]:
        name, key = full_name.rsplit("/", 1)
        index, param = place[name]
        if isinstance(value, Tensor) and value.shape == param.shape:
            value = _like(value, param)
        state.setdefault(index, {})[key] = value
    groups = [
        {
            **group,
            **{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()},
        }
        for group, saved in zip(fresh["param_groups"], options["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True).contiguous()


def _like(saved: Tensor, tensor: Tensor) -> Tensor:
    """The whole tensor `saved`, on the device of `tensor` and sharded as it is."""
    saved = saved.to(tensor.device)
    if isinstance(tensor, DTensor):
        return distribute_tensor(saved, tensor.device_mesh, tensor.placements)
    return saved
