"""`mirrorhead sweep`: optimizers tuned alike on validation data, then compared over seeds."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial as bound
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from mirrorhead_lab.runtime.jobs import Failure
    from mirrorhead_lab.runtime.progress import ProgressBars
    from mirrorhead_lab.training import Tuned
    from mirrorhead_lab.training.sweeps import Candidates, Trial

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

    task: Positional[Literal["imdb", "imdb-to-the-end", "cifar10"]]
    """What to train on; imdb-to-the-end at a constant rate, to 99.5 % training accuracy."""
    candidate: Annotated[
        tuple[str, ...],
        UseAppendAction,
        option(
            "CANDIDATE",
            "(default: those of the published comparison)",
            CANDIDATE_HELP,
            name="rival",  # its old name; tyro lists what is an alias first
            aliases=["--candidate"],
        ),
    ] = ()
    preset: Annotated[tuple[str, ...], option("NAME ...", "(default: laptop, or laptop-vit)")] = ()
    """Everything but the optimizer, as in mirrorhead train; with several, a sweep for each."""
    seeds: Annotated[tuple[int, ...], option("N ...", "(default: 5 or 3 of them)")] = ()
    """Seeds of the runs that are compared. Tuning uses the first."""
    epochs: options.PresetInt = None
    backend: options.BackendName = "local"
    address: options.Address = ""
    jobs: options.Jobs = None
    data: options.DataFolder = None
    partial: options.Partial = False
    out: Annotated[Path | None, option("FOLDER", "(default: runs/imdb or so)")] = None
    """The folder of all runs; on a cluster, on a file system that all machines share."""

    def run(self) -> int:
        from rich.console import Console

        from mirrorhead_lab.runtime.jobs import BackendError
        from mirrorhead_lab.runtime.progress import ProgressBars
        from mirrorhead_lab.training import SweepError, sweep
        from mirrorhead_lab.training.presets import COMPARISONS
        from mirrorhead_lab.training.sweeps import Asked

        usual, console = COMPARISONS[self.task], Console()
        out = self.out or Path("runs") / self.task
        candidates, seeds = self._candidates() or usual.candidates, self.seeds or usual.seeds
        presets = self._presets() or [usual.preset]
        backend = options.chosen_backend(self.backend, self.address, self.jobs, out)
        given: Any = {"data": self.data, "partial": self.partial, "epochs": self.epochs}
        given |= {"seeds": seeds, "backend": backend}
        runs = sum(map(len, candidates.values())) + len(candidates) * len(seeds)
        failed = 0
        for name in presets:
            bars = ProgressBars({name: runs}, "runs", console)
            try:
                with options.user_errors(BackendError, ValueError, command=self), bars:
                    tuned = sweep(name, candidates, out, listener=bound(_tell, bars, name), **given)
            except SweepError as error:
                failed += 1
                print(f"mirrorhead: {name}: {error}", file=sys.stderr)
                continue
            _print_table(name, tuned, seeds, console)
            print(f"record: {Asked.of(name, candidates, seeds, self.epochs).record(out)}")
        return 1 if failed else 0

    def _candidates(self) -> Candidates:
        from mirrorhead_lab.training.presets import parse_candidate

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
        from mirrorhead_lab.training.presets import COMPARISONS, PRESETS

        kind = PRESETS[COMPARISONS[self.task].preset].kind
        for name in self.preset:
            if name not in PRESETS:
                raise UserError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}")
            if PRESETS[name].kind != kind:
                raise UserError(f"--preset {name} is for {PRESETS[name].kind}, not for {kind}")
        return list(dict.fromkeys(self.preset))


def _tell(
    bars: ProgressBars, name: str, trial: Trial, outcome: dict[str, Any] | Failure, stored: bool
) -> None:
    """Print a line about a run that has ended, or was there."""
    if not isinstance(outcome, dict):
        said = f"failed: {outcome.message}"
    elif outcome["diverged"]:
        said = "diverged"
    else:
        said = f"validation {outcome['validation_accuracy']:.2%}"
    bars.advance(name)
    bars.say(f"{trial}: {said}{' (done before)' if stored else ''}")


def _print_table(name: str, tuned: Sequence[Tuned], seeds: Sequence[int], console: Console) -> None:
    from rich.table import Table

    numbers = ", ".join(map(str, seeds))
    caption = f"mean over seeds {numbers} ± their standard deviation" if len(seeds) > 1 else ""
    table = Table(title=name, caption=caption or f"seed {numbers}", title_justify="left")
    table.add_column("candidate")
    for column in ("lr", "validation", "test"):
        table.add_column(column, justify="right")
    for one in tuned:
        cells = ("-", "all diverged", "-")
        if one.chosen is not None:
            scores = (_spread(one.final, f"{part}_accuracy") for part in ("validation", "test"))
            cells = (f"{one.chosen.lr:g}", *scores)
        table.add_row(one.name, *cells)
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
