"""`mirrorhead reproduce`: run the experiments, write the report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from mirrorhead.lab.cli.backends import BackendName, chosen_backend
from mirrorhead.lab.cli.entries import check_matplotlib, entry_of, print_verdicts, with_stored
from mirrorhead.lab.experiments import NAMES
from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from mirrorhead.lab.experiments.runner import Run

ONLY_HELP = (
    "Run these alone: names, with commas between them or with the option repeated; your own "
    f"by the name of its module. There are: {', '.join(NAMES)}."
)


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's figures and theorems again, and write a report with a verdict on each.

    A run that was stopped goes on where it was when the same command is given again.
    """

    only: Annotated[
        tuple[str, ...], UseAppendAction, arg(help=ONLY_HELP, metavar="NAME", help_behavior_hint="")
    ] = ()
    trials: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: its own)")] = None
    """Trials of each experiment whose number of trials is free."""
    out: Annotated[
        Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: out, or out-full)")
    ] = None
    """Where results and report go."""
    full: Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")] = False
    """The paper's sizes instead of those for a demonstration."""
    backend: BackendName = "local"
    """Where to compute: on this machine, on the dask cluster at --address, or as SLURM jobs."""
    address: Annotated[str, arg(metavar="ADDRESS", help_behavior_hint="")] = ""
    """The dask scheduler, such as tcp://host:8786."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all cores)")] = None
    """Processes of the local backend."""

    def run(self) -> int:
        """Compute, write the report, print verdicts and its path."""
        check_matplotlib()
        from rich.console import Console

        from mirrorhead.lab.experiments.runner import execute
        from mirrorhead.lab.report import ReportError, check_free, write_report
        from mirrorhead.lab.runtime.jobs import BackendError

        out = self.out or Path("out-full" if self.full else "out")
        page, console = out / "report.html", Console()
        runs = self._runs()
        backend = chosen_backend(self.backend, self.address, self.jobs, out)
        try:
            check_free(page)
            execute(runs, out, backend, console)
            entries = [entry_of(run, out) for run in runs]
            write_report(page, with_stored(entries, out))
        except (BackendError, ReportError, OSError) as error:
            raise UserError(str(error)) from error
        print_verdicts(entries, console)
        print(f"report: {page}")
        failed = [entry.name for entry in entries if entry.failure]
        if failed:
            print(f"mirrorhead: {', '.join(failed)} did not finish", file=sys.stderr)
        return 1 if failed else 0

    def _runs(self) -> list[Run]:
        from mirrorhead.lab.experiments import load
        from mirrorhead.lab.experiments.runner import plan

        given = [name.strip() for value in self.only for name in value.split(",")]
        if "" in given:
            raise UserError("--only has an empty name")
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials must be at least 1, got {self.trials}")
        names = dict.fromkeys(given) or NAMES
        try:
            return [plan(load(name), full=self.full, trials=self.trials) for name in names]
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error
