"""Made-up results of real-data studies, true to the schema and to nothing else.

A rival has levels, around which its runs scatter by the seed:

    accuracy   on test data; pruning takes `falls` of it at 90 %, less before and more after
    large, sparsity, selection, entropy   of the measures of that kind
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mirrorhead_lab.studies import language_model
from mirrorhead_lab.studies.engine import append_row
from mirrorhead_lab.studies.study import Row, Rows, Study, Trial
from mirrorhead_lab.training.presets import COMPARISONS

DRAWN = 0.001  # the standard deviation of what scatters


@dataclass(frozen=True)
class Level:
    """Where a rival's runs are."""

    accuracy: float = 0.85
    falls: float = 0.05
    large: int = 1_000
    sparsity: float = 0.5
    selection: float = 0.3
    entropy: float = 0.9


def made_up(study: str, levels: Mapping[str, Level] = MappingProxyType({})) -> dict[str, Any]:
    """The content of a file; levels by the rival's name, all others at the default."""
    rng = np.random.default_rng(0)
    asked = COMPARISONS[study]
    rivals = []
    for name, rules in asked.candidates.items():
        level = levels.get(name, Level())
        tried = [
            {"lr": rule.lr, "diverged": False, "validation_accuracy": 0.86, "best_epoch": 4}
            for rule in rules
        ]
        tried[-1] |= {"diverged": True, "validation_accuracy": None, "best_epoch": None}
        runs = [_run(seed, level, rng, texts=study != "cifar10") for seed in asked.seeds]
        rivals.append({"name": name, "chosen": asdict(rules[1]), "tried": tried, "runs": runs})
    content: dict[str, Any] = {
        "study": study, "preset": asked.preset, "epochs": 5, "batch_size": 32,
        "rule": "4 learning rates for each rival; <validation> chooses",
        "command": f"mirrorhead sweep {study}",
        "sizes": {"train": 20185, "validation": 2242, "test": 25000},
        "rivals": rivals,
    }  # fmt: skip
    if study == "imdb-to-the-end":
        for rival in rivals:
            for run in rival["runs"]:
                run["train_accuracy"] = 0.996
                run["measures"]["milestones"] = _milestones(run["test_accuracy"], rng)
    if study != "cifar10":
        content["baselines"] = {
            "random": {
                "eraser": {"val": _rationales(0.1, rng), "test": _rationales(0.2, rng)},
                "cad": {"dev": _edits(0.1, rng), "test": _edits(0.15, rng)},
            }
        }
    return content


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Write a file of results where it belongs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content['study']}.json"
    path.write_text(json.dumps(content))
    return path


def _run(seed: int, level: Level, rng: np.random.Generator, *, texts: bool) -> dict[str, Any]:
    falls = {"0.5": 0.1, "0.8": 0.5, "0.9": 1.0, "0.95": 2.0}
    measures: dict[str, Any] = {
        "weights": {kind: _weights(level, rng) for kind in ("key", "query", "value")},
        "pruned": {s: _near(level.accuracy - f * level.falls, rng) for s, f in falls.items()},
        "entropy": {
            "mean": _near(level.entropy, rng),
            "by_head": [_near(level.entropy + d, rng) for d in (-0.05, -0.02, 0.02, 0.05)],
        },
    }
    if texts:
        score = level.selection
        measures["eraser"] = {
            split: {"attention": _rationales(score, rng), "gradient": _rationales(0.25, rng)}
            for split in ("val", "test")
        }
        measures["cad"] = {
            split: {"attention": _edits(score, rng), "gradient": _edits(0.25, rng)}
            for split in ("dev", "test")
        }
    return {
        "seed": seed, "best_epoch": int(rng.integers(3, 6)),
        "train_accuracy": 0.9, "validation_accuracy": 0.86,
        "test_accuracy": _near(level.accuracy, rng), "measures": measures,
        "diverged": False, "seconds_per_epoch": 20.0 + seed,
    }  # fmt: skip


def _milestones(accuracy: float, rng: np.random.Generator) -> dict[str, Any]:
    return {
        str(share): {
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
