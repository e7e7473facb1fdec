"""A table of single runs: those in a folder that `mirrorhead evaluate` has measured in full."""

from __future__ import annotations

from pathlib import Path

from mirrorhead_lab.evaluation.measures import kept_measures
from mirrorhead_lab.evaluation.results import Measures
from mirrorhead_lab.findings.finding import Part
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, number, word
from mirrorhead_lab.training.candidates import candidate_name
from mirrorhead_lab.training.presets import Preset
from mirrorhead_lab.training.run_folder import PRESET, read_outcome, read_preset, read_score

COLUMNS = (
    "Run", "Data", "Optimizer", "lr", "Seed", "Epoch", "Validation %", "Test %",
    "90 % pruned", "Gini of queries", "Entropy", "ERASER val AUPRC", "Edits test AUPRC",
)  # fmt: skip


def single_runs(folder: Path) -> Part | None:
    """Return the part with a row for each run; None if there is none."""
    runs = (path.parent for path in sorted(folder.glob(f"*/{PRESET}")))
    rows = [row for run in runs if (row := _row(run, read_preset(run))) is not None]
    note = (
        "Accuracies in %, of the epoch with the best validation accuracy, or of the last in a run"
        " to the end. Pruning sets the smallest weights of every matrix to 0 without retraining."
        " Entropy is that of [CLS]'s attention in the last layer. One run shows no effect of an"
        " optimizer: compare over several seeds with `mirrorhead sweep`."
    )
    table = Table("single-runs-table", "Measures of each run", COLUMNS, tuple(rows), note)
    part = Part(
        "single-runs",
        "Single runs",
        f"Runs that `mirrorhead evaluate` has measured: {len(rows)}.",
        "none",
        "",
        "mirrorhead train imdb --out runs/NAME && mirrorhead evaluate runs/NAME",
        tables=(table,),
    )
    return part if rows else None


def _row(folder: Path, chosen: Preset) -> tuple[Cell, ...] | None:
    """Return the row of a run; None if it has not finished, or is not measured in full."""
    outcome, score = read_outcome(folder), read_score(folder)
    found: Measures | None = kept_measures(folder, chosen)
    if outcome is None or score is None or found is None:
        return None
    rule, gini = chosen.training.optimizer, found.weights["query"].gini
    accuracies = (outcome.best_accuracy, score.accuracy, found.pruned[0.9])
    return (
        *map(word, (folder.name, chosen.data, candidate_name(rule))),
        Cell(f"{rule.lr:g}", rule.lr),
        *(number(count, 0) for count in (chosen.training.seed, outcome.best_epoch)),
        *(number(100 * accuracy, 2) for accuracy in accuracies),
        NOTHING if gini is None else number(gini),
        number(found.entropy.mean),
        number(found.eraser["val"]["attention"].auprc) if found.eraser else NOTHING,
        number(found.cad["test"]["attention"].auprc) if found.cad else NOTHING,
    )
