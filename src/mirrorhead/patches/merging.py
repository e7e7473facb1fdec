"""Several patches of one base as one: sums, means, and sign election as in TIES merging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from mirrorhead.patches.checkpoints import DTYPES, PatchError, bits
from mirrorhead.patches.file_format import TensorPatch

if TYPE_CHECKING:
    from mirrorhead.patches.patch import Patch

Method = Literal["sum", "mean", "ties"]
METHODS: tuple[Method, ...] = get_args(Method)


def merged(patches: Sequence[Patch], method: str) -> tuple[dict[str, TensorPatch], int]:
    """The merged tensors, and the number of weights of the base."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if not patches:
        raise ValueError("patches must hold at least one patch")
    if len({patch.weights for patch in patches}) > 1:
        sizes = ", ".join(f"{patch.weights:,}" for patch in patches)
        raise PatchError(f"the patches are of different bases: of {sizes} weights")
    tensors = {}
    for name in sorted({name for patch in patches for name in patch.tensors}):
        parts = [patch.tensors[name] for patch in patches if name in patch.tensors]
        _check(name, parts)
        new = parts[0] if parts[0].added else _merged_tensor(name, parts, method, len(patches))
        tied = {other for part in parts for other in part.tied}
        if len(new.values):
            tensors[name] = replace(new, tied=tuple(sorted(tied)))
    for name, patch in tensors.items():
        if both := sorted(tensors.keys() & set(patch.tied)):
            raise PatchError(
                f"{name!r} and {both[0]!r} are one tensor in one of the patches, two in another"
            )
    return tensors, patches[0].weights


def _check(name: str, parts: Sequence[TensorPatch]) -> None:
    first = parts[0]
    for part in parts:
        if part.base != first.base or part.info != first.info:
            raise PatchError(f"the patches are of different bases: they differ in tensor {name!r}")
        if not part.added:
            part.before()
        if part.added and not torch.equal(bits(part.values), bits(first.values)):
            raise PatchError(
                f"tensor {name!r} is new in several patches, with different values; leave it out"
                f' with patch.without("{name}") and keep one for each task'
            )


def _merged_tensor(name: str, parts: Sequence[TensorPatch], method: str, count: int) -> TensorPatch:
    size = parts[0].info.size
    indices = [torch.arange(size) if part.index is None else part.index for part in parts]
    index = torch.cat(indices).unique()  # ascending
    places = [torch.searchsorted(index, own) for own in indices]
    dtype = DTYPES[parts[0].info.dtype]
    originals = torch.empty(len(index), dtype=dtype)
    exact = torch.empty(len(index), dtype=dtype)  # the value, where one patch alone gives it
    changes = torch.zeros(len(parts), len(index), dtype=torch.float64)
    present = torch.zeros(len(index), dtype=torch.int64)
    for row, (part, place) in enumerate(zip(parts, places, strict=True)):
        before = part.before()
        moved = bits(part.values) != bits(before)
        originals[place], exact[place[moved]] = before, part.values[moved]
        changes[row, place] = part.values.double() - before.double()
        present[place] += moved
    change = _change(changes, method, count)
    values = (originals.double() + change).to(dtype)
    alone = present == 1
    if method != "mean" or count == 1:
        values[alone] = exact[alone]
    values[present == 0] = originals[present == 0]
    if bool((values.double().isfinite() < originals.double().isfinite()).any()):
        raise PatchError(f"the changes of tensor {name!r} add up to more than {dtype} can hold")
    first = replace(parts[0], result=None)
    if any(part.index is None for part in parts):
        return replace(first, index=None, values=values, originals=originals)
    # A change that rounds to the base's own bits is none.
    keep = bits(values) != bits(originals)
    return replace(first, index=index[keep], values=values[keep], originals=originals[keep])


def _change(changes: Tensor, method: str, count: int) -> Tensor:
    """One change for each weight from the patches' changes, (patches, weights) -> (weights,)."""
    total = changes.sum(0)
    if method == "sum":
        return total
    if method == "mean":
        return total / count
    agree = changes.sign() == total.sign()
    return (changes * agree).sum(0) / agree.sum(0).clamp(min=1)
