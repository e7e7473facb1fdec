"""What an experiment is: a module that computes, draws and judges one claim of the paper.

    NAME     "figure-4": the module's name with hyphens
    TITLE    the heading of its part of the report
    CLAIM    the paper's claim, in one line and in our words
    Settings a frozen dataclass that extends `TrialSettings`, of numbers, words and tuples
    QUICK    Settings for a demonstration, FULL those of the paper
    run      settings -> Result; write settings -> arrays and decorate it with `experiment(NAME)`
    draw     Result -> matplotlib figure
    verdict  Result -> Verdict; `judge` makes one

and, where the default does not fit,

    PIECE          trials computed at once (25); results may depend on it in the last bits, so it
                   belongs to the experiment and not to the machine
    FIXED_TRIALS   True where the number of trials is part of the claim: --trials leaves it alone
    MAY_BE_NAN     names of arrays in which NaN means "there is none here"

Trial k draws everything from its own seed, `settings.seeds[k]`, so that any piece of the work is
the same experiment with other `first` and `trials`, and pieces merge by concatenation:

>>> @dataclass(frozen=True, kw_only=True)
... class Settings(TrialSettings):
...     scale: float = 2.0
>>> @experiment("doubling")
... def run(settings: Settings):
...     return {"x": settings.scale * np.array(settings.seeds, float)}
>>> whole = run(Settings(trials=5))
>>> parts = [run(piece) for piece in pieces(Settings(trials=5), 2)]
>>> merge(parts).arrays["x"] == whole.arrays["x"]
array([ True,  True,  True,  True,  True])
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import numpy as np

from mirrorhead.lab.experiments.source import code_hash

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIECE = 25
Holds = Literal["holds", "holds with a remark", "does not hold"]


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """trials: how many; first: the seed of the first, the others follow it."""

    trials: int
    first: int = 0

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("first", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")

    @property
    def seeds(self) -> range:
        """One seed for each trial."""
        return range(self.first, self.first + self.trials)


S = TypeVar("S", bound=TrialSettings)


@dataclass(frozen=True, eq=False)
class Result(Generic[S]):
    """What was measured. Every array has one row for each trial: (trials, ...).

    What is the same in all trials (recorded steps, exponents) follows from the settings.
    seconds: computing time, summed over pieces.
    """

    name: str
    settings: S
    arrays: dict[str, np.ndarray]
    seconds: float

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {'x'.join(map(str, a.shape))}" for k, a in self.arrays.items())
        return f"Result({self.name}, {shapes}, {self.seconds:.1f} s)"


@dataclass(frozen=True)
class Verdict:
    """The paper's claim, what was measured, and whether the claim holds."""

    claim: str
    measured: str
    holds: Holds
    remark: str = ""

    def __post_init__(self) -> None:
        if self.holds not in get_args(Holds):
            raise ValueError(f"holds must be one of {get_args(Holds)}, got {self.holds!r}")
        if self.holds == "holds with a remark" and not self.remark:
            raise ValueError("a verdict that holds with a remark needs the remark")


def judge(claim: str, measured: str, holds: bool, remark: str = "") -> Verdict:
    """The verdict in the words of the report; a remark qualifies a claim that holds.

    >>> judge("Paths meet.", "distance 1e-9", True).holds
    'holds'
    """
    word: Holds = "does not hold" if not holds else "holds with a remark" if remark else "holds"
    return Verdict(claim, measured, word, remark)


def experiment(name: str) -> Callable[[Callable[[S], Mapping[str, Any]]], Callable[[S], Result[S]]]:
    """Turn a function settings -> {name: (trials, ...) array or tensor} into settings -> Result."""

    def decorate(compute: Callable[[S], Mapping[str, Any]]) -> Callable[[S], Result[S]]:
        @functools.wraps(compute)
        def run(settings: S) -> Result[S]:
            start = time.perf_counter()
            arrays = {key: _array(value) for key, value in compute(settings).items()}
            return Result(name, settings, arrays, time.perf_counter() - start)

        return run

    return decorate


def pieces(settings: S, size: int) -> list[S]:
    """The settings of the pieces, `size` trials each, the last perhaps fewer."""
    end = settings.first + settings.trials
    return [
        replace(settings, first=first, trials=min(size, end - first))
        for first in range(settings.first, end, size)
    ]


def merge(parts: Sequence[Result[S]]) -> Result[S]:
    """One result of pieces that follow each other, given in any order."""
    if not parts:
        raise ValueError("merge needs at least one result")
    parts = sorted(parts, key=lambda part: part.settings.first)
    first = parts[0]
    whole = replace(first.settings, trials=sum(part.settings.trials for part in parts))
    expected = first.settings.first
    for part in parts:
        settings = part.settings
        same = replace(settings, first=whole.first, trials=whole.trials) == whole
        if part.name != first.name or not same or part.arrays.keys() != first.arrays.keys():
            raise ValueError(f"{part} is no piece of the same run as {first}")
        if settings.first != expected:
            raise ValueError(f"trial {expected} is missing or doubled: next piece is {settings}")
        expected += settings.trials
    arrays = {key: np.concatenate([part.arrays[key] for part in parts]) for key in first.arrays}
    return Result(first.name, whole, arrays, sum(part.seconds for part in parts))


@dataclass(frozen=True)
class Experiment:
    """An experiment's module, read and checked once."""

    module: str
    code: str  # a hash of the source that `run` depends on
    name: str
    title: str
    claim: str
    quick: TrialSettings
    full: TrialSettings
    piece: int
    fixed_trials: bool
    may_be_nan: frozenset[str]
    run: Callable[[Any], Result[Any]]
    draw: Callable[[Result[Any]], Figure]
    verdict: Callable[[Result[Any]], Verdict]

    @classmethod
    def of(cls, module: ModuleType) -> Experiment:
        """Read the names that the module must have; a clear error says which is wrong."""
        needed = ("NAME", "TITLE", "CLAIM", "Settings", "QUICK", "FULL", "run", "draw", "verdict")
        missing = [name for name in needed if not hasattr(module, name)]
        if missing:
            raise TypeError(f"{module.__name__} is no experiment: it lacks {', '.join(missing)}")
        for size in ("QUICK", "FULL"):
            _check_settings(module.__name__, size, getattr(module, size), module.Settings)
        piece = getattr(module, "PIECE", PIECE)
        if not isinstance(piece, int) or piece < 1:
            raise TypeError(f"{module.__name__}: PIECE must be at least 1, got {piece}")
        return cls(
            module=module.__name__,
            code=code_hash(Path(module.__file__ or "").read_text("utf-8"), "run"),
            name=module.NAME,
            title=module.TITLE,
            claim=module.CLAIM,
            quick=module.QUICK,
            full=module.FULL,
            piece=piece,
            fixed_trials=bool(getattr(module, "FIXED_TRIALS", False)),
            may_be_nan=frozenset(getattr(module, "MAY_BE_NAN", ())),
            run=module.run,
            draw=module.draw,
            verdict=module.verdict,
        )

    def compute(self, settings: TrialSettings) -> Result[Any]:
        """Run, and hold the result to the contract."""
        result = self.run(settings)
        if result.name != self.name or result.settings != settings:
            raise ValueError(f"{self.name} returned a result of {result.name}, {result.settings}")
        self.check(result)
        return result

    def check(self, result: Result[Any]) -> None:
        """Every array numeric, (trials, ...), finite unless named in MAY_BE_NAN."""
        if not result.arrays:
            raise ValueError(f"{self.name} returned no arrays")
        for key, array in result.arrays.items():
            label = f"{self.name}: array {key!r}"
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{label} must hold numbers or bools, got {array.dtype}")
            if array.ndim == 0 or len(array) != result.settings.trials:
                trials = result.settings.trials
                raise ValueError(f"{label} must be ({trials} trials, ...), got {array.shape}")
            bad = np.isinf(array) if key in self.may_be_nan else ~np.isfinite(array)
            if bad.any():
                rows = np.unique(np.nonzero(bad)[0])[:5] + result.settings.first
                seeds = ", ".join(map(str, rows))
                raise ValueError(f"{label} is not finite in the trials of seeds {seeds}")


def plain(settings: TrialSettings) -> dict[str, Any]:
    """The settings as JSON has them: tuples become lists.

    >>> plain(TrialSettings(trials=3))
    {'trials': 3, 'first': 0}
    """
    return {field.name: _lists(getattr(settings, field.name)) for field in fields(settings)}


def restore(kind: type[S], values: Mapping[str, Any]) -> S:
    """The settings that `plain` wrote."""
    return kind(**{key: _tuples(value) for key, value in values.items()})


def _check_settings(module: str, size: str, settings: Any, kind: type) -> None:
    if not isinstance(settings, kind) or not isinstance(settings, TrialSettings):
        raise TypeError(f"{module}: {size} must be its Settings, which extend TrialSettings")
    if restore(type(settings), plain(settings)) != settings:
        raise TypeError(f"{module}: {size} must consist of numbers, words and tuples of them")


def _array(value: Any) -> np.ndarray:
    # A tensor may still carry its graph.
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_lists(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"settings consist of numbers, words and tuples of them, got {value!r}")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
