"""Patches one after the other: composed, inverted, and the shortest way between two versions.

A version is a hash of hashes of tensors, so it depends on content alone: whoever has the same bits
has the same version, however they came there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from mirrorhead._files import is_temporary, sha256_of
from mirrorhead.patches.checkpoints import PatchError, bits, refuse
from mirrorhead.patches.file_format import TensorPatch, is_patch, read_hashes

if TYPE_CHECKING:
    from mirrorhead.patches.patch import Patch

Patches: TypeAlias = "str | Path | Sequence[Patch | str | Path]"
Hashes: TypeAlias = Mapping[str, "str | None"]


def version(hashes: Hashes) -> str:
    """SHA-256 of the names of tensors and their hashes."""
    return sha256_of(json.dumps(sorted(hashes.items())).encode())


def hashes(tensors: Mapping[str, TensorPatch], which: Literal["base", "result"]) -> Hashes:
    """The hash before or after for each tensor, under each of its names."""
    names = {name: (name, *part.tied) for name, part in tensors.items()}
    return {other: getattr(tensors[name], which) for name in names for other in names[name]}


@dataclass(frozen=True)
class Link:
    """A way from one version to another."""

    patch: Patch | Path
    base: str
    result: str
    base_hashes: Hashes
    result_hashes: Hashes
    reversible: bool
    back: bool = False  # against the patch's direction


def links(patches: Patches) -> list[Link]:
    """The patches as links, in their order; of a file, only its header is read."""
    if isinstance(patches, str | Path):
        folder = Path(patches)
        if not folder.is_dir():
            raise PatchError(f"patches must be a folder or a list of patches, got {folder}")
        # Those that a trainer is writing have no name yet.
        files = (f for f in sorted(folder.glob("*.safetensors")) if not is_temporary(f.name))
        patches = [file for file in files if is_patch(file)]
        if not patches:
            raise PatchError(f"{folder} holds no patches")
    if not patches:
        raise ValueError("patches must hold at least one patch")
    return [_link(patch) for patch in patches]


def _link(patch: Patch | str | Path) -> Link:
    if isinstance(patch, str | Path):
        patch = Path(patch)
        base, result, reversible = read_hashes(patch)
        if None in result.values():
            raise PatchError(f"{patch} does not know its result: it was merged without a base")
    else:
        patch.check_verifiable()
        base, result = hashes(patch.tensors, "base"), hashes(patch.tensors, "result")
        reversible = all(part.originals is not None for part in patch.tensors.values())
    return Link(patch, version(base), version(result), base, result, reversible)


def opened(patch: Patch | Path) -> Patch:
    """The patch itself, read if it is a file."""
    from mirrorhead.patches.patch import Patch

    return Patch.load(patch) if isinstance(patch, Path) else patch


def route(links: Sequence[Link], start: str, goal: str) -> list[Link]:
    """The fewest links that lead from one version to another, by breadth-first search."""
    back = [
        replace(link, base=link.result, result=link.base, back=True)
        for link in links
        if link.reversible
    ]
    came: dict[str, Link | None] = {start: None}
    reached = [start]
    for here in reached:  # grows while it is read
        for link in (*links, *back):
            if link.base == here and link.result not in came:
                came[link.result] = link
                reached.append(link.result)
    if goal not in came:
        raise PatchError(
            f"no chain of the {len(links)} patches leads from version {start[:12]} to"
            f" {goal[:12]}: a patch is missing, or the trainer continued from another version."
            " Take a full copy of the weights"
        )
    found: list[Link] = []
    while (link := came[goal]) is not None:
        found.insert(0, link)
        goal = link.base
    return found


def composed(
    first: Mapping[str, TensorPatch], then: Mapping[str, TensorPatch]
) -> dict[str, TensorPatch]:
    """What two patches do, the one after the other."""
    both = first.keys() & then.keys()
    problems = []
    for name in sorted(both):
        one, other = first[name], then[name]
        if one.info != other.info:
            problems.append(f"{name!r} is {one.info} in the first, {other.info} in the other")
        elif one.result is None or one.result != other.base:
            problems.append(f"{name!r} is not what the first patch leaves")
    refuse("the patches do not follow each other: ", problems)
    merged = {name: _composed(first[name], then[name]) for name in both}
    return dict(sorted({**first, **then, **merged}.items()))


def _composed(one: TensorPatch, other: TensorPatch) -> TensorPatch:
    tied = tuple(sorted({*one.tied, *other.tied}))
    size = one.info.size
    whole = one.index is None or other.index is None
    index = None if whole else torch.cat([_places(one), _places(other)]).unique()
    where = torch.arange(size) if index is None else index
    at_one, at_other = (torch.searchsorted(where, _places(part)) for part in (one, other))
    values = one.values.new_empty(len(where))
    values[at_one] = one.values
    values[at_other] = other.values
    originals = None
    if one.originals is not None and other.originals is not None:
        originals = one.values.new_empty(len(where))
        originals[at_other] = other.originals
        originals[at_one] = one.originals
        if index is not None:
            differs = bits(values) != bits(originals)
            index, values, originals = index[differs], values[differs], originals[differs]
    return TensorPatch(one.info, index, values, originals, one.base, other.result, tied)


def _places(part: TensorPatch) -> Tensor:
    return torch.arange(part.info.size) if part.index is None else part.index


def inverted(tensors: Mapping[str, TensorPatch]) -> dict[str, TensorPatch]:
    """The way back."""
    added = [f"{name!r} is new" for name, part in tensors.items() if part.added]
    refuse("a patch that adds tensors has no inverse; use revert: ", added)
    return {
        name: replace(
            part, values=part.before(), originals=part.values, base=part.result, result=part.base
        )
        for name, part in tensors.items()
    }


def emptied(tensors: Mapping[str, TensorPatch]) -> dict[str, TensorPatch]:
    """No change, from the results to themselves."""
    none = torch.zeros(0, dtype=torch.int64)
    return {
        name: replace(
            part, index=none, values=part.values[:0], originals=part.values[:0], base=part.result
        )
        for name, part in tensors.items()
    }
