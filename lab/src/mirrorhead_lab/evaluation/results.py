"""The one schema of results: what `collect` and `evaluate` write, and what the report reads.

A file holds one comparison: the data set, the preset, how learning rates were tuned, and for each
optimizer what tuning tried, what it chose, and one record per seed with accuracies and measures.
A single run is a comparison of one optimizer with one seed and nothing tuned. What does not fit is
refused with the file and the place in it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from mirrorhead._files import write_json
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.runtime.json_files import from_plain, read_json
from mirrorhead_lab.training.settings import OptimizerSettings, as_older_runs

#: The comparisons, by the names of their files; the first word is the data set.
STUDIES = ("imdb", "imdb-to-the-end", "cifar10")
KINDS = ("key", "query", "value")
SHARES = (0.5, 0.8, 0.9, 0.95)
SCORERS = ("attention", "gradient")
#: The splits of the data that a text model's attention is compared with.
SPLITS = {"eraser": ("val", "test"), "cad": ("dev", "test")}
#: The file of a single run, in its folder.
RUN_RESULTS = "results.json"

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(pattern=r"\S")]
N = TypeVar("N")


@dataclass(frozen=True)
class RationaleScores:
    """Means over documents; `chance` is the share of words that are marked."""

    documents: int
    auprc: float
    token_f1: float
    iou_f1: float
    comprehensiveness: float
    sufficiency: float
    chance: float


@dataclass(frozen=True)
class EditScores:
    """Means over pairs, for originals; `chance` is the share of tokens that were edited."""

    pairs: int
    auprc: float
    mass: float
    chance: float


class Histogram(Struct, frozen=True):
    """Counts between edges, which are symmetric about 0."""

    edges: Annotated[tuple[float, ...], Meta(min_length=3)]
    counts: tuple[Count, ...]

    def __post_init__(self) -> None:
        edges, counts = self.edges, self.counts
        if len(counts) != len(edges) - 1:
            raise ValueError(f"{len(counts)} counts do not fit between {len(edges)} edges")
        if any(a >= b for a, b in pairwise(edges)):
            raise ValueError("edges must grow")
        uneven = max(abs(a + b) for a, b in zip(edges, reversed(edges), strict=True))
        if len(counts) % 2 or uneven > 1e-6 * edges[-1]:
            raise ValueError("edges must be symmetric about 0, which is one of them")

    def count_from(self, size: float) -> float:
        """Return how many values are at least `size` in magnitude, interpolated within bins.

        >>> Histogram((-2.0, -1.0, 0.0, 1.0, 2.0), (1, 2, 4, 3)).count_from(1.5)
        2.0
        """
        found = 0.0
        for (low, high), count in zip(pairwise(self.edges), self.counts, strict=True):
            near, far = sorted((abs(low), abs(high)))
            found += count * min(max((far - size) / (far - near), 0.0), 1.0)
        return found


class WeightStatistics(Struct, frozen=True):
    """All key, query or value weights of a model: how many are large, how sparse, how spread.

    Indices of sparsity are None where all weights are 0.
    """

    large: Count
    gini: float | None
    hoyer: float | None
    histogram: Histogram


class Entropy(Struct, frozen=True):
    """Normalized entropy of [CLS]'s attention in the last layer."""

    mean: float
    by_head: Annotated[tuple[float, ...], Meta(min_length=1)]


class Milestone(Struct, frozen=True):
    """The first epoch that reached a training accuracy, and its test accuracy."""

    epoch: Positive
    train_accuracy: Share
    test_accuracy: Share


class Measures(Struct, frozen=True, omit_defaults=True):
    """What was measured in a trained model; eraser and cad only for texts.

    Args:
        weights: by kind.
        pruned: test accuracy by the share of weights set to 0.
        eraser, cad: by split, then by what was scored.
        milestones: by training accuracy, for runs that kept their weights there.
    """

    weights: dict[str, WeightStatistics]
    pruned: dict[float, Share]
    entropy: Entropy
    eraser: dict[str, dict[str, RationaleScores]] = {}
    cad: dict[str, dict[str, EditScores]] = {}
    milestones: dict[float, Milestone] = {}

    def __post_init__(self) -> None:
        _check_keys("weights", self.weights, KINDS)
        _check_keys("pruned", self.pruned, SHARES)
        for part, splits in SPLITS.items():
            found = getattr(self, part)
            for split in splits if found else ():
                _check_keys(part, found, (split,))
                _check_keys(f"{part}.{split}", found[split], SCORERS)

    def test_accuracy_at(self, level: float) -> float | None:
        """Return test accuracy where training accuracy was `level`; None if it was not reached.

        Epochs pass a level by different amounts, fast optimizers by more, and test accuracy falls
        on the way. So this interpolates linearly between the epoch that reached the level and the
        one before it whose weights were kept.
        """
        after = self.milestones.get(level)
        if after is None:
            return None
        earlier = [one for one in self.milestones.values() if one.train_accuracy < level]
        if not earlier:
            return after.test_accuracy
        before = max(earlier, key=lambda one: one.train_accuracy)
        share = (level - before.train_accuracy) / (after.train_accuracy - before.train_accuracy)
        return before.test_accuracy + share * (after.test_accuracy - before.test_accuracy)


class RunResults(Struct, frozen=True):
    """A final run: the epoch that validation chose, accuracies there, measures, time.

    In a comparison of training to the end, that epoch is the last.
    """

    seed: Count
    best_epoch: Positive
    train_accuracy: Share
    validation_accuracy: Share
    test_accuracy: Share
    measures: Measures
    seconds_per_epoch: float | None = None

    @property
    def best_kept_accuracy(self) -> float:
        """The best test accuracy of the epochs whose weights were kept, the measured one too."""
        kept = self.measures.milestones.values()
        return max([self.test_accuracy, *(one.test_accuracy for one in kept)])


class TriedRate(Struct, frozen=True):
    """A learning rate in tuning; it has no accuracy if it diverged."""

    lr: Annotated[float, Meta(ge=0)]
    diverged: bool
    validation_accuracy: Share | None = None
    best_epoch: int | None = None
    train_accuracy: Share | msgspec.UnsetType = msgspec.UNSET  # older files have none

    def __post_init__(self) -> None:
        if not self.diverged and self.validation_accuracy is None:
            raise ValueError("validation_accuracy is missing")


class OptimizerResults(Struct, frozen=True):
    """An optimizer: what tuning tried and chose (None if all diverged), and the final runs.

    Seeds with which the chosen settings diverged have no run; the file has them among the runs.
    """

    name: Text
    chosen: OptimizerSettings | None
    tried: tuple[TriedRate, ...]
    runs: tuple[RunResults, ...]
    diverged: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        _check_distinct("seeds", [*(run.seed for run in self.runs), *self.diverged])
        if bool(self.runs or self.diverged) != (self.chosen is not None):
            raise ValueError("runs must not be empty exactly if a learning rate was chosen")

    def values(self, of: Callable[[RunResults], N]) -> tuple[N, ...]:
        """Return a quantity of each run."""
        return tuple(of(run) for run in self.runs)


class Sizes(Struct, frozen=True):
    """Numbers of examples."""

    train: Positive
    validation: Positive
    test: Positive


class RandomScores(Struct, frozen=True):
    """Scores of random attention, by split."""

    eraser: dict[str, RationaleScores]
    cad: dict[str, EditScores]

    def __post_init__(self) -> None:
        for part, splits in SPLITS.items():
            _check_keys(part, getattr(self, part), splits)


class ComparisonResults(Struct, frozen=True, omit_defaults=True):
    """Optimizers on one data set, all tuned by the same rule.

    Args:
        name: of the comparison, one of `STUDIES`; "study" in the file.
        optimizers: "rivals" in the file.
        baselines: for texts, {"random": ...}.
    """

    name: Literal["imdb", "imdb-to-the-end", "cifar10"] = field(name="study")
    preset: Text
    epochs: Positive
    batch_size: Positive
    rule: Text
    command: Text
    sizes: Sizes
    optimizers: Annotated[tuple[OptimizerResults, ...], Meta(min_length=1)] = field(name="rivals")
    baselines: dict[str, RandomScores] = {}

    def __post_init__(self) -> None:
        _check_distinct("names of rivals", [one.name for one in self.optimizers])
        if not self.trained:
            raise ValueError("rivals must have one with runs")
        if self.data == "imdb":
            _check_keys("baselines", self.baselines, ("random",))
            for one in self.trained:
                for measures in one.values(lambda run: run.measures):
                    parts = [part for part in SPLITS if getattr(measures, part)]
                    _check_keys(f"measures of {one.name}", parts, SPLITS)

    @property
    def data(self) -> str:
        """The data set."""
        return self.name.split("-")[0]

    @property
    def to_the_end(self) -> bool:
        """Whether the weights of the last epoch are measured, not those of the best."""
        return self.name.endswith("to-the-end")

    @property
    def trained(self) -> tuple[OptimizerResults, ...]:
        """The optimizers that have runs."""
        return tuple(one for one in self.optimizers if one.runs)

    @property
    def random_eraser(self) -> dict[str, RationaleScores]:
        return self.baselines["random"].eraser if self.baselines else {}

    @property
    def random_cad(self) -> dict[str, EditScores]:
        return self.baselines["random"].cad if self.baselines else {}


def load_results(path: Path) -> ComparisonResults:
    """Read and check one file."""
    content = read_json(path, dict[str, Any])
    try:
        for i, one in enumerate(content["rivals"]):
            for k, run in enumerate(one["runs"]):
                if not isinstance(run.setdefault("diverged", False), bool):
                    where = f"`$.rivals[{i}].runs[{k}].diverged`"
                    raise RunError(f"{path} is damaged: {where} must be true or false")
            one["diverged"] = [run["seed"] for run in one["runs"] if run["diverged"]]
            one["runs"] = [run for run in one["runs"] if not run["diverged"]]
    except (KeyError, TypeError, AttributeError):
        pass  # the schema says what is wrong
    return from_plain(content, ComparisonResults, str(path))


def write_results(path: Path, results: ComparisonResults) -> None:
    """Write a file that `load_results` reads; a file of anything else is not overwritten."""
    check_free(path)
    content = msgspec.to_builtins(results, str_keys=True)
    empty = dict.fromkeys(RunResults.__struct_fields__)
    for one in content["rivals"]:
        if one["chosen"] is not None:
            one["chosen"] = as_older_runs(list(one["chosen"].items()))
        gone = one.pop("diverged")
        runs = [{**run, "diverged": False} for run in one["runs"]]
        one["runs"] = [*runs, *({**empty, "seed": seed, "diverged": True} for seed in gone)]
    write_json(path, content)


def check_free(path: Path) -> None:
    """Refuse to overwrite a file that is not a file of results."""
    if path.exists():
        there: dict[str, Any] = {}
        if path.is_file():
            with suppress(RunError):
                there = read_json(path, dict[str, Any])
        if "study" not in there:
            raise RunError(f"{path} is not a file of results: choose another name")


def load_comparisons(folder: Path) -> list[ComparisonResults]:
    """Read the comparisons whose files, such as imdb.json, are in the folder."""
    found = []
    for path in (folder / f"{name}.json" for name in STUDIES):
        if path.exists():
            found.append(load_results(path))
            if found[-1].name != path.stem:
                raise RunError(f"{path} has results on {found[-1].name}: rename it")
    return found


def load_single_runs(folder: Path) -> dict[str, ComparisonResults]:
    """Read the results of evaluated runs in a folder of runs, by the names of their folders."""
    paths = sorted(folder.glob(f"*/{RUN_RESULTS}"))
    return {path.parent.name: load_results(path) for path in paths}


def _check_keys(what: str, found: Any, wanted: Any) -> None:
    if missing := [key for key in wanted if key not in found]:
        raise ValueError(f"{what} must have {missing[0]!r}")


def _check_distinct(what: str, names: list[Any]) -> None:
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ValueError(f"{what} must be distinct, got {', '.join(twice)} more than once")
