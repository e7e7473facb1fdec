"""Results of real-data studies, read from results/<study>.json and checked at the door.

A file has the study's name, preset and tuning rule, and for each rival what tuning tried, what it
chose, and one record a seed with accuracies and measures. `load_study` turns it into the records
below; what does not fit is refused with the file, the place in it, what is there and what is
allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from mirrorhead.lab.evaluation.people import EditScores, RationaleScores
from mirrorhead.lab.training.settings import OptimizerSettings

STUDIES = ("imdb", "cifar10")
KINDS = ("key", "query", "value")
SHARES = (0.5, 0.8, 0.9, 0.95)
SCORERS = ("attention", "gradient")


class ResultsError(ValueError):
    """A file of results cannot be used."""


@dataclass(frozen=True)
class Weights:
    """All key, query or value weights of a model: how many are large, how sparse, how spread.

    Indices of sparsity are None where all weights are 0.
    """

    large: int
    gini: float | None
    hoyer: float | None
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Measures:
    """What was measured in a trained model; eraser and cad are of texts alone.

    weights by kind; pruned: test accuracy by the share of weights set to 0; entropy of [CLS]'s
    attention, and by head; eraser and cad by split, then by what was scored.
    """

    weights: Mapping[str, Weights]
    pruned: Mapping[float, float]
    entropy: float
    entropy_by_head: tuple[float, ...]
    eraser: Mapping[str, Mapping[str, RationaleScores]]
    cad: Mapping[str, Mapping[str, EditScores]]


@dataclass(frozen=True)
class Run:
    """A final run: the epoch that validation chose, accuracies there, measures, time."""

    seed: int
    best_epoch: int
    train_accuracy: float
    validation_accuracy: float
    test_accuracy: float
    measures: Measures
    seconds_per_epoch: float | None = None


@dataclass(frozen=True)
class Tried:
    """A learning rate in tuning; no accuracy if it diverged."""

    lr: float
    diverged: bool
    validation_accuracy: float | None


N = TypeVar("N")


@dataclass(frozen=True)
class Rival:
    """An optimizer: what tuning tried and chose (None if all diverged), and the final runs.

    Seeds with which the chosen settings diverged have no run.
    """

    name: str
    chosen: OptimizerSettings | None
    tried: tuple[Tried, ...]
    runs: tuple[Run, ...]
    diverged: tuple[int, ...] = ()

    def values(self, of: Callable[[Run], N]) -> tuple[N, ...]:
        """What each run has."""
        return tuple(of(run) for run in self.runs)


@dataclass(frozen=True)
class Study:
    """Rivals on one data set, all tuned by the same rule."""

    name: str
    preset: str
    epochs: int
    batch_size: int
    rule: str
    command: str
    sizes: Mapping[str, int]
    rivals: tuple[Rival, ...]
    random_eraser: Mapping[str, RationaleScores]
    random_cad: Mapping[str, EditScores]

    @property
    def trained(self) -> tuple[Rival, ...]:
        """Rivals that have runs."""
        return tuple(rival for rival in self.rivals if rival.runs)


def load_studies(folder: Path) -> list[Study]:
    """The studies whose files are in the folder."""
    paths = [folder / f"{name}.json" for name in STUDIES]
    return [load_study(path) for path in paths if path.exists()]


def load_study(path: Path) -> Study:
    """Read and check one file."""
    try:
        content = json.loads(path.read_text("utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from error
    root = _Place(content, f"{path}: ", "")
    name = root["study"].word(STUDIES)
    if name != path.stem:
        raise ResultsError(f"{path} has the results of {name}; its name must be {name}.json")
    rivals = tuple(_rival(place, texts=name == "imdb") for place in root["rivals"].each(least=1))
    _check_distinct(root["rivals"], [rival.name for rival in rivals])
    if not any(rival.runs for rival in rivals):
        root["rivals"].fail("must have one with runs")
    eraser: Mapping[str, RationaleScores] = {}
    cad: Mapping[str, EditScores] = {}
    if name == "imdb":
        chance = root["baselines"]["random"]
        eraser = {s: chance["eraser"][s].record(RationaleScores) for s in ("val", "test")}
        cad = {s: chance["cad"][s].record(EditScores) for s in ("dev", "test")}
    return Study(
        name=name,
        preset=root["preset"].text(),
        epochs=root["epochs"].whole(least=1),
        batch_size=root["batch_size"].whole(least=1),
        rule=root["rule"].text(),
        command=root["command"].text(),
        sizes={part: root["sizes"][part].whole(1) for part in ("train", "validation", "test")},
        rivals=rivals,
        random_eraser=eraser,
        random_cad=cad,
    )


def _rival(place: _Place, *, texts: bool) -> Rival:
    chosen = None if place["chosen"].value is None else _settings(place["chosen"])
    places = {run["seed"].whole(): run for run in place["runs"].each()}
    _check_distinct(place["runs"], [run["seed"].value for run in place["runs"].each()])
    if bool(places) != (chosen is not None):
        place["runs"].fail("must have a run exactly if a learning rate was chosen")
    diverged = [
        seed for seed, run in places.items() if "diverged" in run and run["diverged"].flag()
    ]
    runs = tuple(_run(run, texts=texts) for seed, run in places.items() if seed not in diverged)
    tried = tuple(_tried(each) for each in place["tried"].each(least=1))
    return Rival(place["name"].text(), chosen, tried, runs, tuple(diverged))


def _tried(place: _Place) -> Tried:
    diverged = place["diverged"].flag()
    accuracy = None if diverged else place["validation_accuracy"].number(0, 1)
    return Tried(place["lr"].number(0), diverged, accuracy)


def _run(place: _Place, *, texts: bool) -> Run:
    return Run(
        seed=place["seed"].whole(),
        best_epoch=place["best_epoch"].whole(1),
        train_accuracy=place["train_accuracy"].number(0, 1),
        validation_accuracy=place["validation_accuracy"].number(0, 1),
        test_accuracy=place["test_accuracy"].number(0, 1),
        measures=_measures(place["measures"], texts=texts),
        seconds_per_epoch=place["seconds_per_epoch"].number_or_null()
        if "seconds_per_epoch" in place
        else None,
    )


def _measures(place: _Place, *, texts: bool) -> Measures:
    entropy = place["entropy"]
    eraser: dict[str, dict[str, RationaleScores]] = {}
    cad: dict[str, dict[str, EditScores]] = {}
    for split in ("val", "test") if texts else ():
        part = place["eraser"][split]
        eraser[split] = {scorer: part[scorer].record(RationaleScores) for scorer in SCORERS}
    for split in ("dev", "test") if texts else ():
        part = place["cad"][split]
        cad[split] = {scorer: part[scorer].record(EditScores) for scorer in SCORERS}
    return Measures(
        weights={kind: _weights(place["weights"][kind]) for kind in KINDS},
        pruned={share: place["pruned"][f"{share:g}"].number(0, 1) for share in SHARES},
        entropy=entropy["mean"].number(),
        entropy_by_head=tuple(each.number() for each in entropy["by_head"].each(1)),
        eraser=eraser,
        cad=cad,
    )


def _weights(place: _Place) -> Weights:
    edges = tuple(edge.number() for edge in place["histogram"]["edges"].each(3))
    counts = tuple(count.whole() for count in place["histogram"]["counts"].each())
    if len(counts) != len(edges) - 1:
        found = f"has {len(counts)} counts and {len(edges)} edges"
        place["histogram"].fail(f"must have one count between two edges, {found}")
    if any(a >= b for a, b in pairwise(edges)):
        place["histogram"]["edges"].fail("must grow")
    uneven = max(abs(a + b) for a, b in zip(edges, reversed(edges), strict=True))
    if len(counts) % 2 or uneven > 1e-6 * edges[-1]:
        place["histogram"]["edges"].fail("must be symmetric about 0, which is one of them")
    return Weights(
        place["large"].whole(),
        place["gini"].number_or_null(),
        place["hoyer"].number_or_null(),
        edges,
        counts,
    )


def _settings(place: _Place) -> OptimizerSettings:
    try:
        return OptimizerSettings(**place.table())
    except (TypeError, ValueError) as error:
        return place.fail(f"are no settings of an optimizer: {error}")


def _check_distinct(place: _Place, names: list[Any]) -> None:
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        place.fail(f"must be distinct, got {', '.join(twice)} more than once")


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no number that JSON has")


T = TypeVar("T")


@dataclass(frozen=True)
class _Place:
    """A value in the file, with the way to it, so that an error can name both."""

    value: Any
    file: str
    name: str

    def fail(self, message: str) -> Any:
        raise ResultsError(f"{self.file}{self.name or 'the content'} {message}")

    def _expected(self, what: str) -> Any:
        shown = json.dumps(self.value)
        return self.fail(f"must be {what}, got {shown if len(shown) < 60 else shown[:57] + '...'}")

    def table(self) -> dict[str, Any]:
        return self.value if isinstance(self.value, dict) else self._expected("a table")

    def __getitem__(self, key: str) -> _Place:
        inner = f"{self.name}.{key}".lstrip(".")
        if key not in self.table():
            raise ResultsError(f"{self.file}{inner} is missing")
        return _Place(self.value[key], self.file, inner)

    def __contains__(self, key: str) -> bool:
        return key in self.table()

    def each(self, least: int = 0) -> Iterator[_Place]:
        if not isinstance(self.value, list) or len(self.value) < least:
            self._expected(f"a list of at least {least}" if least else "a list")
        for i, value in enumerate(self.value):
            yield _Place(value, self.file, f"{self.name}[{i}]")

    def number(self, low: float = -math.inf, high: float = math.inf) -> float:
        value = self.value
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not right or not math.isfinite(value) or not low <= value <= high:
            limits = "" if low == -math.inf else f" of at least {low:g}"
            self._expected(
                f"a number{limits if high == math.inf else f' from {low:g} to {high:g}'}"
            )
        return float(value)

    def number_or_null(self) -> float | None:
        return None if self.value is None else self.number()

    def whole(self, least: int = 0) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            self._expected(f"a whole number of at least {least}")
        return self.value

    def flag(self) -> bool:
        return self.value if isinstance(self.value, bool) else self._expected("true or false")

    def text(self) -> str:
        given = isinstance(self.value, str) and self.value.strip()
        return self.value if given else self._expected("a text")

    def word(self, allowed: tuple[str, ...]) -> str:
        return self.value if self.value in allowed else self._expected(f"one of {allowed}")

    def record(self, kind: type[T]) -> T:
        """A dataclass of numbers; ints where it has ints."""
        values = {
            field.name: self[field.name].whole()
            if field.type == "int"
            else self[field.name].number()
            for field in fields(kind)  # pyright: ignore[reportArgumentType]
        }
        return kind(**values)
