"""Run experiments piece by piece, and keep every piece that is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mirrorhead.lab.experiments import storage
from mirrorhead.lab.experiments.base import Experiment, Result, TrialSettings, merge, pieces
from mirrorhead.lab.experiments.progress import Lines
from mirrorhead.lab.experiments.tasks import Task, piece_work
from mirrorhead.lab.runtime.jobs import Backend, Failure, interrupts


@dataclass(frozen=True)
class Run:
    """An experiment, the settings to run it with, and what came of it so far."""

    experiment: Experiment
    settings: TrialSettings
    parts: list[Result[Any]] = field(default_factory=list)
    failures: list[tuple[Task, Failure]] = field(default_factory=list)

    @property
    def result(self) -> Result[Any] | None:
        """All parts as one; None while some are missing."""
        done = sum(part.settings.trials for part in self.parts)
        return merge(self.parts) if done == self.settings.trials else None


def plan(experiment: Experiment, *, full: bool = False, trials: int | None = None) -> Run:
    """With the quick or the full settings; trials replaces their number where it is free."""
    settings = experiment.full if full else experiment.quick
    if trials is not None and not experiment.fixed_trials:
        settings = replace(settings, trials=trials)
    return Run(experiment, settings)


def execute(runs: Sequence[Run], out: Path, backend: Backend, console: Console) -> None:
    """Compute what out does not hold yet, and fill in the runs.

    A piece is on disk as soon as it is done. All folders are claimed first, so that one with
    results of other settings stops everything before it starts.
    """
    for run in runs:
        storage.claim(out, run.experiment, run.settings)
    by_name = {run.experiment.name: run for run in runs}
    trials = [(name, run.settings.trials) for name, run in by_name.items()]
    with interrupts() as interrupted, Lines(trials, console) as lines:
        tasks = [task for run in runs for task in _resume(run, out, lines)]
        for task, outcome in backend(piece_work(out), tasks) if tasks else ():
            if interrupted():
                raise KeyboardInterrupt
            run = by_name[task.name]
            if isinstance(outcome, Failure):
                run.failures.append((task, outcome))
                lines.say(f"failed: {task}: {outcome.message}")
            else:
                storage.save(out, run.experiment, outcome)
                run.parts.append(outcome)
                lines.advance(task.name, outcome.settings.trials, outcome.seconds)


def _resume(run: Run, out: Path, lines: Lines) -> list[Task]:
    """Take the pieces that are stored; tasks for the others."""
    experiment, tasks = run.experiment, []
    for settings in pieces(run.settings, experiment.piece):
        try:
            found = storage.load(out, experiment, settings)
        except storage.PieceError as error:
            lines.say(f"computing again: {error}")
            found = None
        if found is None:
            tasks.append(Task(experiment.name, experiment.module, settings))
        else:
            run.parts.append(found)
            lines.advance(experiment.name, found.settings.trials, found.seconds)
    return tasks
