"""`mirrorhead sweep`: optimizers tuned alike on validation data, then compared over seeds."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from mirrorhead.lab.cli.backends import BackendName, chosen_backend
from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from mirrorhead.lab.runtime.jobs import Backend, Failure
    from mirrorhead.lab.training import Tuned
    from mirrorhead.lab.training.sweeps import Candidates
    from mirrorhead.lab.training.trials import Trial

CANDIDATE_HELP = (
    "An optimizer, its options and its learning rates, such as "
    "'mirror-descent p=1.1 lr=0.03,0.1,0.3,1'. Give the option once for each candidate, all with "
    "the same number of rates."
)


@dataclass(frozen=True)
class Sweep:
    """Tune optimizers alike on validation data, and compare them on test over several seeds.

    Run the same command again to resume a sweep that was stopped. Finished runs are not run again,
    even if another sweep made them in the same folder.
    """

    task: Positional[Literal["imdb", "cifar10"]]
    """What to train on."""
    candidate: Annotated[
        tuple[str, ...],
        UseAppendAction,
        arg(
            help=CANDIDATE_HELP,
            metavar="CANDIDATE",
            aliases=["--rival"],
            help_behavior_hint="(default: those of the published comparison)",
        ),
    ] = ()
    preset: Annotated[
        tuple[str, ...],
        arg(metavar="NAME ...", help_behavior_hint="(default: laptop, or laptop-vit)"),
    ] = ()
    """Everything but the optimizer, as in mirrorhead train; with several, a sweep for each."""
    seeds: Annotated[
        tuple[int, ...], arg(metavar="N ...", help_behavior_hint="(default: 5 or 3 of them)")
    ] = ()
    """Seeds of the runs that are compared. Tuning uses the first."""
    epochs: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: preset's)")] = None
    backend: BackendName = "local"
    """Where to compute: on this machine, on the dask cluster at --address, or as SLURM jobs."""
    address: Annotated[str, arg(metavar="ADDRESS", help_behavior_hint="")] = ""
    """The dask scheduler, such as tcp://host:8786."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all cores)")] = None
    """Processes of the local backend."""
    data: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The folder of all data sets (default: $MIRRORHEAD_DATA)."""
    partial: Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")] = False
    """Accept a slice of the data sets."""
    out: Annotated[
        Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: runs/imdb or so)")
    ] = None
    """The folder of all runs; on a cluster, on a file system that all machines share."""

    def run(self) -> int:
        """Sweep, print a table, say where the record is."""
        from rich.console import Console

        from mirrorhead.lab.training import SweepError
        from mirrorhead.lab.training.comparisons import COMPARISONS
        from mirrorhead.lab.training.sweeps import record_path

        usual, console = COMPARISONS[self.task], Console()
        out = self.out or Path("runs") / self.task
        candidates, seeds = self._candidates() or usual.candidates, self.seeds or usual.seeds
        presets = self._presets() or [usual.preset]
        backend = chosen_backend(self.backend, self.address, self.jobs, out)
        failed = 0
        for name in presets:
            try:
                tuned = self._sweep(name, candidates, seeds, out, backend, console)
            except SweepError as error:
                failed += 1
                print(f"mirrorhead: {name}: {error}", file=sys.stderr)
                continue
            _print_table(name, tuned, seeds, console)
            print(f"record: {record_path(out, name, candidates, seeds, self.epochs)}")
        return 1 if failed else 0

    def _sweep(
        self,
        name: str,
        candidates: Candidates,
        seeds: Sequence[int],
        out: Path,
        backend: Backend,
        console: Console,
    ) -> list[Tuned]:
        from mirrorhead.lab.runtime.jobs import BackendError
        from mirrorhead.lab.training import sweep

        runs = sum(map(len, candidates.values())) + len(candidates) * len(seeds)
        lines = _Lines(name, runs, console)
        try:
            with lines.progress:
                return sweep(
                    name, candidates, out, seeds=seeds, epochs=self.epochs, backend=backend,
                    data=self.data, partial=self.partial, listener=lines.add,
                )  # fmt: skip
        except (BackendError, ValueError) as error:
            raise UserError(str(error)) from error

    def _candidates(self) -> Candidates:
        from mirrorhead.lab.training.comparisons import parse_candidate

        found: dict[str, Any] = {}
        for text in self.candidate:
            try:
                name, rules = parse_candidate(text)
            except ValueError as error:
                raise UserError(f"--{error}") from error
            if name in found:
                raise UserError(f"--candidate {name!r} is given twice: put its rates into one")
            found[name] = rules
        return found

    def _presets(self) -> list[str]:
        from mirrorhead.lab.training import OptimizerSettings, preset

        for name in self.preset:
            try:
                data = preset(name, OptimizerSettings("sgd")).data
            except ValueError as error:
                raise UserError(f"--{error}") from error
            if data != self.task:
                raise UserError(f"--preset {name} is for {data}, not for {self.task}")
        return list(dict.fromkeys(self.preset))


class _Lines:
    """A bar over the runs in a terminal; elsewhere a line for each run that ends."""

    def __init__(self, name: str, runs: int, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self.console = console
        self.progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("runs"),
            Elapsed(),
            console=console,
            disable=not console.is_terminal,
        )
        self.bar = self.progress.add_task(name, total=runs)

    def add(self, trial: Trial, outcome: dict[str, Any] | Failure, stored: bool) -> None:
        """A run has ended, or was there."""
        self.progress.advance(self.bar)
        if isinstance(outcome, dict):
            said = (
                "diverged"
                if outcome["diverged"]
                else "validation {:.2%}".format(outcome["validation_accuracy"])
            )
        else:
            said = f"failed: {outcome.message}"
        text = f"{trial}: {said}{' (done before)' if stored else ''}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_table(name: str, tuned: Sequence[Tuned], seeds: Sequence[int], console: Console) -> None:
    from rich.table import Table

    numbers = ", ".join(map(str, seeds))
    caption = f"mean over seeds {numbers} ± their standard deviation" if len(seeds) > 1 else ""
    table = Table(title=name, caption=caption or f"seed {numbers}", title_justify="left")
    table.add_column("candidate")
    for column in ("lr", "validation", "test"):
        table.add_column(column, justify="right")
    for one in tuned:
        if one.chosen is None:
            table.add_row(one.name, "-", "all diverged", "-")
            continue
        parts = (_spread(one.final, key) for key in ("validation_accuracy", "test_accuracy"))
        table.add_row(one.name, f"{one.chosen.lr:g}", *parts)
    console.print(table)


def _spread(records: Sequence[dict[str, Any]], key: str) -> str:
    """Mean and spread in percent; runs that diverged are counted, and not averaged away."""
    values = [100 * record[key] for record in records if not record["diverged"]]
    if not values:
        return "all diverged"
    text = f"{statistics.mean(values):.2f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2f}"
    lost = len(records) - len(values)
    return text + (f" ({lost} diverged)" if lost else "")
