"""The tables of a study: means over seeds ± their standard deviation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np
from msgspec import UnsetType

from mirrorhead_lab.evaluation.large_weights import counted, explained, threshold
from mirrorhead_lab.evaluation.rationales import EditScores, RationaleScores
from mirrorhead_lab.evaluation.results import (
    KINDS,
    SHARES,
    ComparisonResults,
    OptimizerResults,
    RunResults,
)
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, between, mean, number, word

#: Headings and cells of a table with a row for each optimizer.
Columns = dict[str, Callable[[OptimizerResults], Cell]]

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
    found = [_accuracy(study), *([_equal_training(study)] if study.to_the_end else [])]
    found += [_tuning(study), _pruned(study), _weights(study), _entropy(study)]
    for split, chance in study.random_eraser.items():
        title = f"Words that people marked: ERASER {split}"
        note = (
            f"ERASER {split}, {chance.documents} documents, of whose words people marked"
            f" {chance.chance:.1%}. {PLUS_MINUS}"
        )
        found.append(_selection(study, "eraser", split, title, note, chance))
    for split, chance in study.random_cad.items():
        title = f"Tokens that flip the label: counterfactual {split}"
        note = (
            f"Counterfactual pairs, {split}, {chance.pairs} of them, in which {chance.chance:.1%}"
            f" of the tokens were edited to flip the label. {PLUS_MINUS}"
        )
        found.append(_selection(study, "cad", split, title, note, chance))
    return found


def _table(study: ComparisonResults, name: str, title: str, columns: Columns, note: str) -> Table:
    """A row for each optimizer; one without runs is in the tables of accuracy and tuning alone."""
    columns = {"Optimizer": lambda one: word(one.name)} | columns
    optimizers = study.optimizers if name in ("accuracy", "tuning") else study.trained
    return Table.of(f"{study.name}-{name}", title, columns, optimizers, note)


def _accuracy(study: ComparisonResults) -> Table:
    ended = study.to_the_end
    epoch = "Last epoch" if ended else "Best epoch"
    which = "The last epoch" if ended else "The epoch with the best validation accuracy"
    kept = (
        " Best kept is the best test accuracy of the epochs whose weights were kept, about nine a"
        " run; the paper's Table 1 has the best of all epochs."
    )
    columns: Columns = {
        "lr": lambda one: Cell(_rate(one.chosen.lr), one.chosen.lr) if one.chosen else NOTHING,
        "Test %": _percent(lambda run: run.test_accuracy),
        "Lowest to highest": lambda one: between(one.values(lambda r: r.test_accuracy), 2, 100),
        **({"Best kept test %": _percent(lambda r: r.best_kept_accuracy)} if ended else {}),
        "Validation %": _percent(lambda run: run.validation_accuracy),
        "Train %": _percent(lambda run: run.train_accuracy),
        epoch: lambda one: between(one.values(lambda run: run.best_epoch), 0),
        "Seconds an epoch": _seconds,
        "Seeds": _seeds,
    }
    note = (
        f"{PLUS_MINUS} {which}; train accuracy is of the pass that was trained on. Seconds are"
        " those of the fastest epoch of all seeds, on one thread: other work on the machine can"
        f" only add.{kept if ended else ''}"
    )
    return _table(study, "accuracy", "Accuracy", columns, note)


def _equal_training(study: ComparisonResults) -> Table:
    levels = sorted({m for one in study.trained for r in one.runs for m in r.measures.milestones})
    columns: Columns = {
        f"Train {100 * level:g} %": partial(_reached, level) for level in levels if level
    }
    note = (
        "Test accuracy in % where this share of the training reviews was classified correctly,"
        " with dropout on: interpolated between the first epoch that reached it and the one before"
        f" whose weights were kept. {PLUS_MINUS} In brackets: how many seeds reached it, if not"
        " all."
    )
    title = "Test accuracy at equal training accuracy"
    return _table(study, "equal-training", title, columns, note)


def _reached(level: float, optimizer: OptimizerResults) -> Cell:
    found = optimizer.values(lambda run: run.measures.test_accuracy_at(level))
    values = [value for value in found if value is not None]
    cell = mean(values, 2, 100)
    some = f" ({len(values)} of {len(found)})" if 0 < len(values) < len(found) else ""
    return replace(cell, text=cell.text + some)


def _tuning(study: ComparisonResults) -> Table:
    most = max(len(optimizer.tried) for optimizer in study.optimizers)
    columns: Columns = {f"Rate {k + 1}": partial(_tried, k) for k in range(most)}
    train = " (with train accuracy where it decides)" if study.to_the_end else ""
    note = (
        f"Validation accuracy in % of each learning rate, with one seed{train}; * is the chosen"
        " one, ** if it is the smallest or largest, so that a rate beyond might be better."
    )
    return _table(study, "tuning", "Tuning", columns, note)


def _tried(k: int, optimizer: OptimizerResults) -> Cell:
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
    train = tried.train_accuracy
    reached = "" if isinstance(train, UnsetType) else f" (train {100 * train:.1f})"
    return Cell(f"{_rate(tried.lr)}: {percent:.2f}{reached}{star}", percent)


def _pruned(study: ComparisonResults) -> Table:
    columns: Columns = {"Whole": _percent(lambda run: run.test_accuracy)}
    for share in SHARES:
        columns[f"{100 * share:g} % pruned"] = _percent(lambda run, s=share: run.measures.pruned[s])
    note = (
        "Test accuracy in % when the smallest weights of every matrix are set to 0, without"
        f" retraining. {PLUS_MINUS}"
    )
    return _table(study, "pruned", "Accuracy after pruning", columns, note)


def _weights(study: ComparisonResults) -> Table:
    size = np.format_float_positional(threshold(study), 3, trim="-")
    columns: Columns = {
        f"≥ {size} {kind[0].upper()}": _mean(counted(study, kind), digits=0) for kind in KINDS
    }
    for index in ("gini", "hoyer"):
        for kind in KINDS:
            heading = f"{index.capitalize()} {kind[0].upper()}"
            columns[heading] = partial(_sparsity, kind, index)
    note = (
        f"Weights of the key, query and value maps: {explained(study)}, Gini and Hoyer index (0"
        " if all are equal, 1 if one has everything; none where a run has all of them 0)."
        f" {PLUS_MINUS}"
    )
    return _table(study, "weights", "Sparsity of attention", columns, note)


def _entropy(study: ComparisonResults) -> Table:
    columns: Columns = {
        "All heads": _mean(lambda run: run.measures.entropy.mean),
        "Sharpest head": _mean(lambda run: min(run.measures.entropy.by_head)),
        "Flattest head": _mean(lambda run: max(run.measures.entropy.by_head)),
    }
    note = (
        "Normalized entropy of what [CLS] looks at in the last layer, on test data: 1 if it looks"
        f" at all tokens alike, 0 if at one. {PLUS_MINUS}"
    )
    return _table(study, "entropy", "Entropy of attention", columns, note)


def _selection(
    study: ComparisonResults,
    part: str,
    split: str,
    title: str,
    note: str,
    chance: RationaleScores | EditScores,
) -> Table:
    """Scores of attention and of its baselines, rows by scorer and then by optimizer."""
    indices = [field.name for field in fields(chance) if field.name in HEADINGS]
    rows = []
    for scorer, words in SCORED.items():
        for optimizer in study.trained:
            scores = optimizer.values(lambda run, s=scorer: getattr(run.measures, part)[split][s])
            means = (mean([getattr(score, index) for score in scores]) for index in indices)
            rows.append((word(optimizer.name), word(words), *means))
    rows.append((word("–"), word("random"), *(number(getattr(chance, i)) for i in indices)))
    headings = ("Optimizer", "Scored", *(HEADINGS[index] for index in indices))
    return Table(f"{study.name}-{part}-{split}", title, headings, tuple(rows), note)


def _rate(lr: float) -> str:
    """A learning rate without powers of ten, so that four in a row are compared at a glance."""
    return np.format_float_positional(lr, trim="-")


def _mean(
    of: Callable[[RunResults], float], digits: int = 3, scale: float = 1
) -> Callable[[OptimizerResults], Cell]:
    return lambda optimizer: mean(optimizer.values(of), digits, scale)


_percent = partial(_mean, digits=2, scale=100)


def _sparsity(kind: str, index: str, optimizer: OptimizerResults) -> Cell:
    """The mean of an index, if all runs have one."""
    values = optimizer.values(lambda run: getattr(run.measures.weights[kind], index))
    return NOTHING if None in values else mean(values)


def _seconds(optimizer: OptimizerResults) -> Cell:
    found = [s for s in optimizer.values(lambda run: run.seconds_per_epoch) if s is not None]
    return number(min(found), 1) if found else NOTHING


def _seeds(optimizer: OptimizerResults) -> Cell:
    """How many runs; and how many seeds diverged, which means leave out."""
    diverged = f" ({len(optimizer.diverged)} diverged)" if optimizer.diverged else ""
    return Cell(f"{len(optimizer.runs)}{diverged}", len(optimizer.runs))
