"""`WeightSync`: exactly the weights whose bits changed, as patches with versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mirrorhead.patches import chains
from mirrorhead.patches.checkpoints import (
    DTYPES,
    NAMES,
    MemoryCheckpoint,
    PatchError,
    TensorInfo,
    bits,
)
from mirrorhead.patches.file_format import TensorPatch
from mirrorhead.patches.fingerprint import Changes, Fingerprint, changed
from mirrorhead.patches.patch import Patch
from mirrorhead.patches.shards import Region, gathered, is_sharded, local_part

_AGAIN = "make a new WeightSync, and give receivers a full copy"
_PIECE = 1 << 18  # entries that are compared at a time


@dataclass
class _Part:
    """A tensor as this process holds it, at the last commit."""

    info: TensorInfo  # of the whole tensor, in the dtype that is sent
    tied: tuple[str, ...]
    region: Region
    snapshot: Tensor  # flat, this process's region
    total: Fingerprint  # of the whole tensor

    def changes(self, now: Tensor) -> Changes:
        """Where this process's region differs from the snapshot; positions inside the region."""
        flat = now.reshape(-1)
        places = torch.zeros(0, dtype=torch.int64)
        found = [Changes(places, *[self.snapshot[:0].cpu()] * 2)]
        for start in range(0, len(flat), _PIECE):
            here = changed(flat[start : start + _PIECE], self.snapshot[start : start + _PIECE])
            found.append(here._replace(places=here.places + start))
        return Changes(*map(torch.cat, zip(*found, strict=True)))


class _Pending(NamedTuple):
    changes: dict[str, Changes]  # of this process's regions
    totals: dict[str, Fingerprint]


class WeightSync:
    """Finds the weights whose bits changed since the last commit, whatever optimizer moved them.

    It keeps a copy of the weights in the dtype that is sent, and compares. A `Patch` from `collect`
    names every tensor with a hash before and after, so a receiver can tell its version from any
    other, and nothing applies to wrong weights.

    Attributes:
        version: hash of all weights at the last commit, in the dtype that is sent.
        number: how many times the base was advanced.

    Args:
        weights: the model, or a state dict, or `model.named_parameters()`. Of a model, all that is
            in its `state_dict()` is sent, read again each time.
        dtype: what floating-point weights are cast to, as the receivers have them; None for the
            dtypes that they have. Integers are sent as they are.

    With FSDP2 every process makes one and calls its methods at the same time; each gets the same
    patch, in the coordinates of an unsharded checkpoint.

    >>> model, served = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    >>> sync = WeightSync(model)
    >>> _ = served.load_state_dict(sync.weights())
    >>> with torch.no_grad():
    ...     _ = model.weight[0, 1].add_(1.0), model.weight[1, 1].mul_(1 + 1e-6)
    >>> patch = sync.collect()
    >>> patch.count  # the other change is lost by rounding to bfloat16
    1
    >>> patch.apply(served)
    >>> torch.equal(served.weight, model.weight.bfloat16())
    True
    """

    def __init__(
        self,
        weights: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        if dtype is not None and not (dtype in NAMES and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point dtype or None, got {dtype!r}")
        self._source = weights if isinstance(weights, nn.Module) else _named(weights)
        self._dtype = dtype
        self.number = 0
        self._pending: _Pending | None = None
        self._committing = False
        self._alone = not any(map(is_sharded, self._tensors().values()))
        self._aliases: dict[str, str] | None = None
        self._parts = self._read()

    @property
    def version(self) -> str:
        names = {name: (name, *part.tied) for name, part in self._parts.items()}
        return chains.version(
            {other: str(self._parts[name].total) for name in names for other in names[name]}
        )

    def collect(self, *, commit: bool = True) -> Patch:
        """Return the patch from the base to the weights as they are now.

        With commit=False the base stays until `commit` is called: what was not committed, because
        publishing failed or for any other reason, is in the next patch too. Weights that become NaN
        or infinite raise PatchError, and nothing is collected.
        """
        self._finish_commit()
        changes, gathered_changes = self._changes()
        tensors: dict[str, TensorPatch] = {}
        totals = dict[str, Fingerprint]()
        for name, part in self._parts.items():
            index, before, after = gathered_changes[name]
            _check_finite(name, before, after)
            moved = Fingerprint.of(after, index) - Fingerprint.of(before, index)
            totals[name] = part.total + moved
            hashes = str(part.total), str(totals[name])
            tensors[name] = TensorPatch(part.info, index, after, before, *hashes, part.tied)
        self._pending = _Pending(changes, totals)
        if commit:
            self.commit()
        weights = sum(part.info.size for part in self._parts.values() if part.info.floating)
        return Patch(tensors, weights)

    def commit(self) -> None:
        """Make what the last `collect` returned the base of the next."""
        if self._pending is None:
            raise PatchError("nothing is pending: call collect(commit=False) before commit()")
        self._committing = True
        self._finish_commit()

    def weights(self) -> dict[str, Tensor]:
        """Return all weights at `version`, for receivers that join: a full copy."""
        self._finish_commit()
        found = {}
        for name, tensor in self._tensors().items():
            part = self._parts.get((self._aliases or {}).get(name, name))
            if part is None:
                raise PatchError(f"{name!r} is new since the sync was made: {_AGAIN}")
            local = part.snapshot.reshape(part.region.shape)
            found[name] = (_whole(local, tensor) if is_sharded(tensor) else local).clone()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what a trainer's checkpoint keeps, beside the weights: the base, as differences.

        For each tensor: its hashes at the base and now, and where its bits differ, the base's.
        """
        self._finish_commit()
        _, found = self._changes()
        tensors = {}
        for name, (index, before, after) in found.items():
            total = self._parts[name].total
            now = total + Fingerprint.of(after, index) - Fingerprint.of(before, index)
            tensors[name] = {
                "dtype": self._parts[name].info.dtype,
                "base": str(total),
                "now": str(now),
                "index": index,
                "values": before,
            }
        return {"number": self.number, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the base and version are as when `state_dict` was called.

        Load the weights of the same checkpoint first. PatchError if the weights are others; then
        this sync continues from the weights that it saw when it was made, as a new one, and
        receivers need a full copy.
        """
        parts = self._read()
        stored = state["tensors"]
        problems = []
        for name in sorted(parts.keys() | stored.keys()):
            if name not in parts or name not in stored:
                where = "model" if name not in parts else "checkpoint"
                problems.append(f"the {where} has no tensor {name!r}")
            elif parts[name].info.dtype != stored[name]["dtype"]:
                sent = parts[name].info.dtype
                problems.append(f"{name!r} was sent as {stored[name]['dtype']}, now as {sent}")
            elif str(parts[name].total) != stored[name]["now"]:
                problems.append(f"{name!r} has other bits than when the state was saved")
        if problems:
            rest = f"; and {len(problems) - 1:,} more" if len(problems) > 1 else ""
            raise PatchError(
                f"the sync cannot resume: {problems[0]}{rest}. Load the weights of the same"
                " checkpoint first; if there are none, receivers need a full copy, of weights()"
            )
        for name, part in parts.items():
            entry = stored[name]
            here = part.region.locally(entry["index"])
            part.snapshot[here[here >= 0]] = entry["values"][here >= 0].to(part.snapshot.device)
            part.total = Fingerprint.parse(entry["base"])
        self._parts, self.number, self._pending = parts, int(state["number"]), None

    def _finish_commit(self) -> None:
        """Advance the base; again, if it was interrupted."""
        if not self._committing or self._pending is None:
            return
        for name, (index, _, after) in self._pending.changes.items():
            snapshot = self._parts[name].snapshot
            new = bits(after).to(snapshot.device)  # torch copies no 8-bit floats by index
            bits(snapshot).index_copy_(0, index.to(snapshot.device), new)
        for name, total in self._pending.totals.items():
            self._parts[name].total = total
        self.number += 1
        self._pending, self._committing = None, False

    def _changes(self) -> tuple[dict[str, Changes], dict[str, Changes]]:
        """What changed in this process's regions; and in the tensors, of all processes."""
        local = self._regions()
        if {n: (i, r) for n, (i, _, r) in local.items()} != {
            name: (part.info, part.region) for name, part in self._parts.items()
        }:
            raise PatchError(f"the model has other tensors than before: {_AGAIN}")
        own = {name: part.changes(local[name][1]) for name, part in self._parts.items()}
        mine = {
            name: change._replace(places=part.region.globally(change.places))
            for name, change, part in zip(own, own.values(), self._parts.values(), strict=True)
            if part.region.owned
        }
        found = {}
        everyone = gathered(mine, self._alone)
        for name in own:
            pieces = [one[name] for one in everyone if name in one]
            found[name] = pieces[0]
            if len(pieces) > 1:
                together = [torch.cat(column) for column in zip(*pieces, strict=True)]
                order = together[0].argsort()
                found[name] = Changes(*(column[order] for column in together))
        return own, found

    def _tensors(self) -> Mapping[str, Tensor]:
        source = self._source
        return source.state_dict() if isinstance(source, nn.Module) else source

    def _read(self) -> dict[str, _Part]:
        """The weights as they are now, as the base."""
        parts = {}
        sums: dict[str, Fingerprint] = {}
        regions = self._regions()
        aliases = self._aliases or {}
        for name, (info, tensor, region) in regions.items():
            snapshot = tensor.reshape(-1).to(DTYPES[info.dtype], copy=True)
            tied = tuple(sorted(n for n, first in aliases.items() if first == name))
            parts[name] = _Part(info, tied, region, snapshot, Fingerprint())
            if region.owned:
                sums[name] = Fingerprint.total(_sums_of(snapshot, region))
        everyone = gathered(sums, self._alone)
        for name, part in parts.items():
            part.total = Fingerprint.total(one[name] for one in everyone if name in one)
        return parts

    def _regions(self) -> dict[str, tuple[TensorInfo, Tensor, Region]]:
        """Each tensor once: what is sent of it, and what this process holds."""
        tensors = self._tensors()
        local = {name: local_part(name, tensor, self._alone) for name, tensor in tensors.items()}
        held = MemoryCheckpoint({name: part for name, (part, _) in local.items()}, "weights")
        if self._aliases is None:
            # A process that holds an empty shard does not see that two tensors are one.
            everyone = gathered(held.aliases, self._alone)
            self._aliases = dict(pair for one in everyone for pair in one.items())
        elif self._alone and held.aliases != self._aliases:
            raise PatchError(f"other tensors share memory than before: {_AGAIN}")
        found = {}
        for name in sorted(tensors.keys() - self._aliases.keys()):
            part, region = local[name]
            sent = self._dtype if self._dtype is not None and part.is_floating_point() else None
            found[name] = TensorInfo(NAMES[sent or part.dtype], region.whole), part, region
        return found


def _named(weights: Any) -> Mapping[str, Tensor]:
    if isinstance(weights, Mapping):
        return weights
    pairs = list(weights)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            "weights must be a model, a state dict, or pairs of names and tensors, such as"
            " model.named_parameters(): receivers know tensors by their names"
        )
    return dict(pairs)


def _sums_of(snapshot: Tensor, region: Region) -> Iterator[Fingerprint]:
    for start in range(0, len(snapshot), _PIECE):
        piece = snapshot[start : start + _PIECE]
        if region.shape == region.whole:
            yield Fingerprint.of(piece, start)
        else:
            yield Fingerprint.of(piece, region.globally(torch.arange(start, start + len(piece))))


def _whole(local: Tensor, like: Any) -> Tensor:
    """The unsharded tensor whose shards these are, laid out as `like`."""
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return spread.full_tensor()


def _check_finite(name: str, before: Tensor, after: Tensor) -> None:
    if not after.is_floating_point():
        return
    old, new = (x.float() if x.element_size() < 4 else x for x in (before, after))
    if bool((new - old).sum().isfinite()):
        return  # the usual case; a sum that overflows decides nothing
    if not bool((new.isfinite() & old.isfinite()).all()):
        raise PatchError(
            f"tensor {name!r} changes to or from NaN or infinity: nothing was collected, and the"
            " base is as it was"
        )
