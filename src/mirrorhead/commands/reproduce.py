"""`mirrorhead reproduce`: run the experiments, write the report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from mirrorhead.commands.errors import UserError
from mirrorhead.commands.places import Place, chosen_backend
from mirrorhead.experiments import ORDER
from mirrorhead.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from mirrorhead.experiments.base import Experiment, TrialSettings
    from mirrorhead.experiments.runner import Run
    from mirrorhead.report import Entry

ONLY_HELP = (
    "Run these alone: names, with commas between them or with the option repeated; your own "
    f"by the name of its module. There are: {', '.join(ORDER)}."
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
    backend: Place = "local"
    """Where to compute: on this machine, on the dask cluster at --address, or as SLURM jobs."""
    address: Annotated[str, arg(metavar="ADDRESS", help_behavior_hint="")] = ""
    """The dask scheduler, such as tcp://host:8786."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all cores)")] = None
    """Processes of the local backend."""

    def run(self) -> int:
        """Compute, write the report, print verdicts and its path."""
        if find_spec("matplotlib") is None:
            raise UserError("figures need matplotlib: pip install 'mirrorhead[plot]'")
        from rich.console import Console

        from mirrorhead.backends import BackendError
        from mirrorhead.experiments.runner import execute
        from mirrorhead.experiments.storage import FolderError
        from mirrorhead.report import ReportError, check_free, write_report

        out = self.out or Path("out-full" if self.full else "out")
        page, console = out / "report.html", Console()
        runs = self._runs()
        backend = chosen_backend(self.backend, self.address, self.jobs, out)
        try:
            check_free(page)
            execute(runs, out, backend, console)
            entries = [_entry(run, out) for run in runs]
            write_report(page, _with_stored(entries, out))
        except (BackendError, FolderError, ReportError, OSError) as error:
            raise UserError(str(error)) from error
        _print_verdicts(entries, console)
        print(f"report: {page}")
        failed = [entry.name for entry in entries if entry.failure]
        if failed:
            print(f"mirrorhead: {', '.join(failed)} did not finish", file=sys.stderr)
        return 1 if failed else 0

    def _runs(self) -> list[Run]:
        from mirrorhead.experiments import load
        from mirrorhead.experiments.runner import plan

        given = [name.strip() for value in self.only for name in value.split(",")]
        if "" in given:
            raise UserError("--only has an empty name")
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials must be at least 1, got {self.trials}")
        names = dict.fromkeys(given) or ORDER
        try:
            return [plan(load(name), full=self.full, trials=self.trials) for name in names]
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error


def _entry(run: Run, out: Path) -> Entry:
    """The run in the report. An experiment whose figure fails must not take the others along."""
    import traceback

    from mirrorhead.report import judged, unfinished

    command = _command(run.experiment, run.settings, out)
    details = out / run.experiment.name / "failures.txt"
    details.unlink(missing_ok=True)
    if run.result is None:
        texts = [f"{task}: {why.message}\n{why.details}" for task, why in run.failures]
        write_atomically(details, "\n".join(texts).encode())
        lines = "\n".join(f"{task}: {why.message}" for task, why in run.failures)
        return unfinished(run.experiment, run.settings, command, lines)
    try:
        return judged(run.experiment, run.result, command)
    except Exception as error:
        write_atomically(details, traceback.format_exc().encode())
        message = f"computed, but not drawn or judged: {type(error).__name__}: {error}"
        print(f"failed: {run.experiment.name}: {message}", file=sys.stderr)
        return unfinished(run.experiment, run.settings, command, message)


def _with_stored(entries: Sequence[Entry], out: Path) -> list[Entry]:
    """These, and what earlier commands left complete in the folder, in the report's order."""
    from mirrorhead.experiments import load, storage
    from mirrorhead.experiments.runner import Run

    found = {entry.name: entry for entry in entries}
    for name in ORDER:
        if name in found or not (out / name).exists():
            continue
        experiment = load(name)
        result = storage.stored(out, experiment)
        if result is not None:
            found[name] = _entry(Run(experiment, result.settings, [result]), out)
    order = [name for name in ORDER if name in found]
    return [found.pop(name) for name in order] + list(found.values())


def _command(experiment: Experiment, settings: TrialSettings, out: Path) -> str:
    """The command line that runs this experiment alone, with these settings."""
    words = ["mirrorhead", "reproduce", "--only"]
    words.append(experiment.name if experiment.name in ORDER else experiment.module)
    base = experiment.quick
    if replace(base, trials=settings.trials) != settings:
        base = experiment.full
        words.append("--full")
    if base.trials != settings.trials:
        words += ["--trials", str(settings.trials)]
    return shlex.join([*words, "--out", str(out)])


def _print_verdicts(entries: Sequence[Entry], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    colours = {"holds": "green", "holds with a remark": "yellow", "does not hold": "red"}
    table = Table.grid(padding=(0, 2))
    for entry in entries:
        verdict = Text(entry.word, style=colours.get(entry.word, "red"))
        table.add_row(Text(entry.name), verdict, Text(entry.title, style="dim"))
    console.print(table)
