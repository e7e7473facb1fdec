"""What an experiment is: an object that computes, draws and judges one claim.

Its module ends with `EXPERIMENT = Experiment(...)`, which names its parts. See figure_5.py.

Trial k draws everything from its own seed, `settings.seeds[k]`. Therefore any chunk of the work is
the same experiment with other `first` and `trials`, and results of chunks are concatenated:

>>> @dataclass(frozen=True, kw_only=True)
... class Settings(TrialSettings):
...     scale: float = 2.0
>>> def run(settings: Settings):
...     return {"x": settings.scale * np.array(settings.seeds, float)}
>>> doubling = Experiment(
...     name="doubling", title="Doubling", claim="Twice as much.", run=run,
...     quick=Settings(trials=2), full=Settings(trials=5),
...     draw=lambda result: None, verdict=lambda result: None,
... )
>>> whole = doubling.compute(doubling.full)
>>> parts = [doubling.compute(chunk) for chunk in split(doubling.full, 2)]
>>> merge(parts)["x"] == whole["x"]
array([ True,  True,  True,  True,  True])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np

from mirrorhead_lab.findings.finding import GROUPS
from mirrorhead_lab.plots import Figure
from mirrorhead_lab.verdicts import Verdict, judge


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings of an experiment: numbers, words and tuples of them.

    trials: how many; first: the seed of the first trial, the others follow it.
    """

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
    seconds: computing time, summed over chunks.
    """

    name: str
    settings: S
    arrays: dict[str, np.ndarray]
    seconds: float

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def each(self, name: str) -> list[np.ndarray]:
        """Return "name 1.75", "name 2" and so on, the arrays of the exponents in settings.p."""
        return [self.arrays[f"{name} {p:g}"] for p in vars(self.settings)["p"]]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {'x'.join(map(str, a.shape))}" for k, a in self.arrays.items())
        return f"Result({self.name}, {shapes}, {self.seconds:.1f} s)"


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[S]):
    """A claim, and how it is computed, drawn and judged.

    Args:
        name: by default the module's name with hyphens, such as "figure-4".
        title: the heading of its part of the report.
        claim: the paper's claim, in words that a reader understands without the paper.
        quick, full: settings for a demonstration, and those of the paper.
        run: computes {name: (trials, ...) array or tensor}.
        draw: draws a result.
        verdict: judges a result.
        chunk: trials computed at once. Results may depend on it in the last bits, so it belongs
            to the experiment and not to the machine.
        fixed_trials: whether the number of trials is part of the claim; then --trials keeps it.
        may_be_nan: names of arrays in which NaN means "there is no value here".
        extent: names of settings that say how far the limit of the claim is followed, such as
            "steps". If they are not those of `full`, a claim that fails is not refuted.
        equation: the claim as a formula, in LaTeX.
        group: what the claim is about, one of `findings.finding.GROUPS`.
    """

    name: str = ""
    title: str
    claim: str
    quick: S
    full: S
    run: Callable[[S], Mapping[str, Any]]
    draw: Callable[[Result[S]], Figure]
    verdict: Callable[[Result[S]], Verdict]
    chunk: int = 25
    fixed_trials: bool = False
    may_be_nan: tuple[str, ...] = ()
    extent: tuple[str, ...] = ()
    equation: str = ""
    group: str = "Beyond the paper"

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.module.split(".")[-1].replace("_", "-"))
        for size in ("quick", "full"):
            settings: Any = getattr(self, size)
            if not isinstance(settings, TrialSettings) or type(settings) is not type(self.quick):
                raise TypeError(f"{self.name}: {size} must be its Settings, a TrialSettings")
            if settings_from_json(type(settings), settings_to_json(settings)) != settings:
                raise TypeError(f"{self.name}: {size} must hold numbers, words and tuples of them")
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise TypeError(f"{self.name}: chunk must be at least 1, got {self.chunk}")
        if self.group not in GROUPS:
            raise TypeError(f"{self.name}: group must be one of {GROUPS}, got {self.group!r}")
        unknown = sorted(set(self.extent) - {field.name for field in fields(self.full)})
        if unknown:
            raise TypeError(f"{self.name}: extent names settings that are not there: {unknown}")

    @property
    def module(self) -> str:
        """The module in which the experiment is written; other processes import it."""
        return self.run.__module__

    def compute(self, settings: S) -> Result[S]:
        """Run the experiment and check the result."""
        start = time.perf_counter()
        arrays = {key: _array(value) for key, value in self.run(settings).items()}
        result = Result(self.name, settings, arrays, time.perf_counter() - start)
        self.check(result)
        return result

    def judge(self, result: Result[S]) -> Verdict:
        """Judge a result; a claim that fails in a smaller regime than `full` is not refuted."""
        found = self.verdict(result)
        here, full = vars(result.settings), vars(self.full)
        smaller = [name for name in self.extent if here[name] != full[name]]
        if found.word != "does not hold" or not smaller:
            return found
        words = (f"{x} = {_words(here[x])} instead of {_words(full[x])}" for x in smaller)
        differs = (
            f"This run had {' and '.join(words)}; mirrorhead reproduce --full follows the paper."
        )
        return judge(found.measured, False, found.remark, differs=differs)

    def check(self, result: Result[S]) -> None:
        """Refuse arrays that are not numeric, not (trials, ...), or not finite."""
        if not result.arrays:
            raise ValueError(f"{self.name} returned no arrays")
        trials = result.settings.trials
        for key, array in result.arrays.items():
            label = f"{self.name}: array {key!r}"
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{label} must hold numbers or bools, got {array.dtype}")
            if array.ndim == 0 or len(array) != trials:
                raise ValueError(f"{label} must be ({trials} trials, ...), got {array.shape}")
            bad = np.isinf(array) if key in self.may_be_nan else ~np.isfinite(array)
            if bad.any():
                rows = np.unique(np.nonzero(bad)[0])[:5] + result.settings.first
                seeds = ", ".join(map(str, rows))
                raise ValueError(f"{label} is not finite in the trials of seeds {seeds}")


def split(settings: S, size: int) -> list[S]:
    """Return the settings of the chunks, `size` trials each; the last may have fewer."""
    end = settings.first + settings.trials
    return [
        replace(settings, first=first, trials=min(size, end - first))
        for first in range(settings.first, end, size)
    ]


def merge(parts: Sequence[Result[S]]) -> Result[S]:
    """Concatenate the results of chunks that follow each other, given in any order."""
    if not parts:
        raise ValueError("merge needs at least one result")
    parts = sorted(parts, key=lambda part: part.settings.first)
    first = parts[0]
    whole = replace(first.settings, trials=sum(part.settings.trials for part in parts))
    expected = whole.first
    for part in parts:
        settings = part.settings
        same = replace(settings, first=whole.first, trials=whole.trials) == whole
        if part.name != first.name or not same or part.arrays.keys() != first.arrays.keys():
            raise ValueError(f"{part} is not a chunk of the same run as {first}")
        if settings.first != expected:
            raise ValueError(f"trial {expected} is missing or doubled: next chunk is {settings}")
        expected += settings.trials
    arrays = {key: np.concatenate([part.arrays[key] for part in parts]) for key in first.arrays}
    return Result(first.name, whole, arrays, sum(part.seconds for part in parts))


def settings_to_json(settings: TrialSettings) -> dict[str, Any]:
    """Return the settings as JSON holds them: tuples become lists.

    >>> settings_to_json(TrialSettings(trials=3))
    {'trials': 3, 'first': 0}
    """
    return {field.name: _lists(getattr(settings, field.name)) for field in fields(settings)}


def settings_from_json(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return the settings that `settings_to_json` wrote."""
    return kind(**{key: _tuples(value) for key, value in values.items()})


def _array(value: Any) -> np.ndarray:
    # A tensor may still carry its graph.
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _words(value: Any) -> str:
    return ", ".join(f"{item:g}" for item in (value if isinstance(value, tuple) else (value,)))


def _lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_lists(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"settings consist of numbers, words and tuples of them, got {value!r}")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
