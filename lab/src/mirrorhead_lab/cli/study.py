"""`mirrorhead study`: make the missing runs of a study, and print its verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from mirrorhead_lab.cli import options

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Study:
    """Compare optimizers on a language model, or in fine-tuning a pretrained encoder.

    Learning rates are tuned alike for every method on validation data; the chosen ones are run with
    several seeds. Each run is kept as soon as it is finished. Run the same command again to resume
    a study that was stopped; once all runs are there, it prints tables and verdicts.
    """

    name: Positional[Literal["language-model", "fine-tuning"]]
    """A small GPT on the characters of reviews, or MiniLM on their labels."""
    results: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """Where the file of its runs is, or will be."""
    backend: options.BackendName = "local"
    address: options.Address = ""
    jobs: options.Jobs = None
    data: options.DataFolder = None

    def run(self) -> int:
        from rich.console import Console

        from mirrorhead_lab.evaluation.studies import STUDIES, name_of, run_study
        from mirrorhead_lab.models.pretrained import PretrainedError
        from mirrorhead_lab.report.studies import PARTS
        from mirrorhead_lab.report.terminal import print_findings
        from mirrorhead_lab.runtime.jobs import BackendError
        from mirrorhead_lab.runtime.progress import ProgressBars

        study, console = STUDIES[self.name], Console()
        backend = options.chosen_backend(self.backend, self.address, self.jobs, self.results)
        bars = ProgressBars({self.name: study.total}, "runs", console)
        bars.advance(self.name, len(study.load(self.results / study.file)))

        def tell(key: Any, run: Any) -> None:
            bars.advance(self.name)
            bars.say(f"{name_of(key)}: {_said(run)}")

        with options.user_errors(BackendError, PretrainedError), bars:
            runs = run_study(study, self.results, backend, data=self.data, listener=tell)
        part = PARTS[self.name](runs)
        for table in part.tables:
            _print(table, console)
        print_findings(part.findings, console)
        print(f"runs: {self.results / study.file} (`mirrorhead report` shows them)")
        return 0


def _said(run: Any) -> str:
    if message := getattr(run, "message", ""):
        return f"failed: {message}"
    return "diverged" if run.diverged else f"validation {run.validation:.4f}"


def _print(table: Any, console: Console) -> None:
    from rich.table import Table

    shown = Table(title=table.title, title_justify="left", caption=table.note)
    for k, column in enumerate(table.columns):
        numeric = all(row[k].is_number for row in table.rows)
        shown.add_column(column, justify="right" if numeric else "left")
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row))
    console.print(shown)
