"""`Patch`: the weights that fine-tuning changed, as a small file, exact to the bit."""

from __future__ import annotations

import functools
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mirrorhead._checks import check_integer, check_seed
from mirrorhead._files import sha256_of, write_atomically
from mirrorhead.patches import chains, export, in_place, model_config, overlay, selection
from mirrorhead.patches.checkpoints import (
    Checkpoint,
    FileCheckpoint,
    MemoryCheckpoint,
    PatchError,
    Source,
    Target,
    bits,
    check_room,
    has_nan,
    open_checkpoint,
    raw,
)
from mirrorhead.patches.file_format import TensorPatch, check_destination, decode, encode
from mirrorhead.patches.merging import Method, merged
from mirrorhead.patches.overlay import Edit
from mirrorhead.patches.selection import Changes, Progress, Reading, matches

_NO_HASH = "0" * 64


@dataclass(frozen=True, repr=False, eq=False)
class Patch:
    """The sparse difference between a base checkpoint and a fine-tuned one.

    A patch holds new values for some weights, not differences, so `apply` gives the same bits
    everywhere. It stores a hash of each tensor that it changes, and refuses any other base.

    Attributes:
        tensors: name -> `TensorPatch`, for each tensor that the patch changes.
        weights: number of floating-point weights of the base.
        config: entries that `apply` writes into the config.json of a folder: a classifier's labels,
            and which pooling its head needs. Empty if `tuned` was not a folder that has them.

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
    config: dict[str, Any] = field(default_factory=dict)

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
                whole if they changed and are not counted. They may be new in `tuned`. A pattern
                that matches no tensor is refused.
            progress: called with the bytes read so far and in all.
        """
        limit = selection.check_size(keep, count, max_bytes, tolerance)
        check_seed(seed)
        if random and keep is None:
            raise ValueError("random=True needs keep, the share of the changes to take")
        given = any(size is not None for size in (keep, count, max_bytes, tolerance))
        patterns = selection.as_patterns("whole", whole)
        old, new = open_checkpoint(base, "base"), open_checkpoint(tuned, "tuned")
        both, added = selection.common_names(old, new, patterns)
        sparse = [
            n
            for n, tied in both.items()
            if old.infos[n].floating and not any(matches(m, patterns) for m in (n, *tied))
        ]
        passes = 2 if random or tolerance is not None else 4
        report = Reading(progress, passes * sum(old.infos[n].bytes for n in sparse))

        def step(name: str) -> None:
            report.add(old.infos[name].bytes)

        if random and keep is not None:
            pick = selection.drawn(float(keep), seed)
        elif tolerance is not None:
            pick = selection.larger(float(tolerance))
        else:
            sizes = sum(old.infos[n].size for n in sparse)
            most = selection.most_changes(keep, count, limit, sizes)
            pick = selection.above(*selection.find_cut(old, new, sparse, most, step))
        found = selection.picked_changes(old, new, sparse, pick, step)
        tensors = {
            name: TensorPatch(old.infos[name], c.places, c.after, c.before, _NO_HASH, _NO_HASH)
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
        own = [info for name, info in old.infos.items() if name not in old.aliases]
        weights = sum(info.size for info in own if info.floating)
        config = model_config.found(base, tuned)
        patch = cls(dict(sorted(tensors.items())), weights, config)
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
            file: the path, in a folder that exists; by convention it ends with .safetensors. A
                file that is there is overwritten if it is a patch, and refused otherwise; its
                mode stays, and of a symbolic link the target is written.
            originals: also store the base's values, so that `revert` needs no base. Without them
                the file is little more than half as large.
        """
        place = Path(os.path.realpath(file))
        check_destination(place)
        data = encode(self.tensors, self.weights, self.config, originals)
        check_room(place.parent, len(data))
        write_atomically(place, data)

    def apply(
        self, target: Target, out: str | Path | None = None, *, progress: Progress | None = None
    ) -> None:
        """Put the patch's values into a base; PatchError if it is not the patch's base.

        A model or state dict is changed in place, all or nothing. A file or folder is copied to
        `out`, which must not exist. Tensors that the base does not have are added to state dicts
        and files; a model must have them already, with any values.

        A model that other threads compute with must not be changed under them: a forward pass
        would see some tensors before the patch and some after it. Hold a lock around both, or patch
        a copy of the model and give that to the threads; docs/patches.md shows both ways.
        """
        source, tensors, report = self._opened(target, out, progress)
        files = model_config.applied(target, self.config)
        overlay.check_applicable(source, tensors, report.add)
        # Tensors that are new to the base cannot be added to a model, nor replace others.
        for name in (name for name, patch in self.tensors.items() if patch.added):
            if isinstance(target, nn.Module) and name not in source.infos:
                raise PatchError(f"the model has no tensor {name!r}; give it that layer first")
            if not isinstance(target, nn.Module) and name in source.infos:
                raise PatchError(f"{source.label} has a tensor {name!r}, which the patch adds")
        values = {name: (patch.index, patch.values) for name, patch in tensors.items()}
        new = {name: patch.info for name, patch in tensors.items() if patch.added}
        _write(target, source, out, Edit(values, new, (), files), report)

    def revert(
        self, target: Target, out: str | Path | None = None, *, progress: Progress | None = None
    ) -> None:
        """Restore the base, to the bit; PatchError if the target is not the patched base.

        Tensors that the base does not have are removed from state dicts and files, if they hold
        the patch's values; a model keeps them as they are. `out` is as in `apply`.
        """
        source, tensors, report = self._opened(target, out, progress)
        files = model_config.reverted(target, self.config)
        old = {name: patch for name, patch in tensors.items() if not patch.added}
        if isinstance(target, nn.Module):
            tensors = old
        overlay.check_revertible(source, tensors, report.add)
        values = {name: (patch.index, patch.before()) for name, patch in old.items()}
        removed = tensors.keys() - old.keys()
        _write(target, source, out, Edit(values, {}, removed, files), report)

    def verify(self, target: Source, *, progress: Progress | None = None) -> None:
        """Check that each tensor that the patch touches has the bits that the patch gives."""
        self.check_verifiable()
        self._verify(target, "result", "the patched one", progress)

    def check_verifiable(self) -> None:
        """Raise PatchError if the patch does not know the hashes that `verify` compares with."""
        if any(patch.result is None for patch in self.tensors.values()):
            raise PatchError(
                "the patch does not know the hashes of its result: it was merged without a base"
            )

    def verify_base(self, target: Source, *, progress: Progress | None = None) -> None:
        """Check that the tensors that the patch changes are the base's, to the bit."""
        self._verify(target, "base", "the base's", progress)

    @classmethod
    def merge(
        cls, patches: Sequence[Patch], method: Method = "sum", *, base: Source | None = None
    ) -> Patch:
        """Merge several patches of one base into one; of one patch alone, that patch.

        A weight that only one patch changes gets that patch's value ("sum", "ties"), or its
        change divided by the number of patches ("mean"). If several patches change a weight,
        "sum" adds their changes. "ties" elects the sign with the larger sum of changes, and
        averages the changes that have this sign.

        Args:
            patches: each with its originals (see `save`).
            method: as above.
            base: if given, the merged patch stores its hashes, and `verify` works.
        """
        for patch in patches:
            if not isinstance(patch, Patch):
                given = type(patch).__name__
                raise TypeError(f"patches must be Patch objects, as of Patch.load, got a {given}")
        configs = [patch.config for patch in patches if patch.config]
        same = bool(configs) and all(config == configs[0] for config in configs)
        found = cls(*merged(patches, method), configs[0] if same else {})
        return found if base is None else found._hashed(found._base(base), lambda name: None)

    @property
    def base_version(self) -> str:
        """Hash of all tensors that the patch names, as they are in the base.

        A patch of a `WeightSync` names every tensor of the model, so that this is the version of
        the whole model.
        """
        return chains.version(chains.hashes(self.tensors, "base"))

    @property
    def version(self) -> str:
        """The same after `apply`."""
        self.check_verifiable()
        return chains.version(chains.hashes(self.tensors, "result"))

    def then(self, following: Patch) -> Patch:
        """Return one patch that does what this one and then the following one do.

        What changed and changed back is not in it, if both have their originals. PatchError if the
        following patch was not made for the result of this one.

        >>> states = [{"w": torch.tensor([float(k), 1.0])} for k in range(3)]
        >>> first, second = (Patch.between(*pair) for pair in zip(states, states[1:]))
        >>> jump = first.then(second)
        >>> jump.apply(states[0])
        >>> torch.equal(states[0]["w"], states[2]["w"])
        True
        """
        if not isinstance(following, Patch):
            raise TypeError(f"following must be a Patch, got {type(following).__name__}")
        added = [p.info.size for p in self.tensors.values() if p.added and p.info.floating]
        if self.weights + sum(added) != following.weights:
            sizes = f"{self.weights + sum(added):,} and {following.weights:,} weights"
            raise PatchError(f"the patches are of different models, of {sizes}")
        tensors = chains.composed(self.tensors, following.tensors)
        return Patch(tensors, self.weights, {**self.config, **following.config})

    def inverse(self) -> Patch:
        """Return the patch from the result back to the base; it needs the originals.

        A patch that adds tensors or labels has none: use `revert`.
        """
        self.check_verifiable()
        if self.config:
            raise PatchError("a patch with labels has no inverse; use revert")
        return replace(self, tensors=chains.inverted(self.tensors))

    @classmethod
    def chain(cls, patches: chains.Patches, start: str | None = None) -> Patch:
        """Return one patch that leads from a version to the result of the last patch.

        It takes as few of the patches as possible, in either direction where they have their
        originals, so their order matters only for which is the last. PatchError if no way leads
        there: a receiver then needs a full copy.

        Args:
            patches: patches, or files of patches, of which only headers are read until it is
                known which are needed; or a folder with patches, the last by name.
            start: the version to start from, by default the `base_version` of the first patch.
        """
        links = chains.links(patches)
        route = chains.route(links, links[0].base if start is None else start, links[-1].result)
        if not route:
            return chains.opened(links[-1].patch)._empty()
        parts = [chains.opened(link.patch) for link in route]
        steps = [p.inverse() if link.back else p for p, link in zip(parts, route, strict=True)]
        return functools.reduce(Patch.then, steps)

    def _empty(self) -> Patch:
        """The patch that changes nothing in what this one gives."""
        return replace(self, tensors=chains.emptied(self.tensors))

    def without(self, *patterns: str) -> Patch:
        """Return the patch without the tensors whose names match one of the patterns.

        A pattern may match none: a patch does not know the tensors that it leaves as they are.
        With a tensor that is new to the base, such as a head, its labels are left out too.
        """
        selection.as_patterns("without", patterns)
        kept = {n: patch for n, patch in self.tensors.items() if not matches(n, patterns)}
        headless = any(patch.added for name, patch in self.tensors.items() if name not in kept)
        return replace(self, tensors=kept, config={} if headless else self.config)

    def with_originals(self, base: Source) -> Patch:
        """Return the patch with the base's values, which `revert` and `merge` need."""
        source = self._base(base)
        tensors = dict(self.tensors)
        for name, patch in self.tensors.items():
            if not patch.added:
                parts = source.pieces(_name_in(source, name, patch))
                pieces = [overlay.picked(start, part, patch.index) for start, part in parts]
                tensors[name] = replace(patch, originals=torch.cat(pieces))
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
        return len(encode(self.tensors, self.weights, self.config, originals=True))

    def largest(self, count: int = 10) -> list[tuple[str, tuple[int, ...], float, float]]:
        """The largest changes: tensor, position, value before, value after."""
        check_integer("count", count, 0)
        found = []
        for name, patch in self.tensors.items():
            if patch.originals is None or not patch.info.floating:
                continue
            moved = _moved(patch.values, patch.originals)
            changed = int((bits(patch.values) != bits(patch.originals)).sum())
            for i in moved.topk(min(count, changed)).indices.tolist():
                place = i if patch.index is None else int(patch.index[i])
                where = torch.unravel_index(torch.tensor(place), patch.info.shape)
                values = float(patch.originals[i]), float(patch.values[i])
                found.append((float(moved[i]), (name, tuple(map(int, where)), *values)))
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

    def to_sparse(self) -> dict[str, export.SparseWeight]:
        """Return the new values as (name, full_shape, int32 indices, values), by tensor.

        The names are those of vLLM's patches: `SparseWeightPatch(**entry._asdict())`.
        """
        return export.sparse_weights(self.tensors)

    def to_safetensors(self, file: str | Path) -> None:
        """Write what `to_sparse` returns to a new file, for readers without mirrorhead.

        It has NAME.indices and NAME.values for each tensor that changes, and in its metadata
        `base_version`, `version` and `shapes`, the latter as JSON.
        """
        versions = {"base_version": self.base_version, "version": self.version}
        export.write_sparse(self.tensors, Path(file), versions)

    def to_peft(self, folder: str | Path) -> None:
        """Write the patch as a SHiRA adapter of Hugging Face PEFT; see `export`."""
        export.write_shira(self.tensors, Path(folder))

    def to_state_dict(self) -> dict[str, Tensor]:
        """Changes as plain torch tensors: sparse COO for sparse entries, dense for whole ones.

        Adding them to the base is correct up to rounding; `apply` is exact to the bit.
        """
        return export.state_dict(self.tensors)

    def _opened(
        self, target: Any, out: str | Path | None, progress: Progress | None
    ) -> tuple[Checkpoint, dict[str, TensorPatch], Reading]:
        """Open what is to be changed; return also the tensors by the names that it has for them."""
        source = open_checkpoint(target, "target")
        if isinstance(source, FileCheckpoint) != (out is not None):
            raise TypeError(
                "a file or folder needs `out`, the path of the copy to write; a model or a state"
                " dict is changed in place and has none"
            )
        if out is not None and os.path.lexists(out):
            raise PatchError(f"{out} exists; give the path of a new file or folder")
        tensors = overlay.by_target_name(source, self.tensors)
        if isinstance(source, MemoryCheckpoint):
            if not isinstance(target, nn.Module | MutableMapping):
                raise TypeError(f"a {type(target).__name__} cannot be changed in place")
            if isinstance(target, nn.Module):
                in_place.check_memory(target, source, tensors)
        return source, tensors, _reading(progress, source, tensors, passes=2 if out else 1)

    def _base(self, base: Source) -> Checkpoint:
        """Open the patch's base; any other one is refused."""
        source = open_checkpoint(base, "base")
        tensors = overlay.by_target_name(source, self.tensors)
        overlay.check_applicable(source, tensors, lambda done: None)
        return source

    def _verify(self, target: Source, key: str, what: str, progress: Progress | None) -> None:
        """Compare hashes of the target with those that the attribute `key` of its tensors has."""
        source = open_checkpoint(target, "target")
        tensors = overlay.by_target_name(source, self.tensors)
        report = _reading(progress, source, tensors)
        for name, patch in tensors.items():
            wanted = getattr(patch, key)
            if wanted is None:  # a new tensor, which the base does not have
                continue
            if name not in source.infos:
                raise PatchError(f"{source.label} has no tensor {name!r}")
            if overlay.digest(source, name, wanted) != wanted:
                raise PatchError(f"{source.label}: tensor {name!r} is not {what}")
            report.add(source.infos[name].bytes)
        report.finish()

    def _within(self, limit: int, found: Mapping[str, Changes]) -> Patch:
        """The largest changes of these that make a file of at most `limit` bytes."""
        names = [name for name in self.tensors if name in found]
        moved = torch.cat([torch.zeros(0).double(), *(found[name].moved for name in names)])
        rank = torch.empty(len(moved), dtype=torch.int64)
        rank[moved.argsort(descending=True, stable=True)] = torch.arange(len(moved))
        ranks = dict(zip(names, rank.split([len(found[n].places) for n in names]), strict=True))

        def first(count: int) -> Patch:
            tensors = dict(self.tensors)
            for name, own in ranks.items():
                index, before, after, _ = found[name].where(own < count)
                tensors[name] = replace(tensors[name], index=index, values=after, originals=before)
                if not len(index):
                    del tensors[name]
            return replace(self, tensors=tensors)

        if first(0).bytes > limit:
            raise PatchError(
                f"max_bytes is {limit:,}, but the tensors stored whole and the header alone need"
                f" {first(0).bytes:,}"
            )
        counts = range(1, len(moved) + 1)
        return first(bisect_right(counts, limit, key=lambda count: first(count).bytes))

    def _hashed(self, base: Checkpoint, step: Callable[[str], None]) -> Patch:
        """The same patch with the hashes of the base's tensors and of its results."""
        tensors = {}
        for name, patch in self.tensors.items():
            if patch.added:
                tensors[name] = replace(patch, result=sha256_of(raw(patch.values)))
            else:
                there = _name_in(base, name, patch)
                old, new = overlay.digests(base, there, patch.index, patch.values)
                tensors[name] = replace(patch, base=old, result=new)
            if name in base.infos:
                step(name)
        return replace(self, tensors=tensors)


def _reading(
    progress: Progress | None, source: Checkpoint, names: Iterable[str], passes: int = 1
) -> Reading:
    there = [source.infos[name].bytes for name in names if name in source.infos]
    return Reading(progress, passes * sum(there))


def _whole_tensors(
    base: Checkpoint, tuned: Checkpoint, names: Sequence[str], added: Sequence[str]
) -> dict[str, TensorPatch]:
    found = {}
    for name in names:
        if any(len(change.places) for change in selection.changes_of(base, tuned, name)):
            before, after = base.read(name), tuned.read(name)
            found[name] = TensorPatch(base.infos[name], None, after, before, _NO_HASH, _NO_HASH)
    for name in added:
        values = tuned.read(name)
        if has_nan(values):
            raise PatchError(f"{tuned.label}: tensor {name!r} contains NaN")
        found[name] = TensorPatch(tuned.infos[name], None, values, None, None, _NO_HASH)
    return found


def _share_memory(base: Checkpoint, tuned: Checkpoint, names: Iterable[str]) -> bool:
    if not (isinstance(base, MemoryCheckpoint) and isinstance(tuned, MemoryCheckpoint)):
        return False
    pairs = [(base.tensors[n], tuned.tensors[n]) for n in names if base.tensors[n].numel()]
    return bool(pairs) and all(one.data_ptr() == other.data_ptr() for one, other in pairs)


def _write(target: Any, source: Checkpoint, out: Any, edit: Edit, report: Reading) -> None:
    """Change a copy of files, or tensors in memory: all, or none if anything fails."""
    if isinstance(source, FileCheckpoint):
        overlay.rewrite(source, Path(target), Path(out), edit, report.add)
    else:
        assert isinstance(source, MemoryCheckpoint)
        in_place.stage(target, source, edit).commit()
    report.finish()


def _name_in(source: Checkpoint, name: str, patch: TensorPatch) -> str:
    """The name that a checkpoint has for a tensor."""
    return next((n for n in (name, *patch.tied) if n in source.infos), name)


def _moved(values: Tensor, originals: Tensor) -> Tensor:
    """How far each weight moved; 0 for an infinity that stays."""
    moved = (values.double() - originals.double()).abs()
    return moved.masked_fill(bits(values) == bits(originals), 0)


def _layer(name: str) -> str:
    """The layer of a tensor: its name up to the last number, or without its last part.

    >>> _layer("encoder.layer.3.output.dense.weight"), _layer("embeddings.word.weight")
    ('encoder.layer.3', 'embeddings.word')
    """
    found = re.match(r"(.*\.\d+)\.", name)
    return found[1] if found else name.rpartition(".")[0] or name
