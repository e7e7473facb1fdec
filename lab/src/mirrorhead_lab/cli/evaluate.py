"""`mirrorhead evaluate`: measures of a run's weights and attention, in tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from mirrorhead_lab.cli.options import DataFolder, Partial, option

if TYPE_CHECKING:
    from rich.table import Table

Part = Literal["test", "weights", "pruned", "entropy", "eraser", "cad", "milestones"]
#: Of the parts with human annotations: a title, what is counted, splits, and what is shown.
ANNOTATED = {
    "eraser": (
        "Words that people marked (ERASER)",
        "documents",
        ("val", "test"),
        ("auprc", "token_f1", "iou_f1", "comprehensiveness", "sufficiency"),
    ),
    "cad": ("Edits that flip the label", "pairs", ("dev", "test"), ("auprc", "mass")),
}
SCORERS = {"attention": "attention", "gradient": "gradient x input", "random": "random"}


@dataclass(frozen=True)
class Evaluate:
    """Measure a run: accuracy, sparsity, entropy, and its attention against human rationales.

    Measures are kept in measures.json in the run's folder, and not measured again while weights
    and data are the same. `mirrorhead report` shows finished runs of which all parts are measured.
    """

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of a run."""
    on: Annotated[tuple[Part, ...], UseAppendAction, option("PART")] = ()
    """Measure this alone: test (accuracy), weights, pruned, entropy, eraser (rationales), cad
    (counterfactual edits) or milestones (accuracy along training); may be repeated. All that fit
    the run if not given."""
    data: DataFolder = None
    partial: Partial = False

    def run(self) -> int:
        from rich.console import Console

        from mirrorhead_lab.evaluation import EvaluationData, measure
        from mirrorhead_lab.training import load_run

        console = Console()
        run = load_run(self.folder)
        data = EvaluationData.of(run, self.data, partial=self.partial)
        with console.status("reading data") as status:
            found = measure(
                run, data, self.on or None, lambda part: status.update(f"measuring: {part}")
            )
        for table in tables(found):
            console.print(table, "")
        print(f"measures: {self.folder / 'measures.json'}")
        return 0


def tables(found: dict[str, Any]) -> Iterable[Table]:
    """Return measures as tables, one per part."""
    for part, values in found.items():
        if part == "test":
            row = [f"{values['accuracy']:.2%}", _number(values["loss"])]
            yield _table("Test", ["accuracy", "loss"], [row])
        elif part == "weights":
            rows = [
                [kind, f"{of['large']:,}", _number(of["gini"]), _number(of["hoyer"])]
                for kind, of in values.items()
            ]
            yield _table("Weights", ["", "of size .06 and above", "Gini", "Hoyer"], rows)
        elif part == "pruned":
            row = [f"{accuracy:.2%}" for accuracy in values.values()]
            shares = [f"{float(share):.0%}" for share in values]
            yield _table("Test accuracy without the smallest weights", shares, [row])
        elif part == "entropy":
            row = [_number(x) for x in (values["mean"], *values["by_head"])]
            heads = [f"head {i}" for i in range(len(row) - 1)]
            yield _table("Entropy of [CLS]'s attention, last layer", ["mean", *heads], [row])
        elif part == "milestones":
            rows = [
                [f"{float(share):.1%}", str(of["epoch"]), f"{of['test_accuracy']:.2%}"]
                for share, of in values.items()
            ]
            columns = ["training accuracy reached", "epoch", "test accuracy"]
            yield _table("Along training", columns, rows)
        else:
            title, count, splits, columns = ANNOTATED[part]
            for split in splits:
                scores = values[split]
                one = scores["attention"]
                heading = f"{title}: {split}, {one[count]} {count}, share {one['chance']:.4f}"
                rows = [
                    [who, *(_number(scores[name][column]) for column in columns)]
                    for name, who in SCORERS.items()
                ]
                yield _table(heading, ["", *(c.replace("_", " ") for c in columns)], rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.min_width = len(title)  # a title is one line
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
