"""The study of a sweep: optimizers by learning rates by seeds, on any data set; nothing is claimed.

Its file is named after the data set, the preset and a hash of both, so that two sweeps with
different candidates share their runs, and runs on other data are never taken for these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mirrorhead_lab.datasets import find, fingerprint
from mirrorhead_lab.evaluation.results import Classified
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, word
from mirrorhead_lab.runtime.fingerprints import digest
from mirrorhead_lab.studies import classifiers
from mirrorhead_lab.studies.classifiers import Classifier, classifier_study, rates
from mirrorhead_lab.studies.study import Method, Rows, Study
from mirrorhead_lab.studies.tables import PLUS_MINUS, Columns, over_seeds, seeds_column
from mirrorhead_lab.training.presets import PRESETS, USUAL_PRESET
from mirrorhead_lab.training.settings import OptimizerSettings

#: By the kind of data, what is compared if nothing else is asked.
USUAL: dict[str, dict[str, Method]] = {
    "text": {
        "mirror-descent p=1.1": rates("mirror-descent", 0.03, 0.1, 0.3, 1.0, p=1.1),
        "mirror-adam p=1.1 knee=1.0": rates("mirror-adam", 1e-4, 3e-4, 1e-3, 3e-3, p=1.1, knee=1.0),
        "adamw weight_decay=0.01": rates("adamw", 3e-5, 1e-4, 3e-4, 1e-3, weight_decay=0.01),
    },
    "images": {
        "mirror-descent p=1.1": rates("mirror-descent", 0.03, 0.1, 0.3, 1.0, p=1.1),
        "mirror-adam p=1.1 knee=1.0": rates("mirror-adam", 1e-3, 3e-3, 0.01, 0.03, p=1.1, knee=1.0),
        "adamw weight_decay=0.01": rates("adamw", 1e-3, 3e-3, 0.01, 0.03, weight_decay=0.01),
    },
}


def sweep(
    data_set: str,
    candidates: Mapping[str, Sequence[OptimizerSettings]] | None = None,
    *,
    preset: str = "",
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int | None = None,
    data: Path | None = None,
    partial: bool = False,
) -> Study[Any]:
    """Return the study of a sweep; `mirrorhead_lab.studies.engine.make` makes its runs.

    Args:
        data_set: as `datasets.find` takes it.
        candidates: for each name, the same optimizer with different learning rates, as many for
            each name; without, `USUAL`.
        preset: everything but the optimizer; without, the usual one for the kind of data.
        seeds: of the final runs. Tuning uses the first.
        epochs: instead of the preset's.
        data, partial: as in `load_sets`.
    """
    kind = find(data_set).kind
    preset = preset or USUAL_PRESET[kind]
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if PRESETS[preset].kind != kind:
        own = PRESETS[preset].kind
        raise ValueError(f"preset must be for {kind}, as {data_set} is; {preset} is for {own}")
    methods = dict(map(_method, candidates, candidates.values())) if candidates else USUAL[kind]
    counts = {name: len(method.settings) for name, method in methods.items()}
    if len({*counts.values()}) != 1:
        raise ValueError(
            f"candidate: all must have the same number of learning rates, got {counts}"
        )
    if not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds must be different numbers, none negative, got {list(seeds)}")
    what = Classifier(preset, data_set, epochs, partial, annotated=False)
    sets = classifiers.load(what, "", data).sets
    prints = [fingerprint(part) for part in (sets.train, sets.validation, sets.test)]
    key = digest([preset, what.base.training.identity(), *prints])
    return classifier_study(
        what,
        methods,
        name=f"{sets.name}-{preset}-{key}",
        title=sets.name,
        seeds=tuple(seeds),
        shared=True,
        tables=lambda rows: (table(rows),),
    )


def table(rows: Rows[Classified]) -> Table:
    """Return a row for each candidate."""
    percent = partial(over_seeds, rows, digits=2, scale=100)

    def rate(name: str) -> Cell:
        lr = (rows.chosen(name) or {}).get("lr")
        return Cell(f"{lr:g}", lr) if lr else Cell("all diverged", NOTHING.key)

    columns: Columns = {
        "Candidate": word,
        "lr": rate,
        "Validation %": percent(lambda run: run.validation),
        "Test %": percent(lambda run: run.test),
        "90 % pruned": percent(lambda run: run.pruned[0.9]),
        "Seeds": seeds_column(rows),
    }
    return Table.of("sweep", rows.study.title, columns, rows.study.methods, PLUS_MINUS)


def _method(name: str, rules: Sequence[OptimizerSettings]) -> tuple[str, Method]:
    if not rules or len({dataclasses.replace(one, lr=1.0) for one in rules}) != 1:
        raise ValueError(f"candidates[{name!r}] must have rates, and differ in lr alone")
    (first, *_), lrs = rules, [one.lr for one in rules]
    if len({*lrs}) < len(lrs):
        raise ValueError(f"candidates[{name!r}] has a learning rate twice")
    return name, Method(tuple({"lr": lr} for lr in sorted(lrs)), first)
