"""A tensor as it would be with a patch's values in it, hashed piece by piece; the checks on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mirrorhead._files import sha256_of
from mirrorhead.patches.checkpoints import Checkpoint, PatchError, bits, raw
from mirrorhead.patches.file_format import TensorPatch
from mirrorhead.patches.selection import few


def overlaid(start: int, piece: Tensor, index: Tensor | None, values: Tensor) -> Tensor:
    """A copy of the piece at `start` of a flat tensor, with the values at these positions."""
    here = _span(start, piece, index)
    if index is None:
        return values[here]
    piece = piece.clone()
    piece[index[here] - start] = values[here]
    return piece


def picked(start: int, piece: Tensor, index: Tensor | None) -> Tensor:
    """The numbers of the piece at `start` of a flat tensor that stand at these positions."""
    return piece if index is None else piece[index[_span(start, piece, index)] - start]


def _span(start: int, piece: Tensor, index: Tensor | None) -> slice:
    """Which of the ascending positions (None: all) lie in the piece."""
    ends = torch.tensor([start, start + len(piece)])
    return slice(*(ends if index is None else torch.searchsorted(index, ends)).tolist())


def digests(
    checkpoint: Checkpoint, name: str, index: Tensor | None, values: Tensor
) -> tuple[str, str]:
    """SHA-256 of a tensor as it is, and with the values in it."""
    plain, changed = hashlib.sha256(), hashlib.sha256()
    for start, piece in checkpoint.pieces(name):
        plain.update(raw(piece))
        changed.update(raw(overlaid(start, piece, index, values)))
    return plain.hexdigest(), changed.hexdigest()


def by_target_name(
    target: Checkpoint, tensors: Mapping[str, TensorPatch]
) -> dict[str, TensorPatch]:
    """The tensors by the names that the target has for them.

    Where the target has a copy for each of several tied names, all of them get the patch. Where
    they share memory there, one does.
    """
    found: dict[str, TensorPatch] = {}
    for name, patch in tensors.items():
        there = [other for other in (name, *patch.tied) if other in target.infos]
        memories = {target.aliases.get(other, other): other for other in reversed(there)}
        found |= dict.fromkeys(memories.values() or [name], patch)
    return dict(sorted(found.items()))


def check_applicable(
    target: Checkpoint, tensors: Mapping[str, TensorPatch], step: Callable[[int], None]
) -> None:
    """Raise PatchError unless every tensor is the base's, to the bit."""
    _check_shapes(target, tensors)
    problems = []
    for name, patch in tensors.items():
        if patch.added:
            if patch.result not in (None, sha256_of(raw(patch.values))):
                problems.append(f"the values for {name!r} are not those that the patch names")
            continue
        found, result = digests(target, name, patch.index, patch.values)
        if found == patch.base and patch.result not in (None, result):
            problems.append(f"the values for {name!r} do not give the result that the patch names")
        elif found != patch.base and found == patch.result:
            problems.append(f"{name!r} is already patched with this patch")
        elif found != patch.base:
            problems.append(f"{name!r} differs from the base that the patch was made for")
        step(target.infos[name].bytes)
    if problems:
        raise PatchError(few(f"the patch does not apply to {target.label}: ", problems))


def check_revertible(
    target: Checkpoint, tensors: Mapping[str, TensorPatch], step: Callable[[int], None]
) -> None:
    """Raise PatchError unless putting the originals back gives the base, to the bit."""
    _check_shapes(target, tensors)
    problems = []
    for name, patch in tensors.items():
        if name not in target.infos:  # a new tensor, which is gone already
            continue
        if patch.originals is None and not patch.added:
            raise PatchError(
                "the patch was saved without the base's values; use with_originals(base)"
            )
        if not _holds(target, name, patch):
            problems.append(f"{name!r} does not hold the patch's values")
        elif (
            patch.originals is not None
            and digests(target, name, patch.index, patch.originals)[1] != patch.base
        ):
            problems.append(f"{name!r} was changed after it was patched, or has another base")
        step(target.infos[name].bytes)
    if problems:
        raise PatchError(few(f"the patch cannot be reverted on {target.label}: ", problems))


def _check_shapes(target: Checkpoint, tensors: Mapping[str, TensorPatch]) -> None:
    problems = []
    for name, patch in tensors.items():
        if name not in target.infos:
            if not patch.added:
                problems.append(f"it has no tensor {name!r}")
        elif target.infos[name] != patch.info:
            problems.append(f"{name!r} is {target.infos[name]} there, {patch.info} in the patch")
    for name, first in target.aliases.items():
        if name in tensors and first in tensors and not _equal(tensors[name], tensors[first]):
            problems.append(f"{name!r} and {first!r} are one tensor there, two in the patch")
    if problems:
        raise PatchError(few(f"the patch does not fit {target.label}: ", problems))


def _equal(one: TensorPatch, other: TensorPatch) -> bool:
    """Whether two patches of tensors write the same values to the same places."""
    if (one.index is None) != (other.index is None) or len(one.values) != len(other.values):
        return False
    places = one.index is None or other.index is None or torch.equal(one.index, other.index)
    return places and torch.equal(bits(one.values), bits(other.values))


def _holds(target: Checkpoint, name: str, patch: TensorPatch) -> bool:
    for start, piece in target.pieces(name):
        wanted = patch.values[_span(start, piece, patch.index)]
        if not torch.equal(bits(picked(start, piece, patch.index)), bits(wanted)):
            return False
    return True
