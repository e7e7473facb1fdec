"""The real-data parts of the report: comparisons of optimizers, and a table of single runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirrorhead_lab.evaluation.results import ComparisonResults
from mirrorhead_lab.findings.finding import Part
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, number, word
from mirrorhead_lab.report.real_data.claims import RULE, RULE_OF_BOTH, judge_study
from mirrorhead_lab.report.real_data.figures import drawings
from mirrorhead_lab.report.real_data.tables import tables

TITLES = {
    "imdb": "IMDb: is a review positive?",
    "imdb-to-the-end": "IMDb, trained to 99.5 % training accuracy",
    "cifar10": "CIFAR-10: what does an image show?",
}


def part(study: ComparisonResults, studies: Sequence[ComparisonResults] = ()) -> Part:
    """Judge, draw and tabulate a comparison of optimizers; see `judge_study` for `studies`."""
    return Part(
        study.name,
        TITLES[study.name],
        about(study),
        study.rule,
        RULE + RULE_OF_BOTH if study.to_the_end else RULE,
        study.command,
        tuple(judge_study(study, studies)),
        drawings(study),
        tuple(tables(study)),
    )


def about(study: ComparisonResults) -> str:
    """Say in a sentence what was trained on what."""
    sizes = study.sizes
    thing = "reviews" if study.data == "imdb" else "images"
    length, chosen = f"{study.epochs} epochs", "the epoch and the learning rate, and"
    if study.to_the_end:
        length = f"at most {study.epochs} epochs, until 99.5 % training accuracy,"
        chosen = "the learning rate; the weights after the last epoch are measured;"
    return (
        f"{len(study.optimizers)} optimizers train the same model (preset {study.preset}) for"
        f" {length} with batches of {study.batch_size}, on {sizes.train:,} {thing};"
        f" {sizes.validation:,} are the validation set, which chooses {chosen}"
        f" {sizes.test:,} are the test set."
    )


def single_runs(runs: Mapping[str, ComparisonResults]) -> Part:
    """Return the part with a table of runs, by the names of their folders."""
    columns = (
        "Run", "Study", "Optimizer", "lr", "Seed", "Epoch", "Validation %", "Test %",
        "90 % pruned", "Gini of queries", "Entropy", "ERASER val AUPRC", "Edits test AUPRC",
    )  # fmt: skip
    note = (
        "Accuracies in %, of the epoch with the best validation accuracy, or of the last in a run"
        " to the end. Pruning sets the smallest weights of every matrix to 0 without retraining."
        " Entropy is that of [CLS]'s attention in the last layer. One run shows no effect of an"
        " optimizer: compare over several seeds with `mirrorhead sweep`."
    )
    rows = tuple(_row(name, results) for name, results in runs.items())
    return Part(
        "single-runs",
        "Single runs",
        f"Runs that `mirrorhead evaluate` has measured: {len(rows)}.",
        "none",
        "",
        "mirrorhead train imdb --out runs/NAME && mirrorhead evaluate runs/NAME",
        tables=(Table("single-runs-table", "Measures of each run", columns, rows, note),),
    )


def _row(name: str, results: ComparisonResults) -> tuple[Cell, ...]:
    (optimizer,) = results.optimizers
    (run,) = optimizer.runs
    found = run.measures
    gini = found.weights["query"].gini
    assert optimizer.chosen is not None
    accuracies = (run.validation_accuracy, run.test_accuracy, found.pruned[0.9])
    return (
        *map(word, (name, results.name, optimizer.name)),
        Cell(f"{optimizer.chosen.lr:g}", optimizer.chosen.lr),
        *(number(count, 0) for count in (run.seed, run.best_epoch)),
        *(number(100 * accuracy, 2) for accuracy in accuracies),
        NOTHING if gini is None else number(gini),
        number(found.entropy.mean),
        number(found.eraser["val"]["attention"].auprc) if found.eraser else NOTHING,
        number(found.cad["test"]["attention"].auprc) if found.cad else NOTHING,
    )
