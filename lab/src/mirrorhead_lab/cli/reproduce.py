"""`mirrorhead reproduce`: run the experiments, write the report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.experiments import NAMES
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_no_file

if TYPE_CHECKING:
    from mirrorhead_lab.experiments.runner import Run

ONLY_HELP = (
    "Run these alone: names, with commas between them or with the option repeated; your own "
    f"by the name of its module. There are: {', '.join(NAMES)}."
)


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's figures and theorems again, and write a report with a verdict on each.

    Run the same command again to resume an interrupted run. The report has the studies in
    --results, too; with --only it has these experiments alone.
    """

    only: Annotated[tuple[str, ...], UseAppendAction, option("NAME", "", ONLY_HELP)] = ()
    trials: Annotated[int | None, option("N", "(default: its own)")] = None
    """Trials of each experiment whose number of trials is free."""
    out: Annotated[Path | None, option("FOLDER", "(default: out, or out-full)")] = None
    """Where results and report go."""
    results: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """Where results on real data are, if there are any."""
    full: options.Flag = False
    """The paper's sizes instead of those for a demonstration."""
    backend: options.BackendName = "local"
    address: options.Address = ""
    jobs: options.Jobs = None

    def run(self) -> int:
        from rich.console import Console

        from mirrorhead_lab import studies
        from mirrorhead_lab.experiments.runner import execute
        from mirrorhead_lab.report.findings import finding_of, with_stored
        from mirrorhead_lab.report.page import check_place, write_report
        from mirrorhead_lab.report.terminal import print_findings, print_place, print_summary

        out = self.out or Path("out-full" if self.full else "out")
        page, console = out / "report.html", Console()
        runs = self._runs()
        backend = options.chosen_backend(self.backend, self.address, self.jobs, out)
        check_place(page)
        check_no_file(self.results, "--results")
        # Damaged files are named before the work.
        parts = [] if self.only else studies.parts(self.results)
        execute(runs, out, backend, console)
        findings = [finding_of(run, out) for run in runs]
        write_report(page, findings if self.only else with_stored(findings, out), parts)
        if self.only:
            print_findings(findings, console)
            print("`mirrorhead report` puts all stored results on one page")
        else:
            stored = [finding for each in parts for finding in each.findings]
            print_summary(findings, stored, console)
        print_place(page)
        failed = [finding.name for finding in findings if finding.failure]
        if failed:
            print(f"mirrorhead: {', '.join(failed)} did not finish", file=sys.stderr)
        return 1 if failed else 0

    def _runs(self) -> list[Run]:
        from mirrorhead_lab.experiments import load
        from mirrorhead_lab.experiments.runner import plan

        given = [name.strip() for value in self.only for name in value.split(",")]
        if "" in given:
            raise UserError("--only has an empty name")
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials must be at least 1, got {self.trials}")
        names = dict.fromkeys(given) or NAMES
        with options.user_errors(TypeError, ValueError):
            return [plan(load(name), full=self.full, trials=self.trials) for name in names]
