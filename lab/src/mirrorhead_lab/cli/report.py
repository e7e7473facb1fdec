"""`mirrorhead report`: the report of what is there, experiments and real data."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from mirrorhead_lab.cli.options import option, user_errors
from mirrorhead_lab.experiments import NAMES
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_no_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mirrorhead_lab.findings.finding import Finding


@dataclass(frozen=True)
class Report:
    """Write the report again, with the real-data part: tables, figures and verdicts.

    It has the experiments that `mirrorhead reproduce` left complete in --out, the comparisons on
    real data in --results, and the evaluated runs in --runs. It runs no experiment.
    """

    out: Annotated[Path, arg(metavar="FOLDER")] = Path("out")
    """Where experiments are, and where the report goes."""
    results: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """Where the files of studies are, such as imdb.jsonl."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """Where the folders of single runs are; those that `mirrorhead evaluate` has measured count."""
    study: Annotated[tuple[str, ...], UseAppendAction, option("MODULE")] = ()
    """A study of your own to show as well, by the name of its module."""
    markdown: Annotated[Path | None, option("FILE")] = None
    """Also fill the marks in this Markdown page with the tables, and write its figures."""

    def run(self) -> int:
        from rich.console import Console

        from mirrorhead_lab import studies
        from mirrorhead_lab.report.findings import with_stored
        from mirrorhead_lab.report.markdown import write_markdown
        from mirrorhead_lab.report.page import check_place, write_report
        from mirrorhead_lab.report.single_runs import single_runs
        from mirrorhead_lab.report.terminal import print_findings, print_place

        page = self.out / "report.html"
        check_place(page)
        check_no_file(self.results, "--results")
        check_no_file(self.runs, "--runs")
        with user_errors(TypeError, ValueError):
            studied = studies.parts(self.results, self.study)
        evaluated = single_runs(self.runs)
        findings = with_stored([], self.out)
        if not findings and not studied and not evaluated:
            raise UserError(
                f"there is nothing to report: no experiments in {self.out} (--out), no studies in"
                f" {self.results} (--results), no evaluated runs in {self.runs} (--runs). The"
                " studies of the docs are in the folder results/ of mirrorhead's repository. To run"
                f" the experiments: {self._reproduce(())}"
            )
        if self.markdown is not None and not studied:
            file = f"the file of a study, such as imdb.jsonl, in {self.results}"
            raise UserError(f"--markdown needs {file}")
        missing = self._missing(findings)
        parts = studied + ([evaluated] if evaluated else [])
        if self.markdown is not None:  # first: the page may be missing, or have unknown marks
            write_markdown(self.markdown, studied)
        write_report(page, findings, parts, missing)
        claims = [finding for each in parts for finding in each.findings]
        print_findings([*findings, *claims], Console())
        for what, command in missing:
            print(f"{what} {command}", file=sys.stderr)
        print_place(page)
        return 0

    def _missing(self, findings: Sequence[Finding]) -> list[tuple[str, str]]:
        """Say what is not there, and the command that makes it."""
        from mirrorhead_lab import studies

        found = []
        done = {one.name for one in findings}
        if names := [name for name in NAMES if name not in done]:
            some = len(names) < len(NAMES)
            what = f"complete results of {', '.join(names) if some else 'experiments'}"
            command = self._reproduce(names if some else ())
            found.append((f"{self.out} has no {what}. To run them:", command))
        if not self.results.is_dir():
            what = (
                f"There is no folder {self.results} with studies on real data. If it is elsewhere:"
            )
            found.append((what, "mirrorhead report --results FOLDER"))
            return found
        for name in studies.REPORTED:
            if not (path := self.results / f"{name}.jsonl").exists():
                command = shlex.join(["mirrorhead", "study", name, "--results", str(self.results)])
                found.append((f"{path} is not there. To make the runs:", command))
        return found

    def _reproduce(self, names: Sequence[str]) -> str:
        only = ["--only", ",".join(names)] if names else []
        return shlex.join(["mirrorhead", "reproduce", *only, "--out", str(self.out)])
