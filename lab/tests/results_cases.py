"""Made-up runs of studies, true to the schema and to nothing else.

The runs of a classifier have levels, around which they scatter by the seed:

    accuracy   on test data; pruning takes `falls` of it at 90 %, less before and more after
    large, sparsity, selection, entropy   of the measures of that kind
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import structs

from mirrorhead_lab import studies
from mirrorhead_lab.evaluation.results import Classified, Measures
from mirrorhead_lab.runtime.json_files import from_plain
from mirrorhead_lab.studies import language_model
from mirrorhead_lab.studies.engine import append_row
from mirrorhead_lab.studies.study import Row, Rows, Study, Trial

DRAWN = 0.001  # the standard deviation of what scatters


@dataclass(frozen=True)
class Level:
    """Where the runs of a method are."""

    accuracy: float = 0.85
    falls: float = 0.05
    large: int = 1_000
    sparsity: float = 0.5
    selection: float = 0.3
    entropy: float = 0.9


def made_up(name: str, levels: Mapping[str, Level] = MappingProxyType({})) -> Rows[Classified]:
    """All runs of a study of classifiers; levels by the method's name, all others at the default.

    Tuning chooses the second rate, and the last diverges.
    """
    study, rng = studies.load(name), np.random.default_rng(0)

    def measure(trial: Trial) -> Classified:
        place = study.methods[trial.method].settings.index(trial.setting)
        if trial.final:
            level = levels.get(trial.method, Level())
            return _final(level, rng, texts=name != "cifar10", to_the_end="end" in name)
        if place == len(study.methods[trial.method].settings) - 1:
            return Classified()
        return Classified(best_epoch=4, train=0.9, validation=0.86 if place == 1 else 0.85)

    return filled(study, measure)


def edited(
    rows: Rows[Any], method: str, change: Callable[[int, Any], Any], only: int | None = None
) -> Rows[Any]:
    """The rows with other measures in the final runs of a method, or in that of one seed."""
    found = dict(rows.by_trial)
    for trial, row in found.items():
        if trial.final and trial.method == method and only in (None, trial.seed):
            found[trial] = structs.replace(row, measured=change(trial.seed, row.measured))
    return Rows(rows.study, found, folder=rows.folder)


def _final(level: Level, rng: np.random.Generator, *, texts: bool, to_the_end: bool) -> Classified:
    falls = {0.5: 0.1, 0.8: 0.5, 0.9: 1.0, 0.95: 2.0}
    measures: dict[str, Any] = {
        "weights": {kind: _weights(level, rng) for kind in ("key", "query", "value")},
        "pruned": {s: _near(level.accuracy - f * level.falls, rng) for s, f in falls.items()},
        "entropy": {
            "mean": _near(level.entropy, rng),
            "by_head": [_near(level.entropy + d, rng) for d in (-0.05, -0.02, 0.02, 0.05)],
        },
    }
    if texts:
        scorers = {"attention": level.selection, "gradient": 0.25, "random": 0.1}
        for part, splits, make in (
            ("eraser", ("val", "test"), _rationales),
            ("cad", ("dev", "test"), _edits),
        ):
            measures[part] = {
                split: {name: make(at, rng) for name, at in scorers.items()} for split in splits
            }
    test = _near(level.accuracy, rng)
    if to_the_end:
        measures["milestones"] = _milestones(test, rng)
    return Classified(
        best_epoch=int(rng.integers(3, 6)), train=0.996 if to_the_end else 0.9, validation=0.86,
        test=test, measures=from_plain(measures, Measures, "made up"), seconds_per_epoch=20.0,
    )  # fmt: skip


def _milestones(accuracy: float, rng: np.random.Generator) -> dict[float, Any]:
    return {
        share: {
            "epoch": epoch,
            "train_accuracy": share,
            "test_accuracy": _near(accuracy + 0.01 * (5 - epoch), rng),
        }
        for epoch, share in enumerate((0.0, 0.9, 0.95, 0.975, 0.995), 1)
    }


def _weights(level: Level, rng: np.random.Generator) -> dict[str, Any]:
    drawn = rng.laplace(size=4_000)
    large = level.large + int(rng.integers(-5, 6))
    values = 0.05 * np.sign(drawn)
    values[abs(drawn).argsort()[-large:]] *= 10
    counts, edges = np.histogram(values, bins=60, range=(-0.5, 0.5))
    return {
        "large": large,
        "gini": _near(level.sparsity, rng),
        "hoyer": _near(level.sparsity, rng),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def _rationales(score: float, rng: np.random.Generator) -> dict[str, Any]:
    names = ("auprc", "token_f1", "iou_f1", "comprehensiveness", "sufficiency")
    return {"documents": 199, "chance": 0.08, **{name: _near(score, rng) for name in names}}


def _edits(score: float, rng: np.random.Generator) -> dict[str, Any]:
    names = ("auprc", "mass")
    return {"pairs": 488, "chance": 0.11, **{name: _near(score, rng) for name in names}}


def _near(value: float, rng: np.random.Generator) -> float:
    return float(value + DRAWN * rng.standard_normal())


def filled(study: Study[Any], measure: Callable[[Trial], Any]) -> Rows[Any]:
    """All rows of a study, in its order, with what `measure` says of each run."""
    rows = Rows(study)
    while missing := rows.missing():
        more = {trial: Row(trial, measure(trial), 1.0) for trial in missing}
        rows = Rows(study, {**rows.by_trial, **more})
    return rows


def words(rows: Rows[Any]) -> dict[str, str]:
    """The verdicts of a study, by the names of its claims."""
    return {finding.name: finding.word for finding in rows.study.part(rows).findings}


def write_rows(folder: Path, rows: Rows[Any]) -> Path:
    """Write a study's file where it belongs."""
    for row in rows:
        append_row(folder / rows.study.file, row)
    return folder / rows.study.file


def losses(trial: Trial, test: float = 2.0, pruned: float = 3.0) -> language_model.Losses:
    """What a run of the study of language models measures, with these losses."""
    if not trial.final:
        return language_model.Losses(curve=(3.0, test), validation=test)
    return language_model.Losses(
        curve=(3.0, test), validation=test, test=test,
        pruned=dict.fromkeys(language_model.SHARES, pruned),
        weights=language_model.WeightSizes(1.0, 0.1, 0.5),
    )  # fmt: skip
