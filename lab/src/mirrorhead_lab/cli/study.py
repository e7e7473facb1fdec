"""`mirrorhead study`: make the missing runs of a study, and print its verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.studies import NAMES, REPORTED

if TYPE_CHECKING:
    from rich.console import Console

    from mirrorhead_lab.findings.finding import Part

NAME_HELP = f"One of {', '.join(NAMES)}; your own by the name of its module."
Plan = Annotated[options.Flag, arg(help="Say which runs are missing and how long they take.")]


@dataclass(frozen=True)
class Study:
    """Compare methods that are tuned alike on validation data, and judge what is claimed of them.

    Only the chosen settings, run with several seeds, read test data. Each run is kept as soon as it
    is finished. Run the same command again to resume a study that was stopped; once all runs are
    there, it prints tables and verdicts.
    """

    name: Annotated[Positional[str], arg(metavar="NAME", help=NAME_HELP)]
    results: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """Where the file of its runs is, or will be."""
    runs: Annotated[Path, option("FOLDER", "(default: runs)")] = Path("runs")
    """Where runs keep what is expensive, such as models; on a cluster, a folder that is shared."""
    plan: Plan = False
    backend: options.BackendName = "local"
    address: options.Address = ""
    jobs: options.Jobs = None
    data: options.DataFolder = None

    def run(self) -> int:
        from mirrorhead_lab import studies
        from mirrorhead_lab.report.terminal import print_findings

        with options.user_errors(TypeError, ValueError):
            study = studies.load(self.name)
        part = made(self, study, self.results, self.runs)
        if part is not None:
            print_findings(part.findings, console())
            own = "" if self.name in REPORTED else f" --study {self.name}"
            path = self.results / study.file
            print(f"runs: {path} (`mirrorhead report{own}` shows them)")
        return 0


def made(command: Any, study: Any, results: Path, runs: Path) -> Part | None:
    """Make the missing runs of a study as a command's options say, and print its tables.

    With `plan`, only say what is missing, and return None.
    """
    from mirrorhead_lab.models.pretrained import PretrainedError
    from mirrorhead_lab.report.page import duration
    from mirrorhead_lab.runtime.jobs import BackendError
    from mirrorhead_lab.runtime.progress import ProgressBars
    from mirrorhead_lab.studies.engine import make, read_rows

    backend = options.chosen_backend(command.backend, command.address, command.jobs, results)
    rows = read_rows(study, results / study.file)
    left = rows.left()
    if left or command.plan:
        are = "run is" if len(left) == 1 else "runs are"
        print(f"{len(left)} {are} missing, about {duration(rows.cost())} of one core")
    if command.plan:
        print(*left, sep="\n")
        return None
    bars = ProgressBars({study.name: len(rows) + len(left)}, "runs", console())
    bars.advance(study.name, len(rows))

    def tell(trial: Any, row: Any) -> None:
        bars.advance(study.name)
        bars.say(f"{trial}: {_said(study, row)}")

    with options.user_errors(BackendError, PretrainedError), bars:
        rows = make(study, results, backend, data=command.data, runs=runs, listener=tell)
    part = study.part(rows)
    for table in part.tables:
        _print(table)
    return part


def console() -> Console:
    from rich.console import Console

    return Console()


def _said(study: Any, row: Any) -> str:
    if message := getattr(row, "message", ""):
        return f"failed: {message}"
    score = study.score(row.measured)
    return "diverged" if score is None else f"validation {abs(score):.4f}"


def _print(table: Any) -> None:
    from rich.table import Table

    shown = Table(title=table.title, title_justify="left", caption=table.note)
    for k, column in enumerate(table.columns):
        numeric = all(row[k].is_number for row in table.rows)
        shown.add_column(column, justify="right" if numeric else "left")
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row))
    console().print(shown)
