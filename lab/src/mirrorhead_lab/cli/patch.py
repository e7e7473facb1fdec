"""`mirrorhead patch`: make, apply, revert, inspect and merge patches of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from mirrorhead_lab.cli.options import Flag, Json, option, user_errors
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_new_file

if TYPE_CHECKING:
    import mirrorhead as mh

_VERIFIED = " (the tensors that the patch touches are verified to the bit)"
_Out = Annotated[Path, arg(aliases=["-o"], metavar="PATH")]


@dataclass(frozen=True)
class Make:
    """Write the largest changes between two checkpoints as a patch, or some at random."""

    base: Annotated[Positional[Path], option("BASE")]
    """The checkpoint before fine-tuning: a safetensors file or a Hugging Face folder."""
    tuned: Annotated[Positional[Path], option("TUNED")]
    """The same after fine-tuning."""
    out: _Out
    """The patch to write; by custom, its name ends with .safetensors."""
    keep: Annotated[float | None, option("SHARE")] = None
    """Share of the weights to change, such as 0.001."""
    count: Annotated[int | None, option("N")] = None
    """Number of weights to change."""
    max_bytes: Annotated[str | None, option("SIZE")] = None
    """Largest size of the patch, such as "2 MB"."""
    tolerance: Annotated[float | None, option("CHANGE")] = None
    """Change every weight that moved by more than this."""
    random: Flag = False
    """Take changes at random, each divided by --keep (DARE), instead of the largest."""
    seed: int = 0
    """Of that draw."""
    whole: Annotated[tuple[str, ...], option("PATTERN ...")] = ()
    """Patterns of tensors to store whole, such as "classifier.*" "*.bias"; they may be new."""
    no_originals: Flag = False
    """Leave out the base's values: the patch is smaller, and `revert` is not possible."""
    json: Json = False

    def run(self) -> int:
        import mirrorhead as mh

        _check_new(self.out)
        with user_errors(ValueError), _bar("comparing") as progress:
            names = ("keep", "count", "max_bytes", "tolerance", "random", "seed", "whole")
            options: Any = {name: getattr(self, name) for name in names}
            patch = mh.Patch.between(self.base, self.tuned, **options, progress=progress)
            patch.save(self.out, originals=not self.no_originals)
        return _show_saved(patch, self.out, self.json)


@dataclass(frozen=True)
class Apply:
    """Write a copy of the base with the patch in it."""

    base: Annotated[Positional[Path], option("BASE")]
    """The checkpoint that the patch was made for."""
    patch: Annotated[Positional[Path], option("PATCH")]
    """The patch."""
    out: _Out
    """The file or folder to write."""
    verify: Flag = False
    """Read the copy again and compare each tensor that the patch touches with its hash."""
    json: Json = False

    def run(self) -> int:
        return _write_copy(self, self.base, reverting=False)


@dataclass(frozen=True)
class Revert:
    """Write the base again from a patched copy, to the bit."""

    patched: Annotated[Positional[Path], option("PATCHED")]
    """A copy that `apply` has written."""
    patch: Annotated[Positional[Path], option("PATCH")]
    """The patch."""
    out: _Out
    """The file or folder to write."""
    verify: Flag = False
    """Read what was written and compare each tensor that the patch touches with the base's hash."""
    json: Json = False

    def run(self) -> int:
        return _write_copy(self, self.patched, reverting=True)


@dataclass(frozen=True)
class Info:
    """Show a patch: sizes, layers, largest changes."""

    patch: Annotated[Positional[Path], option("PATCH")]
    """The patch."""
    largest: int = 10
    """Number of largest changes to show."""
    json: Json = False

    def run(self) -> int:
        import mirrorhead as mh

        if self.largest < 0:
            raise UserError(f"--largest must be at least 0, got {self.largest}")
        with user_errors(ValueError):
            patch = mh.Patch.load(self.patch)
        if self.json:
            return _print_json(_summary(patch, self.patch, self.largest))
        print(patch)
        for version in _versions(patch).items():
            print("  {}: {}".format(*version))
        if labels := patch.config.get("id2label"):
            print(f"  labels: {', '.join(labels[str(i)] for i in range(len(labels)))}")
        for name, place, before, after in patch.largest(self.largest):
            print(f"  {name}[{', '.join(map(str, place))}]: {before:.6g} -> {after:.6g}")
        return 0


@dataclass(frozen=True)
class Merge:
    """Write one patch that does what several patches of one base do."""

    patches: Annotated[Positional[tuple[Path, ...]], option("PATCH ...")]
    """Two or more patches."""
    out: _Out
    """The patch to write."""
    method: Literal["sum", "mean", "ties"] = "sum"
    """Add the changes, take their mean, or let them elect a sign as TIES does."""
    base: Annotated[Path | None, option("PATH")] = None
    """The base; with it, the merged patch knows the hashes that --verify compares with."""
    without: Annotated[tuple[str, ...], option("PATTERN ...")] = ()
    """Patterns of tensors to leave out, such as "head.*"."""
    json: Json = False

    def run(self) -> int:
        import mirrorhead as mh

        if len(self.patches) < 2:
            raise UserError(f"give at least two patches, got {len(self.patches)}")
        _check_new(self.out)
        with user_errors(ValueError):
            parts = [mh.Patch.load(path).without(*self.without) for path in self.patches]
            merged = mh.Patch.merge(parts, self.method, base=self.base)
            merged.save(self.out)
        return _show_saved(merged, self.out, self.json)


@dataclass(frozen=True)
class Chain:
    """Write one patch that leads from a version to the result of the last of several patches."""

    patches: Annotated[Positional[tuple[Path, ...]], option("PATCH ...")]
    """Patches of a weight sync, in any order but for the last; or a folder of them."""
    out: _Out
    """The patch to write."""
    start: Annotated[str | None, option("VERSION")] = None
    """The version to start from, as `patch info` shows it; the first patch's base by default."""
    no_originals: Flag = False
    """Leave out the base's values: the patch is smaller, and cannot be walked back."""
    json: Json = False

    def run(self) -> int:
        import mirrorhead as mh

        _check_new(self.out)
        with user_errors(ValueError):
            folder = len(self.patches) == 1 and self.patches[0].is_dir()
            chain = mh.Patch.chain(self.patches[0] if folder else self.patches, self.start)
            chain.save(self.out, originals=not self.no_originals)
        return _show_saved(chain, self.out, self.json)


@dataclass(frozen=True)
class Patch:
    """Ship what fine-tuning changed: make, apply, revert, inspect, merge and chain patches."""

    ACTIONS: ClassVar[dict[str, Any]] = {
        "make": Make,
        "apply": Apply,
        "revert": Revert,
        "info": Info,
        "merge": Merge,
        "chain": Chain,
    }


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many bytes of the total are done."""
    from mirrorhead_lab.runtime.progress import ProgressBars

    with ProgressBars({label: None}, "bytes") as bars:
        yield lambda done, total: bars.update(label, done, total=total)


def _write_copy(command: Apply | Revert, source: Path, reverting: bool) -> int:
    import mirrorhead as mh

    _check_new(command.out)
    with user_errors(ValueError):
        patch = mh.Patch.load(command.patch)
        if reverting:
            what, doing, write, verify = "base", "reverting", patch.revert, patch.verify_base
        else:
            what, doing, write, verify = "patched", "applying", patch.apply, patch.verify
            if command.verify:
                patch.check_verifiable()  # before anything is written
        with _bar(doing) as progress:
            write(source, command.out, progress=progress)
        if command.verify:
            with _bar("verifying") as progress:
                verify(command.out, progress=progress)
    if command.json:
        return _print_json({"out": str(command.out), "what": what, "verified": command.verify})
    print(f"{what}: {command.out}{_VERIFIED if command.verify else ''}")
    return 0


def _show_saved(patch: mh.Patch, file: Path, as_json: bool) -> int:
    if as_json:
        return _print_json(_summary(patch, file))
    print(f"{patch}\npatch: {file}")
    return 0


def _check_new(out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out} exists; give the path of a new file")
    check_new_file(out, "--out")


def _versions(patch: mh.Patch) -> dict[str, str]:
    """Both ends of the patch, if it knows its result."""
    if any(part.result is None for part in patch.tensors.values()):
        return {}
    return {"base_version": patch.base_version, "version": patch.version}


def _summary(patch: mh.Patch, file: Path, largest: int = 10) -> dict[str, Any]:
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "weights": patch.weights,
        "changed": patch.count,
        "density": patch.density(),
        "config": patch.config,
        **_versions(patch),
        "tensors": {
            name: {
                "dtype": part.info.dtype,
                "shape": list(part.info.shape),
                "changed": len(part.values),
                "whole": part.index is None,
                "new": part.added,
            }
            for name, part in patch.tensors.items()
        },
        "layers": [
            {"layer": layer, "changed": changed, "weights": size, "largest": moved}
            for layer, changed, size, moved in patch.layers()
        ],
        "largest": [
            {"tensor": name, "place": list(place), "before": before, "after": after}
            for name, place, before, after in patch.largest(largest)
        ],
    }


def _print_json(content: dict[str, Any]) -> int:
    print(json.dumps(content, indent=1))
    return 0
