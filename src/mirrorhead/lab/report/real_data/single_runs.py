"""Single runs in the report: those that `mirrorhead evaluate` has measured, one per row."""

from __future__ import annotations

from collections.abc import Mapping

from mirrorhead.lab.evaluation.results import ComparisonResults
from mirrorhead.lab.report.real_data import Part
from mirrorhead.lab.report.table import NOTHING, Cell, Table, number, word


def single_runs(runs: Mapping[str, ComparisonResults]) -> Part:
    """Return the part with a table of runs, by the names of their folders."""
    columns = (
        "Run", "Data", "Optimizer", "lr", "Seed", "Best epoch", "Validation %", "Test %",
        "90 % pruned", "Gini of queries", "Entropy", "ERASER val AUPRC", "Edits test AUPRC",
    )  # fmt: skip
    note = (
        "Accuracies in %, of the epoch with the best validation accuracy. Pruning sets the smallest"
        " weights of every matrix to 0 without retraining. Entropy is that of [CLS]'s attention in"
        " the last layer. One run shows no effect of an optimizer: compare over several seeds with"
        " `mirrorhead sweep`."
    )
    rows = tuple(_row(name, results) for name, results in runs.items())
    return Part(
        "single-runs",
        "Single runs",
        f"Runs that `mirrorhead evaluate` has measured: {len(rows)}.",
        "none",
        "mirrorhead train imdb --out runs/NAME && mirrorhead evaluate runs/NAME",
        findings=(),
        figures=(),
        tables=(Table("single-runs-table", "Measures of each run", columns, rows, note),),
    )


def _row(name: str, results: ComparisonResults) -> tuple[Cell, ...]:
    (optimizer,) = results.optimizers
    (run,) = optimizer.runs
    measures = run.measures
    gini = measures.weights["query"].gini
    assert optimizer.chosen is not None
    return (
        word(name),
        word(results.name),
        word(optimizer.name),
        Cell(f"{optimizer.chosen.lr:g}", optimizer.chosen.lr),
        number(run.seed, 0),
        number(run.best_epoch, 0),
        number(100 * run.validation_accuracy, 2),
        number(100 * run.test_accuracy, 2),
        number(100 * measures.pruned[0.9], 2),
        NOTHING if gini is None else number(gini),
        number(measures.entropy),
        number(measures.eraser["val"]["attention"].auprc) if measures.eraser else NOTHING,
        number(measures.cad["test"]["attention"].auprc) if measures.cad else NOTHING,
    )
