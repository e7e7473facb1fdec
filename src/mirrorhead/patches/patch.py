"""`Patch`: the weights that fine-tuning changed, as a small file, exact to the bit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mirrorhead._checks import check_seed
from mirrorhead._files import write_atomically
from mirrorhead.patches import merging, rewriting
from mirrorhead.patches.checkpoints import (
    Checkpoint,
    FileCheckpoint,
    MemoryCheckpoint,
    PatchError,
    Source,
    bits,
    check_room,
    digest,
    memory_of,
    open_checkpoint,
)
from mirrorhead.patches.file_format import TensorPatch, decode, encode
from mirrorhead.patches.overlay import (
    by_target_name,
    check_applicable,
    check_revertible,
    digests,
    picked,
)
from mirrorhead.patches.selection import (
    Changes,
    Progress,
    Reading,
    changes_of,
    check_size,
    common_names,
    drawn_changes,
    find_cut,
    kept_changes,
    matches,
    most_changes,
)

_NO_HASH = "0" * 64


@dataclass(frozen=True, repr=False, eq=False)
class Patch:
    """The sparse difference between a base checkpoint and a fine-tuned one.

    A patch holds new values for some weights, not differences, so `apply` gives the same bits
    everywhere. It stores a hash of each tensor that it changes, and refuses any other base.

    Attributes:
        tensors: name -> `TensorPatch`, for each tensor that the patch changes.
        weights: number of floating-point weights of the base.

    >>> base = torch.nn.Linear(3, 2)
    >>> tuned = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    >>> tuned["weight"][1, 2] += 1
    >>> patch = Patch.between(base, tuned)
    >>> patch.count
    1
    >>> patch.apply(base)
    >>> torch.equal(base.weight, tuned["weight"])
    True
    >>> patch.revert(base)
    """

    tensors: dict[str, TensorPatch]
    weights: int

    @classmethod
    def between(
        cls,
        base: Source,
        tuned: Source,
        *,
        keep: float | None = None,
        count: int | None = None,
        max_bytes: int | str | None = None,
        tolerance: float | None = None,
        random: bool = False,
        seed: int = 0,
        whole: str | Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Patch:
        """Return the largest changes from `base` to `tuned`, or all changes if no size is given.

        Args:
            base, tuned: models, state dicts, safetensors files or Hugging Face folders. Files
                are read in pieces, so they may be larger than memory.
            keep: share to change of the base's weights that `whole` does not name, in (0, 1].
            count: number of weights to change.
            max_bytes: largest size of the file, such as "2 MB", with the base's values in it.
            tolerance: change every weight that moved by more than this.
            random: instead of the largest changes, take each with probability `keep` and divide it
                by `keep`, so that the expected change is the whole one (DARE, Yu et al. 2024). For
                models that were tuned by AdamW; see docs/patches.md for when it works.
            seed: of that draw.
            whole: patterns of tensor names, such as "classifier.*" or "*.bias", that are stored
                whole if they changed and are not counted. They may be new in `tuned`.
            progress: called with the bytes read so far and in all.
        """
        limit = check_size(keep, count, max_bytes, tolerance)
        check_seed(seed)
        if random and keep is None:
            raise ValueError("random=True needs keep, the share of the changes to take")
        given = any(size is not None for size in (keep, count, max_bytes, tolerance))
        patterns = (whole,) if isinstance(whole, str) else tuple(whole)
        old, new = open_checkpoint(base, "base"), open_checkpoint(tuned, "tuned")
        both, added = common_names(old, new, patterns)
        sparse = [
            n
            for n, tied in both.items()
            if old.infos[n].floating and not any(matches(m, patterns) for m in (n, *tied))
        ]
        passes = 2 if random or tolerance is not None else 4
        report = Reading(progress, passes * sum(old.infos[n].bytes for n in sparse))

        def step(name: str) -> None:
            report.add(old.infos[name].bytes)

        weights = sum(
            info.size
            for name, info in old.infos.items()
            if info.floating and name not in old.aliases
        )
        if random and keep is not None:
            found = drawn_changes(old, new, sparse, float(keep), seed, step)
        elif tolerance is not None:
            found = kept_changes(old, new, sparse, float(tolerance), step)
        else:
            most = most_changes(keep, count, limit, sum(old.infos[n].size for n in sparse))
            found = kept_changes(old, new, sparse, find_cut(old, new, sparse, most, step), step)
        tensors = {
            name: TensorPatch(old.infos[name], c.index, c.after, c.before, _NO_HASH, _NO_HASH)
            for name, c in found.items()
        }
        others = [name for name in both if name not in set(sparse)]
        tensors |= _whole_tensors(old, new, others, added)
        for name in tensors.keys() & both.keys():
            tensors[name] = replace(tensors[name], tied=both[name])
        if (given or not tensors) and _share_memory(old, new, sparse):
            raise PatchError(
                "base and tuned are the same tensors in memory, so no change can be seen: copy the"
                " base before training, as with copy.deepcopy(model.state_dict())"
            )
        patch = cls(dict(sorted(tensors.items())), weights)
        if limit is not None:
            patch = patch._within(limit, found)
        patch = patch._hashed(old, step)
        report.finish()
        return patch

    @classmethod
    def load(cls, file: str | Path) -> Patch:
        """Read a patch file. A damaged or hostile one raises PatchError."""
        return cls(*decode(Path(file)))

    def save(self, file: str | Path, *, originals: bool = True) -> None:
        """Write the patch, all or nothing; see docs/patches.md for the format.

        Args:
            file: the path; by convention it ends with .safetensors.
            originals: also store the base's values, so that `revert` needs no base. Without them
                the file is little more than half as large.
        """
        data = encode(self.tensors, self.weights, originals)
        check_room(Path(file).parent, len(data))
        write_atomically(Path(file), data)

    def apply(
        self,
        target: nn.Module | MutableMapping[str, Tensor] | str | Path,
        out: str | Path | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Put the patch's values into a base; PatchError if it is not the patch's base.

        A model or state dict is changed in place, all or nothing. A file or folder is copied to
        `out`, which must not exist. Tensors that the base does not have are added to state dicts
        and files; a model must have them already, with any values.
        """
        source = self._target(target, out)
        tensors = by_target_name(source, self.tensors)
        report = Reading(progress, self._bytes_of(source) * (2 if out else 1))
        check_applicable(source, tensors, report.add)
        self._check_new(target, source)
        if isinstance(source, FileCheckpoint):
            assert out is not None
            values = {name: (patch.index, patch.values) for name, patch in tensors.items()}
            new = {name: patch.info for name, patch in tensors.items() if patch.added}
            rewriting.rewrite(source, Path(str(target)), Path(out), values, new, (), report.add)
        else:
            _write(target, source, tensors, lambda p: p.values, undo=lambda p: p.originals)
        report.finish()

    def revert(
        self,
        target: nn.Module | MutableMapping[str, Tensor] | str | Path,
        out: str | Path | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Restore the base, to the bit; PatchError if the target is not the patched base.

        Tensors that the base does not have are removed from state dicts and files, if they hold
        the patch's values; a model keeps them as they are. `out` is as in `apply`.
        """
        source = self._target(target, out)
        tensors = by_target_name(source, self.tensors)
        if isinstance(target, nn.Module):
            tensors = {name: patch for name, patch in tensors.items() if not patch.added}
        report = Reading(progress, self._bytes_of(source) * (2 if out else 1))
        check_revertible(source, tensors, report.add)
        old = {name: patch for name, patch in tensors.items() if not patch.added}
        gone = tuple(name for name, patch in tensors.items() if patch.added)
        if isinstance(source, FileCheckpoint):
            assert out is not None
            values = {name: (patch.index, _known(patch.originals)) for name, patch in old.items()}
            rewriting.rewrite(source, Path(str(target)), Path(out), values, {}, gone, report.add)
        else:
            _write(target, source, tensors, lambda p: p.originals, undo=lambda p: p.values)
            if isinstance(target, MutableMapping):
                for name in gone:
                    target.pop(name, None)
        report.finish()

    def verify(self, target: Source, *, progress: Progress | None = None) -> None:
        """Check that each tensor that the patch touches has the bits that the patch gives."""
        self.check_verifiable()
        self._verify(target, lambda patch: patch.result, "the patched one", progress)

    def check_verifiable(self) -> None:
        """Raise PatchError if the patch does not know the hashes that `verify` compares with."""
        if any(patch.result is None for patch in self.tensors.values()):
            raise PatchError(
                "the patch does not know the hashes of its result: it was merged without a base"
            )

    def verify_base(self, target: Source, *, progress: Progress | None = None) -> None:
        """Check that the tensors that the patch changes are the base's, to the bit."""
        self._verify(target, lambda patch: patch.base, "the base's", progress)

    @classmethod
    def merge(
        cls,
        patches: Sequence[Patch],
        method: Literal["sum", "mean", "ties"] = "sum",
        *,
        base: Source | None = None,
    ) -> Patch:
        """Merge several patches of one base into one.

        A weight that only one patch changes gets that patch's value ("sum", "ties"), or its
        change divided by the number of patches ("mean"). If several patches change a weight,
        "sum" adds their changes. "ties" elects the sign with the larger sum of changes, and
        averages the changes that have this sign.

        Args:
            patches: each with its originals (see `save`).
            method: as above.
            base: if given, the merged patch stores its hashes, and `verify` works.
        """
        merged = cls(*merging.merged(patches, method))
        if base is None:
            return merged
        source = open_checkpoint(base, "base")
        tensors = by_target_name(source, merged.tensors)
        check_applicable(source, tensors, lambda done: None)
        return merged._hashed(source, lambda name: None)

    def without(self, *patterns: str) -> Patch:
        """Return the patch without the tensors whose names match one of the patterns."""
        kept = {n: patch for n, patch in self.tensors.items() if not matches(n, patterns)}
        return replace(self, tensors=kept)

    def with_originals(self, base: Source) -> Patch:
        """Return the patch with the base's values, which `revert` and `merge` need."""
        source = open_checkpoint(base, "base")
        check_applicable(source, by_target_name(source, self.tensors), lambda done: None)
        tensors = {}
        for name, patch in self.tensors.items():
            if not patch.added:
                there = _name_in(source, name, patch)
                pieces = [picked(start, p, patch.index) for start, p in source.pieces(there)]
                patch = replace(patch, originals=torch.cat(pieces))
            tensors[name] = patch
        return replace(self, tensors=tensors)

    @property
    def count(self) -> int:
        """Number of changed weights, those of whole and new tensors included."""
        return sum(len(patch.values) for patch in self.tensors.values())

    def density(self) -> float:
        """Share of the base's weights that change, not counting tensors that are stored whole."""
        sparse = [patch.index for patch in self.tensors.values() if patch.index is not None]
        return sum(len(index) for index in sparse) / max(self.weights, 1)

    @cached_property
    def bytes(self) -> int:
        """Size of the file that `save` writes."""
        return len(encode(self.tensors, self.weights, originals=True))

    def largest(self, count: int = 10) -> list[tuple[str, tuple[int, ...], float, float]]:
        """The largest changes: tensor, position, value before, value after."""
        found = []
        for name, patch in self.tensors.items():
            if patch.originals is None or not patch.info.floating:
                continue
            moved = _moved(patch.values, patch.originals)
            changed = int((bits(patch.values) != bits(patch.originals)).sum())
            for i in moved.topk(min(count, changed)).indices.tolist():
                place = i if patch.index is None else int(patch.index[i])
                where = torch.unravel_index(torch.tensor(place), patch.info.shape)
                entry = (name, tuple(int(k) for k in where))
                values = float(patch.originals[i]), float(patch.values[i])
                found.append((float(moved[i]), (*entry, *values)))
        return [entry for _, entry in sorted(found, key=lambda f: -f[0])[:count]]

    def layers(self) -> list[tuple[str, int, int, float | None]]:
        """By layer: name, changed weights, weights of the touched tensors, largest change.

        The largest change is None where the base's values are not known.
        """
        table: dict[str, tuple[int, int, float | None]] = {}
        for name, patch in self.tensors.items():
            changed, size, largest = table.get(_layer(name), (0, 0, None))
            if patch.originals is not None and len(patch.values):
                moved = float(_moved(patch.values, patch.originals).max())
                largest = moved if largest is None else max(largest, moved)
            table[_layer(name)] = changed + len(patch.values), size + patch.info.size, largest
        return [(layer, *row) for layer, row in table.items()]

    def __repr__(self) -> str:
        rows = self.layers()
        width = max([5, *(len(layer) for layer, *_ in rows)])
        title = f"Patch({self.count:,} of {self.weights:,} weights in {len(self.tensors)} tensors"
        lines = [f"{title}, {self.bytes:,} bytes)"]
        lines += [f"  {'layer':{width}}    changed     share  largest"] if rows else []
        for layer, changed, size, largest in rows:
            share = changed / max(size, 1)
            moved = "-" if largest is None else f"{largest:.3g}"
            lines.append(f"  {layer:{width}} {changed:10,} {share:9.4%}  {moved}")
        return "\n".join(lines)

    def to_peft(self, folder: str | Path) -> None:
        """Write the patch as a SHiRA adapter of Hugging Face PEFT; see `export`."""
        from mirrorhead.patches.export import write_shira

        write_shira(self.tensors, Path(folder))

    def to_state_dict(self) -> dict[str, Tensor]:
        """Changes as plain torch tensors: sparse COO for sparse entries, dense for whole ones.

        Adding them to the base is correct up to rounding; `apply` is exact to the bit.
        """
        from mirrorhead.patches.export import state_dict

        return state_dict(self.tensors)

    def _target(self, target: Any, out: str | Path | None) -> Checkpoint:
        source = open_checkpoint(target, "target")
        if isinstance(source, FileCheckpoint) != (out is not None):
            raise TypeError(
                "a file or folder needs `out`, the path of the copy to write; a model or a state"
                " dict is changed in place and has none"
            )
        if out is not None and Path(out).exists():
            raise PatchError(f"{out} exists; give the path of a new file or folder")
        if isinstance(source, MemoryCheckpoint) and not isinstance(
            target, nn.Module | MutableMapping
        ):
            raise TypeError(f"a {type(target).__name__} cannot be changed in place")
        if isinstance(source, MemoryCheckpoint) and isinstance(target, nn.Module):
            _check_memory(target, source, by_target_name(source, self.tensors))
        return source

    def _check_new(self, target: Any, source: Checkpoint) -> None:
        """Tensors that are new to the base cannot be added to a model, nor replace others."""
        for name in (name for name, patch in self.tensors.items() if patch.added):
            if isinstance(target, nn.Module) and name not in source.infos:
                raise PatchError(f"the model has no tensor {name!r}; give it that layer first")
            if not isinstance(target, nn.Module) and name in source.infos:
                raise PatchError(f"{source.label} has a tensor {name!r}, which the patch adds")

    def _verify(
        self,
        target: Source,
        wanted: Callable[[TensorPatch], str | None],
        what: str,
        progress: Progress | None,
    ) -> None:
        source = open_checkpoint(target, "target")
        report = Reading(progress, self._bytes_of(source))
        for name, patch in by_target_name(source, self.tensors).items():
            if wanted(patch) is None:  # a new tensor, which the base does not have
                continue
            if name not in source.infos:
                raise PatchError(f"{source.label} has no tensor {name!r}")
            if digest(source, name) != wanted(patch):
                raise PatchError(f"{source.label}: tensor {name!r} is not {what}")
            report.add(source.infos[name].bytes)
        report.finish()

    def _within(self, limit: int, found: Mapping[str, Changes]) -> Patch:
        """The largest changes of these that make a file of at most `limit` bytes."""
        names = [name for name in self.tensors if name in found]
        moved = torch.cat([torch.zeros(0).double(), *(found[name].moved for name in names)])
        rank = torch.empty(len(moved), dtype=torch.int64)
        rank[moved.argsort(descending=True, stable=True)] = torch.arange(len(moved))
        ranks = dict(zip(names, rank.split([len(found[n].index) for n in names]), strict=True))

        def first(count: int) -> Patch:
            tensors = {}
            for name, patch in self.tensors.items():
                if name in ranks:
                    some = found[name].where(ranks[name] < count)
                    if not len(some.index):
                        continue
                    patch = replace(
                        patch, index=some.index, values=some.after, originals=some.before
                    )
                tensors[name] = patch
            return replace(self, tensors=tensors)

        least, most = 0, len(moved)
        if first(0).bytes > limit:
            raise PatchError(
                f"max_bytes is {limit:,}, but the tensors stored whole and the header alone need"
                f" {first(0).bytes:,}"
            )
        while least < most:
            middle = (least + most + 1) // 2
            if first(middle).bytes <= limit:
                least = middle
            else:
                most = middle - 1
        return first(least)

    def _hashed(self, base: Checkpoint, step: Callable[[str], None]) -> Patch:
        """The same patch with the hashes of the base's tensors and of its results."""
        tensors = {}
        for name, patch in self.tensors.items():
            if patch.added:
                memory = MemoryCheckpoint({name: patch.values}, "patch")
                tensors[name] = replace(patch, result=digest(memory, name))
            else:
                there = _name_in(base, name, patch)
                old, new = digests(base, there, patch.index, patch.values)
                tensors[name] = replace(patch, base=old, result=new)
            if name in base.infos:
                step(name)
        return replace(self, tensors=tensors)

    def _bytes_of(self, source: Checkpoint) -> int:
        names = by_target_name(source, self.tensors)
        return sum(source.infos[name].bytes for name in names if name in source.infos)


def _whole_tensors(
    base: Checkpoint, tuned: Checkpoint, names: Sequence[str], added: Sequence[str]
) -> dict[str, TensorPatch]:
    found = {}
    for name in names:
        if any(len(change.index) for change in changes_of(base, tuned, name)):
            before, after = base.read(name), tuned.read(name)
            found[name] = TensorPatch(base.infos[name], None, after, before, _NO_HASH, _NO_HASH)
    for name in added:
        values = tuned.read(name)
        if values.is_floating_point() and bool(values.float().isnan().any()):
            raise PatchError(f"{tuned.label}: tensor {name!r} contains NaN")
        found[name] = TensorPatch(tuned.infos[name], None, values, None, None, _NO_HASH)
    return found


def _share_memory(base: Checkpoint, tuned: Checkpoint, names: Iterable[str]) -> bool:
    if not (isinstance(base, MemoryCheckpoint) and isinstance(tuned, MemoryCheckpoint)):
        return False
    pairs = [(base.tensors[n], tuned.tensors[n]) for n in names if base.tensors[n].numel()]
    return bool(pairs) and all(one.data_ptr() == other.data_ptr() for one, other in pairs)


def _check_memory(model: nn.Module, state: MemoryCheckpoint, names: Iterable[str]) -> None:
    """Refuse a model whose state_dict() is a copy: what is written there would be lost."""
    own = {memory_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name in names:
        tensor = state.tensors.get(name)
        if tensor is not None and tensor.numel() and memory_of(tensor) not in own:
            raise PatchError(
                f"the model's state_dict() gives a copy of {name!r}: apply the patch to the state"
                " dict and load that"
            )


def _write(
    target: Any,
    source: Checkpoint,
    tensors: Mapping[str, TensorPatch],
    values: Callable[[TensorPatch], Tensor | None],
    undo: Callable[[TensorPatch], Tensor | None],
) -> None:
    """Write values into tensors in memory; if anything fails, put the old ones back."""
    assert isinstance(source, MemoryCheckpoint)
    done: list[tuple[Tensor, TensorPatch, Tensor | None]] = []
    new: list[str] = []
    try:
        for name, patch in tensors.items():
            wanted = values(patch)
            if wanted is None:
                continue
            if name not in source.tensors:
                new.append(name)
                target[name] = wanted.reshape(patch.info.shape).clone()
                continue
            tensor = source.tensors[name]
            before = undo(patch)
            if before is None:
                before = _picked(tensor, patch.index)
            done.append((tensor, patch, before))
            _put(tensor, patch.index, wanted)
        _check_written(done, values)
    except BaseException:
        for tensor, patch, before in reversed(done):
            _put(tensor, patch.index, _known(before))
        for name in new:
            target.pop(name, None)
        raise


def _check_written(
    done: Sequence[tuple[Tensor, TensorPatch, Tensor | None]],
    values: Callable[[TensorPatch], Tensor | None],
) -> None:
    """Refuse tensors that overlap in memory: what was written first may be overwritten."""
    users = Counter(memory_of(tensor) for tensor, _, _ in done)
    for tensor, patch, _ in done:
        expanded = 0 in tensor.stride()
        if expanded or users[memory_of(tensor)] > 1:
            found = _picked(tensor, patch.index).cpu()
            if not torch.equal(bits(found), bits(_known(values(patch)))):
                raise PatchError(
                    "the target's tensors overlap in memory and cannot all hold their values: copy"
                    " them first"
                )


def _name_in(source: Checkpoint, name: str, patch: TensorPatch) -> str:
    """The name that a checkpoint has for a tensor."""
    return next((n for n in (name, *patch.tied) if n in source.infos), name)


def _moved(values: Tensor, originals: Tensor) -> Tensor:
    """How far each weight moved; 0 for an infinity that stays."""
    moved = (values.double() - originals.double()).abs()
    return moved.masked_fill(bits(values) == bits(originals), 0)


def _places(tensor: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    return torch.unravel_index(index.to(tensor.device), tensor.shape)


def _picked(tensor: Tensor, index: Tensor | None) -> Tensor:
    return tensor.reshape(-1).clone() if index is None else tensor[_places(tensor, index)]


def _put(tensor: Tensor, index: Tensor | None, values: Tensor) -> None:
    with torch.no_grad():
        if index is None:
            tensor.copy_(values.reshape(tensor.shape))
        else:
            tensor[_places(tensor, index)] = values.to(tensor.device)


def _known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def _layer(name: str) -> str:
    """The layer of a tensor: its name up to the last number, or without its last part.

    >>> _layer("encoder.layer.3.output.dense.weight"), _layer("embeddings.word.weight")
    ('encoder.layer.3', 'embeddings.word')
    """
    found = re.match(r"(.*\.\d+)\.", name)
    return found[1] if found else name.rpartition(".")[0] or name
