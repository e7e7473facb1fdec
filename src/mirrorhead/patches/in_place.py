"""Values written into tensors in memory: all of them, or none.

`stage` does everything that can fail: it refuses tensors whose elements share memory, and allocates
what the writes need. `commit` then writes, and rolls everything back if that fails nevertheless.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mirrorhead.patches.checkpoints import MemoryCheckpoint, PatchError, bits, refuse
from mirrorhead.patches.overlay import Edit, overlaid


class _Write(NamedTuple):
    name: str
    tensor: Tensor
    places: tuple[Any, ...]  # what `tensor` is indexed by
    before: Tensor
    after: Tensor

    def put(self, values: Tensor) -> None:
        with torch.no_grad():
            self.tensor[self.places] = values

    def undone(self) -> bool:
        """Put the old values back, and return whether they are there."""
        try:
            self.put(self.before)
        except BaseException:
            # The write itself may have failed in this way, before it changed anything.
            return torch.equal(bits(self.tensor[self.places]), bits(self.before))
        return True


@dataclass(frozen=True)
class Staged:
    """Writes that are checked and ready."""

    target: Any  # the model, or the mapping that gets and loses tensors
    writes: list[_Write]
    added: Mapping[str, Tensor]
    removed: Mapping[str, Tensor]

    def commit(self) -> None:
        """Write everything; if anything fails, nothing is changed."""
        begun: list[_Write] = []
        try:
            for write in self.writes:
                begun.append(write)  # first: a write that fails may have written a part
                write.put(write.after)
            for name, tensor in self.added.items():
                self.target[name] = tensor
            for name in self.removed:
                del self.target[name]
        except BaseException as error:
            for name in self.added:
                self.target.pop(name, None)
            for name, tensor in self.removed.items():
                if name not in self.target:
                    self.target[name] = tensor
            if lost := [write.name for write in reversed(begun) if not write.undone()]:
                raise RuntimeError(
                    f"writing failed, and the old values of {', '.join(map(repr, lost))} could not"
                    " be put back: load the target again"
                ) from error
            raise


def stage(target: Any, source: MemoryCheckpoint, edit: Edit) -> Staged:
    """Check that the edit can be written into the tensors of `source`, and prepare it.

    `target` is the model or mapping that `source` was opened from.
    """
    own = {name: part for name, part in edit.values.items() if name in source.tensors}
    _check_writable(source.tensors, own)
    _check_apart(source, own)
    writes = []
    for name, (index, values) in own.items():
        tensor, places = _indexed(source.tensors[name], index)
        before = tensor[places].clone()
        after = values.to(tensor.device).reshape(before.shape)
        writes.append(_Write(name, tensor, places, before, after))
    added = {
        name: values.reshape(edit.added[name].shape).clone()
        for name, (_, values) in edit.values.items()
        if name not in own
    }
    removed = {name: target[name] for name in edit.removed if name in target}
    return Staged(target, writes, added, removed)


def check_memory(model: nn.Module, state: MemoryCheckpoint, names: Iterable[str]) -> None:
    """Refuse a model whose state_dict() is a copy: what is written there would be lost."""
    own = {_memory_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name in names:
        tensor = state.tensors.get(name)
        if tensor is not None and tensor.numel() and _memory_of(tensor) not in own:
            raise PatchError(
                f"the model's state_dict() gives a copy of {name!r}: apply the patch to the state"
                " dict and load that"
            )


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share memory, as in expanded tensors.

    >>> overlaps_itself(torch.zeros(3, 4).t()), overlaps_itself(torch.zeros(3, 1).expand(3, 4))
    (False, True)
    """
    axes = [pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] > 1]
    reach = 0  # offset of the last element along the axes so far
    apart = True
    for stride, size in sorted(axes):
        apart &= stride > reach
        reach += (size - 1) * stride
    if apart or not tensor.numel():
        return False
    if reach + 1 < tensor.numel() or any(stride == 0 for stride, _ in axes):
        return True
    # Strides of which none exceeds the reach of the smaller ones may still be right: count.
    used = torch.zeros(reach + 1, dtype=torch.bool)
    used.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(used.count_nonzero()) < tensor.numel()


def _check_writable(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    problems = []
    sealed = _sealed_memory()
    for name in names:
        if overlaps_itself(tensors[name]):
            problems.append(
                f"elements of {name!r} share memory, as in an expanded tensor; copy it first, as"
                " with .clone()"
            )
        elif tensors[name].is_inference() and not torch.is_inference_mode_enabled():
            problems.append(f"{name!r} was made under torch.inference_mode(); copy it first")
        elif _lies_in(sealed, tensors[name]):
            problems.append(
                f"{name!r} lies in memory that cannot be written, as a file mapped for reading;"
                " copy it first"
            )
    refuse("the target cannot be changed in place: ", problems)


def _sealed_memory() -> list[tuple[int, int]]:
    """Addresses (first, end), ascending, where a write would end the process; Linux tells them."""
    try:
        lines = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    found = re.findall(rb"^([0-9a-f]+)-([0-9a-f]+) .-", lines, re.MULTILINE)
    return [(int(first, 16), int(end, 16)) for first, end in found]


def _lies_in(ranges: list[tuple[int, int]], tensor: Tensor) -> bool:
    """Whether a byte of the tensor lies in one of the ranges."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    start, end = _span(tensor)
    last = bisect_right(ranges, (end - 1, end)) - 1  # the last range that begins before the end
    return last >= 0 and ranges[last][1] > start


def _check_apart(source: MemoryCheckpoint, values: Mapping[str, Any]) -> None:
    """Refuse tensors that overlap in memory, unless all of them get what they should.

    Where two tensors overlap, the edit is tried out on a copy of their memory. Tied weights, which
    have all of their memory in common, are one tensor here.
    """
    edits = {source.aliases.get(name, name): part for name, part in values.items()}
    own = {n: t for n, t in source.tensors.items() if t.numel() and n not in source.aliases}
    for group in _groups(own):
        if len(group) == 1 or edits.keys().isdisjoint(group):
            continue
        copies = _copy_of_memory([own[name] for name in group])
        trial = dict(zip(group, copies, strict=True))
        for name in edits.keys() & trial.keys():
            index, after = edits[name]
            tensor, places = _indexed(trial[name], index)
            tensor[places] = after.reshape(tensor[places].shape)
        for name, found in trial.items():
            expected = own[name].reshape(-1).cpu()
            if name in edits:
                expected = overlaid(0, expected, *edits[name])
            if not torch.equal(bits(found.reshape(-1)), bits(expected)):
                others = ", ".join(repr(other) for other in group if other != name)
                raise PatchError(
                    f"{name!r} overlaps in memory with {others}, and they cannot all hold their"
                    " values: copy them first"
                )


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield names in groups, such that no memory of one group lies between that of another."""
    group: list[str] = []
    last: tuple[str, int] = ("", 0)  # device, end of the memory of the group
    spans = [(str(t.device), *_span(t), name) for name, t in tensors.items()]
    for device, start, end, name in sorted(spans):
        if group and (device, start) >= last:
            yield group
            group = []
        last = max(last, (device, end)) if group else (device, end)
        group.append(name)
    if group:
        yield group


def _copy_of_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors that overlap among each other as the tensors do."""
    spans = [_span(tensor) for tensor in tensors]
    first = min(start for start, _ in spans) // 16 * 16
    memory = torch.zeros(max(end for _, end in spans) - first, dtype=torch.uint8)
    copies = []
    for tensor, (start, _) in zip(tensors, spans, strict=True):
        place, rest = divmod(start - first, tensor.element_size())
        if rest:
            raise PatchError("tensors of different dtypes overlap in memory: copy them first")
        copy = torch.zeros(0, dtype=tensor.dtype)
        copy.set_(memory.untyped_storage(), place, tensor.shape, tensor.stride())
        _once(copy).copy_(_once(tensor))
        copies.append(copy)
    return copies


def _once(tensor: Tensor) -> Tensor:
    """An expanded tensor before it was expanded."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor, and of the first one behind it."""
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    elements = 1 + sum((size - 1) * stride for stride, size in axes)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _memory_of(tensor: Tensor) -> tuple[torch.device, int]:
    """Which memory a tensor, or the tensor that it is a view of, lies in."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def _indexed(tensor: Tensor, index: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
    """The tensor, flat if it can be, and what indexes these positions (None: all) in it."""
    if index is None:
        return tensor, (...,)
    index = index.to(tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1), (index,)
    return tensor, torch.unravel_index(index, tensor.shape)
