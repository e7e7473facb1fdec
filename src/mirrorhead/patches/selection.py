"""Which changes between two checkpoints a patch keeps: the largest of all, or some at random.

The k-th largest change is found exactly without sorting or storing all changes: a float32 that
is not negative is ordered like its 32 bits, so one pass over both checkpoints counts the upper 16
bits, and a second pass counts the lower 16 bits of the changes that share the k-th one's.
"""

from __future__ import annotations

import fnmatch
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead._checks import is_number
from mirrorhead.patches.checkpoints import Checkpoint, PatchError, bits, has_nan, refuse

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
Step = Callable[[str], None]  # called with the name of a tensor that was read
#: Takes the changes of a tensor piece by piece, and gives those to keep.
Pick = Callable[[str, Iterator["Changes"]], Iterator["Changes"]]


class Changes(NamedTuple):
    """Some weights of one tensor: where they are, before, after, and how far they moved."""

    places: Tensor  # (count,), int64, ascending
    before: Tensor  # (count,)
    after: Tensor  # (count,)
    moved: Tensor  # (count,), float64

    def where(self, mask: Tensor) -> Changes:
        return Changes(*(part[mask] for part in self))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a tensor's name fits one of the patterns, such as "classifier.*" or "*.bias"."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def as_patterns(name: str, given: Any) -> tuple[str, ...]:
    """One pattern or several as a tuple."""
    found = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(one, str) for one in found):
        raise TypeError(f'{name} must be a pattern such as "*.bias", or several, got {given!r}')
    return found


def common_names(
    base: Checkpoint, tuned: Checkpoint, whole: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Names that both have, each with its tied names; names that only `tuned` has.

    The latter must fit `whole`. Tied tensors appear under one name, if they are equal in both
    checkpoints: a copy of a state dict no longer shows that they are tied.

    Raises PatchError for missing or extra tensors and for other shapes or dtypes.
    """
    known = sorted(base.infos.keys() | tuned.infos.keys())
    for pattern in whole:
        if not any(matches(name, (pattern,)) for name in known):
            names = ", ".join(map(repr, known[:3]))
            raise PatchError(
                f"whole has {pattern!r}, which matches no tensor; names are {names} ..."
            )
    # A file stores tied weights once, a model lists them under each of their names.
    missing = [name for name in base.infos if not base.tied(name) & tuned.infos.keys()]
    extra = [name for name in tuned.infos if not tuned.tied(name) & base.infos.keys()]
    added = [name for name in extra if matches(name, whole)]
    problems = [f"{tuned.label} has no tensor {name!r}" for name in missing]
    problems += [
        f"{base.label} has no tensor {name!r}; name it in `whole` to store all of it"
        for name in extra
        if name not in added
    ]
    both = [name for name in base.infos if name in tuned.infos]
    for name in both:
        old, new = base.infos[name], tuned.infos[name]
        if old != new:
            problems.append(f"{name!r} is {old} in {base.label}, {new} in {tuned.label}")
    refuse("the checkpoints do not fit: ", problems)
    kept: dict[str, set[str]] = {}
    for name in sorted(both, key=lambda name: name in base.aliases or name in tuned.aliases):
        names = base.tied(name) | tuned.tied(name)
        known = (other for other in kept if other in names)
        if not any(base.same(name, other) and tuned.same(name, other) for other in known):
            kept[name] = names
    return {name: tuple(sorted(names - kept.keys())) for name, names in kept.items()}, added


def changes_of(base: Checkpoint, tuned: Checkpoint, name: str) -> Iterator[Changes]:
    """Every weight of a tensor whose bits differ, in pieces.

    Changes to or from NaN or infinity are refused; what stays may be either.
    """
    both = zip(base.pieces(name), tuned.pieces(name), strict=True)
    for (start, before), (_, after) in both:
        local = (bits(before) != bits(after)).nonzero().flatten()
        old, new = before[local], after[local]
        for checkpoint, part in ((base, old), (tuned, new)):
            if has_nan(part):
                raise PatchError(f"{checkpoint.label}: tensor {name!r} contains NaN that changes")
        moved = (new.double() - old.double()).abs()
        if not bool(torch.isfinite(moved).all()):
            raise PatchError(f"tensor {name!r} changes to or from infinity")
        yield Changes(local + start, old, new, moved)


def find_cut(
    base: Checkpoint, tuned: Checkpoint, names: Sequence[str], count: int, step: Step
) -> tuple[int, int]:
    """Where to cut so that exactly the `count` largest changes are kept (or all, if fewer).

    A change is kept if its float32 bits are above the first number that is returned. Of those
    equal to it, as many are kept as the second number says.
    """

    def histogram(bins: int, part: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros(bins, dtype=torch.int64)
        for name in names:
            for piece in changes_of(base, tuned, name):
                total += torch.bincount(part(_key(piece)), minlength=bins)
            step(name)
        return total

    upper = histogram(1 << 15, lambda key: key >> 16)  # the sign bit of a float32 is 0 here
    if count >= int(upper.sum()):
        return -1, 0
    high, above = _crossing(upper, count)
    lower = histogram(1 << 16, lambda key: key[key >> 16 == high] & 0xFFFF)
    low, inside = _crossing(lower, count - above)
    return (high << 16) + low, count - above - inside


def picked_changes(
    base: Checkpoint, tuned: Checkpoint, names: Sequence[str], pick: Pick, step: Step
) -> dict[str, Changes]:
    """The changes that `pick` keeps, by tensor."""
    found: dict[str, Changes] = {}
    for name in names:
        kept = [p for p in pick(name, changes_of(base, tuned, name)) if len(p.places)]
        if kept:
            found[name] = Changes(*map(torch.cat, zip(*kept, strict=True)))
        step(name)
    return found


def above(key: int, ties: int) -> Pick:
    """Keep the changes above a cut of `find_cut`."""

    def pick(name: str, pieces: Iterator[Changes]) -> Iterator[Changes]:
        nonlocal ties
        for piece in pieces:
            keys = _key(piece)
            equal = (keys == key).nonzero().flatten()[:ties]
            ties -= len(equal)
            mask = keys > key
            mask[equal] = True
            yield piece.where(mask)

    return pick


def larger(tolerance: float) -> Pick:
    """Keep the changes above a tolerance."""
    return lambda name, pieces: (piece.where(piece.moved > tolerance) for piece in pieces)


def drawn(share: float, seed: int) -> Pick:
    """Keep each change with probability `share`, divided by it: "drop and rescale"."""

    def pick(name: str, pieces: Iterator[Changes]) -> Iterator[Changes]:
        # A tensor's draw depends on its name alone, so that other tensors do not change it.
        generator = torch.Generator().manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
        for piece in pieces:
            mask = torch.rand(len(piece.places), generator=generator, dtype=torch.float64) < share
            some = piece.where(mask)
            before = some.before.double()
            after = (before + (some.after.double() - before) / share).to(some.after.dtype)
            if not bool(torch.isfinite(after.double()).all()):
                raise PatchError(f"a change of {name!r}, divided by {share:g}, overflows")
            yield some._replace(after=after, moved=(after.double() - before).abs())

    return pick


def parse_bytes(size: int | str) -> int:
    """A number of bytes, or a text such as "2 MB", "300 kB", "1.5 MiB".

    >>> parse_bytes("2 MB"), parse_bytes("1 KiB")
    (2000000, 1024)
    """
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or found is None or found[2].lower() not in units:
        raise ValueError(f'max_bytes must be a number or a text such as "2 MB", got {size!r}')
    number = int(Fraction(found[1]) * units[found[2].lower()])
    if number < 1:
        raise ValueError(f"max_bytes must be at least 1, got {size!r}")
    return number


class Reading:
    """Counts bytes and tells a caller's progress function."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def add(self, size: int) -> None:
        self.done = min(self.done + size, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        self.add(self.total)


def check_size(
    keep: float | None, count: int | None, max_bytes: int | str | None, tolerance: float | None
) -> int | None:
    """Check the four ways to give a size; the number of bytes if that is the one."""
    given = [size for size in (keep, count, max_bytes, tolerance) if size is not None]
    if len(given) > 1:
        raise ValueError("give only one of keep, count, max_bytes and tolerance")
    if keep is not None and (not is_number(keep) or not 0 < keep <= 1):
        raise ValueError(f"keep must be above 0 and at most 1, got {keep!r}")
    if count is not None and (not is_number(count) or not isinstance(count, Integral) or count < 1):
        raise ValueError(f"count must be a whole number of at least 1, got {count!r}")
    if tolerance is not None and (not is_number(tolerance) or not 0 <= tolerance < float("inf")):
        raise ValueError(f"tolerance must be finite and at least 0, got {tolerance!r}")
    return None if max_bytes is None else parse_bytes(max_bytes)


def most_changes(keep: float | None, count: int | None, limit: int | None, weights: int) -> int:
    """The largest number of changes that the size allows."""
    if limit is not None:
        return limit // 3  # a byte of index and one each of value and original, at least
    if keep is not None:
        return max(1, round(keep * weights))
    return weights if count is None else int(count)


def _key(changes: Changes) -> Tensor:
    return changes.moved.float().view(torch.int32).long()


def _crossing(histogram: Tensor, count: int) -> tuple[int, int]:
    """The bin that holds the count-th largest, and how many are in the bins above it."""
    from_top = histogram.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, count))
    above = int(from_top[place - 1]) if place else 0
    return len(histogram) - 1 - place, above
