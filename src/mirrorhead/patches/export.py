"""Patches in other people's formats: sparse entries, PEFT's SHiRA adapters, plain tensors.

Entries are positions and new values, right to the bit. SHiRA and plain tensors hold differences,
which are added to the base: right up to rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from mirrorhead._files import new_folder, write_atomically, write_json
from mirrorhead.patches.checkpoints import PatchError, bits, refuse
from mirrorhead.patches.file_format import TensorPatch

_SUFFIX = ".weight"


class SparseWeight(NamedTuple):
    """Entries of one tensor, with the names that vLLM's `SparseWeightPatch` has for them."""

    name: str
    full_shape: tuple[int, ...]
    indices: Tensor  # (count,), int32, ascending positions in the flat tensor
    values: Tensor  # (count,), what stands there afterwards


def sparse_weights(tensors: Mapping[str, TensorPatch]) -> dict[str, SparseWeight]:
    """name -> entries, of the tensors that change."""
    found = {}
    for name, patch in tensors.items():
        if patch.info.size > 2**31:
            raise PatchError(f"{name!r} has {patch.info.size:,} entries: too many for int32")
        index = torch.arange(patch.info.size) if patch.index is None else patch.index
        if len(index):
            found[name] = SparseWeight(name, patch.info.shape, index.int(), patch.values.clone())
    return found


def write_sparse(
    tensors: Mapping[str, TensorPatch], file: Path, versions: Mapping[str, str]
) -> None:
    """Write entries as NAME.indices and NAME.values; shapes and versions are in the metadata."""
    found = sparse_weights(tensors)
    stored = {f"{name}.indices": entry.indices for name, entry in found.items()}
    stored |= {f"{name}.values": entry.values for name, entry in found.items()}
    shapes = {name: list(entry.full_shape) for name, entry in found.items()}
    write_atomically(file, save(stored, {**versions, "shapes": json.dumps(shapes)}), replace=False)


def state_dict(tensors: Mapping[str, TensorPatch]) -> dict[str, Tensor]:
    """name -> change: sparse COO where the patch is sparse, dense where it is whole or new."""
    found = {}
    for name, patch in tensors.items():
        change = _change(name, patch)
        if patch.index is None or not patch.info.shape:  # a scalar has no places
            found[name] = change.reshape(patch.info.shape)
        else:
            places = torch.stack(torch.unravel_index(patch.index, patch.info.shape))
            found[name] = torch.sparse_coo_tensor(
                places, change, patch.info.shape, is_coalesced=True, check_invariants=True
            )
    return found


def write_shira(tensors: Mapping[str, TensorPatch], folder: Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base, folder)` loads.

    SHiRA gives a matrix of m x n weights exactly r (m + n) changes, with one r for all
    matrices. r is the least that holds every matrix's changes; the rest is filled with zeros.
    Only weights of linear layers are possible, and r (m + n) must not exceed m n.
    """
    if folder.exists():
        raise PatchError(f"{folder} exists; give the path of a new folder")
    problems = [
        f"{name!r} is not a sparsely changed weight matrix"
        for name, patch in tensors.items()
        if patch.index is None or len(patch.info.shape) != 2 or not name.endswith(_SUFFIX)
    ]
    problems += [] if tensors else ["the patch is empty"]
    refuse("SHiRA holds changes of linear layers' weights only: ", problems)
    rank = max(math.ceil(len(p.values) / sum(p.info.shape)) for p in tensors.values())
    stored = {}
    for name, patch in tensors.items():
        assert patch.index is not None
        count = rank * sum(patch.info.shape)
        if count > patch.info.size:
            raise PatchError(
                f"the patch is too dense for SHiRA: r = {rank} is needed, and {name!r} of shape"
                f" {list(patch.info.shape)} has no room for {count:,} changes"
            )
        weight = torch.zeros(count)
        weight[: len(patch.values)] = _change(name, patch).float()
        places = torch.zeros(2, count, dtype=torch.int32)  # the rest adds 0 to weight (0, 0)
        where = torch.stack(torch.unravel_index(patch.index, patch.info.shape))
        places[:, : len(patch.values)] = where.int()
        layer = f"base_model.model.{name.removesuffix(_SUFFIX)}"
        stored |= {f"{layer}.shira_weight": weight, f"{layer}.shira_indices": places}
    config = {
        "peft_type": "SHIRA",
        "r": rank,
        "mask_type": "random",  # PEFT draws a mask and then loads our positions over it
        "target_modules": [name.removesuffix(_SUFFIX) for name in tensors],
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }
    with new_folder(folder) as fresh:
        write_atomically(fresh / "adapter_model.safetensors", save(stored, {"format": "pt"}))
        write_json(fresh / "adapter_config.json", config)


def _change(name: str, patch: TensorPatch) -> Tensor:
    if patch.added:
        return patch.values.clone()
    before = patch.before()
    change = patch.values.double() - before.double()
    change = change.masked_fill(bits(patch.values) == bits(before), 0)  # an infinity that stays
    if not patch.info.floating:
        raise PatchError(f"tensor {name!r} is {patch.info.dtype}: differences need floating point")
    return change.to(patch.values.dtype)
