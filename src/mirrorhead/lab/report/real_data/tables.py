"""The tables of a study: means over seeds ± their standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from mirrorhead.lab.evaluation.rationales import EditScores, RationaleScores
from mirrorhead.lab.evaluation.results import (
    KINDS,
    SHARES,
    ComparisonResults,
    OptimizerResults,
    RunResults,
)
from mirrorhead.lab.report.table import NOTHING, Cell, Table, between, mean, number, word

PLUS_MINUS = "Mean over seeds ± their standard deviation."
HEADINGS = {
    "auprc": "AUPRC",
    "token_f1": "Token F1",
    "iou_f1": "IOU F1",
    "comprehensiveness": "Comprehensiveness",
    "sufficiency": "Sufficiency",
    "mass": "Share on edits",
}
SCORED = {"attention": "attention", "gradient": "gradient × input"}


def tables(study: ComparisonResults) -> list[Table]:
    """All tables of a study."""
    found = [_accuracy(study), _tuning(study), _pruned(study), _weights(study), _entropy(study)]
    for split, chance in study.random_eraser.items():
        found.append(_rationales(study, split, chance))
    for split, chance in study.random_cad.items():
        found.append(_edits(study, split, chance))
    return found


def _accuracy(study: ComparisonResults) -> Table:
    rows = []
    for optimizer in study.optimizers:
        test = optimizer.values(lambda run: run.test_accuracy)
        rows.append(
            (
                word(optimizer.name),
                Cell(_rate(optimizer.chosen.lr), optimizer.chosen.lr)
                if optimizer.chosen
                else NOTHING,
                _percent(optimizer, lambda run: run.test_accuracy),
                between(test, 2, 100),
                _percent(optimizer, lambda run: run.validation_accuracy),
                _percent(optimizer, lambda run: run.train_accuracy),
                between(optimizer.values(lambda run: run.best_epoch), 0),
                _seconds(optimizer),
                _seeds(optimizer),
            )
        )
    columns = ("Optimizer", "lr", "Test %", "Lowest to highest", "Validation %", "Train %")
    return Table(
        f"{study.name}-accuracy", "Accuracy",
        (*columns, "Best epoch", "Seconds an epoch", "Seeds"), tuple(rows),
        f"{PLUS_MINUS} The epoch with the best validation accuracy; train accuracy is of the"
        " pass that was trained on. Seconds are those of the fastest epoch of all seeds, on one"
        " thread: other work on the machine can only add.",
    )  # fmt: skip


def _tuning(study: ComparisonResults) -> Table:
    most = max(len(optimizer.tried) for optimizer in study.optimizers)
    rows = []
    for optimizer in study.optimizers:
        cells = [_tried(optimizer, k) for k in range(most)]
        rows.append((word(optimizer.name), *cells))
    columns = ("Optimizer", *(f"Rate {k + 1}" for k in range(most)))
    note = "Validation accuracy in % of each learning rate, with one seed; * is the chosen one,"
    note += " ** if it is the smallest or largest, so that a rate beyond might be better."
    return Table(f"{study.name}-tuning", "Tuning", columns, tuple(rows), note)


def _tried(optimizer: OptimizerResults, k: int) -> Cell:
    if k >= len(optimizer.tried):
        return NOTHING
    tried = optimizer.tried[k]
    if tried.validation_accuracy is None:
        return Cell(f"{_rate(tried.lr)}: diverged", NOTHING.key)
    star = ""
    if optimizer.chosen and optimizer.chosen.lr == tried.lr:
        rates = [one.lr for one in optimizer.tried]
        star = " **" if tried.lr in (min(rates), max(rates)) else " *"
    percent = 100 * tried.validation_accuracy
    return Cell(f"{_rate(tried.lr)}: {percent:.2f}{star}", percent)


def _pruned(study: ComparisonResults) -> Table:
    rows = [
        (
            word(optimizer.name),
            _percent(optimizer, lambda run: run.test_accuracy),
            *(_percent(optimizer, lambda run, s=share: run.measures.pruned[s]) for share in SHARES),
        )
        for optimizer in study.trained
    ]
    columns = ("Optimizer", "Whole", *(f"{100 * share:g} % pruned" for share in SHARES))
    note = (
        "Test accuracy in % when the smallest weights of every matrix are set to 0, without"
        f" retraining. {PLUS_MINUS}"
    )
    return Table(f"{study.name}-pruned", "Accuracy after pruning", columns, tuple(rows), note)


def _weights(study: ComparisonResults) -> Table:
    indices = (("large", "≥ 0.06", 0), ("gini", "Gini", 3), ("hoyer", "Hoyer", 3))
    rows = [
        (
            word(optimizer.name),
            *(
                _defined(optimizer.values(lambda run, i=index, k=kind: _index(run, k, i)), digits)
                for index, _, digits in indices
                for kind in KINDS
            ),
        )
        for optimizer in study.trained
    ]
    columns = (
        "Optimizer",
        *(f"{name} {kind[0].upper()}" for _, name, _ in indices for kind in KINDS),
    )
    note = (
        "Weights of the key, query and value maps: how many are 0.06 and above in size (Figure"
        " 8), Gini and Hoyer index (0 if all are equal, 1 if one has everything; none where a run"
        f" has all of them 0). {PLUS_MINUS}"
    )
    return Table(f"{study.name}-weights", "Sparsity of attention", columns, tuple(rows), note)


def _entropy(study: ComparisonResults) -> Table:
    rows = [
        (
            word(optimizer.name),
            mean(optimizer.values(lambda run: run.measures.entropy)),
            mean(optimizer.values(lambda run: min(run.measures.entropy_by_head))),
            mean(optimizer.values(lambda run: max(run.measures.entropy_by_head))),
        )
        for optimizer in study.trained
    ]
    note = (
        "Normalized entropy of what [CLS] looks at in the last layer, on test data: 1 if it looks"
        f" at all tokens alike, 0 if at one. {PLUS_MINUS}"
    )
    columns = ("Optimizer", "All heads", "Sharpest head", "Flattest head")
    return Table(f"{study.name}-entropy", "Entropy of attention", columns, tuple(rows), note)


def _rationales(study: ComparisonResults, split: str, chance: RationaleScores) -> Table:
    note = (
        f"ERASER {split}, {chance.documents} documents, of whose words people marked"
        f" {chance.chance:.1%}. {PLUS_MINUS}"
    )
    return _selection(
        f"{study.name}-eraser-{split}", f"Words that people marked: ERASER {split}", note,
        study.trained, lambda run: run.measures.eraser[split], chance,
    )  # fmt: skip


def _edits(study: ComparisonResults, split: str, chance: EditScores) -> Table:
    note = (
        f"Counterfactual pairs, {split}, {chance.pairs} of them, in which {chance.chance:.1%} of"
        f" the tokens were edited to flip the label. {PLUS_MINUS}"
    )
    return _selection(
        f"{study.name}-cad-{split}", f"Tokens that flip the label: counterfactual {split}", note,
        study.trained, lambda run: run.measures.cad[split], chance,
    )  # fmt: skip


def _selection(
    name: str,
    title: str,
    note: str,
    optimizers: Sequence[OptimizerResults],
    of: Callable[[RunResults], Mapping[str, Any]],
    chance: RationaleScores | EditScores,
) -> Table:
    """Scores of attention and of its baselines, rows by scorer and then by optimizer."""
    columns = [field.name for field in fields(chance) if field.name in HEADINGS]
    rows = [
        (
            word(optimizer.name),
            word(words),
            *(
                mean(optimizer.values(lambda run, s=s, c=c: getattr(of(run)[s], c)))
                for c in columns
            ),
        )
        for s, words in SCORED.items()
        for optimizer in optimizers
    ]
    rows.append((word("–"), word("random"), *(number(getattr(chance, c)) for c in columns)))
    headings = ("Optimizer", "Scored", *(HEADINGS[column] for column in columns))
    return Table(name, title, headings, tuple(rows), note)


def _rate(lr: float) -> str:
    """A learning rate without powers of ten, so that four in a row are compared at a glance."""
    return np.format_float_positional(lr, trim="-")


def _percent(optimizer: OptimizerResults, of: Callable[[RunResults], float]) -> Cell:
    return mean(optimizer.values(of), 2, 100)


def _index(run: RunResults, kind: str, index: str) -> float | None:
    return getattr(run.measures.weights[kind], index)


def _defined(values: Sequence[float | None], digits: int) -> Cell:
    """The mean, if all runs have one."""
    found = [value for value in values if value is not None]
    return mean(found, digits) if len(found) == len(values) else NOTHING


def _seconds(optimizer: OptimizerResults) -> Cell:
    found = [s for s in optimizer.values(lambda run: run.seconds_per_epoch) if s is not None]
    return number(min(found), 1) if found else NOTHING


def _seeds(optimizer: OptimizerResults) -> Cell:
    """How many runs; and how many seeds diverged, which means leave out."""
    diverged = f" ({len(optimizer.diverged)} diverged)" if optimizer.diverged else ""
    return Cell(f"{len(optimizer.runs)}{diverged}", len(optimizer.runs))
