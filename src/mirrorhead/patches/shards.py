"""Where the part of a tensor that this process holds lies in the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mirrorhead.patches.checkpoints import PatchError


@dataclass(frozen=True)
class Region:
    """A box in a tensor: all of it, or the shard of a DTensor.

    >>> right = Region((2, 4), (2, 1), (0, 3), True)  # the last column of a 2 x 4 matrix
    >>> right.globally(torch.tensor([0, 1])).tolist()
    [3, 7]
    >>> right.locally(torch.tensor([0, 3, 7])).tolist()
    [-1, 0, 1]
    """

    whole: tuple[int, ...]  # shape of the tensor
    shape: tuple[int, ...]  # of the box
    offset: tuple[int, ...]  # of its first entry in the tensor
    owned: bool  # whether this process speaks for the box, of all that hold a copy of it

    def globally(self, index: Tensor) -> Tensor:
        """Flat positions in the tensor, from ascending flat positions in the box: ascending too."""
        if self.shape == self.whole:
            return index
        result = torch.zeros_like(index)
        rest = index
        stride = 1
        for whole, length, offset in zip(
            self.whole[::-1], self.shape[::-1], self.offset[::-1], strict=True
        ):
            result += (rest % length + offset) * stride
            rest = rest // length
            stride *= whole
        return result

    def locally(self, index: Tensor) -> Tensor:
        """The inverse; -1 for positions outside of the box."""
        if self.shape == self.whole:
            return index
        result, rest, stride = torch.zeros_like(index), index, 1
        inside = torch.ones_like(index, dtype=torch.bool)
        for whole, length, offset in zip(
            self.whole[::-1], self.shape[::-1], self.offset[::-1], strict=True
        ):
            place = rest % whole - offset
            inside &= (place >= 0) & (place < length)
            result += place * stride
            rest = rest // whole
            stride *= length
        return result.where(inside, -1)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of FSDP2 or tensor parallelism."""
    return type(tensor).__name__ == "DTensor"


def local_part(name: str, tensor: Any, alone: bool) -> tuple[Tensor, Region]:
    """What this process holds of a tensor. `alone` says that no other process takes part."""
    if not is_sharded(tensor):
        shape = tuple(tensor.shape)
        owned = alone or dist.get_rank() == 0
        return tensor.detach(), Region(shape, shape, (0,) * len(shape), owned)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    kinds = [type(placement).__name__ for placement in tensor.placements]
    if strange := sorted({*kinds} - {"Shard", "Replicate"}):
        raise PatchError(
            f"{name!r} is laid out by {', '.join(strange)}; a sync takes Shard and Replicate"
        )
    mesh = tensor.device_mesh
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    at = mesh.get_coordinate()
    copies = [k for k, kind in enumerate(kinds) if kind == "Replicate"]
    owned = at is not None and all(at[k] == 0 for k in copies)
    return tensor.to_local().detach(), Region(
        tuple(tensor.shape), tuple(shape), tuple(offset), owned
    )


def gathered(value: Any, alone: bool) -> list[Any]:
    """This object of every process, in the order of their ranks."""
    if alone:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
