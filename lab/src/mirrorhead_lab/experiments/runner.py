"""Run experiments chunk by chunk, and keep every chunk that is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrorhead_lab.experiments import load, storage
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings, merge, split
from mirrorhead_lab.runtime.jobs import Backend, Failure, Work, interrupts
from mirrorhead_lab.runtime.progress import ProgressBars

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Task:
    """A chunk to compute: the experiment's name, its module, and the settings of the chunk."""

    name: str
    module: str
    settings: TrialSettings

    def __str__(self) -> str:
        seeds = self.settings.seeds
        return f"{self.name}, trials {seeds[0]} to {seeds[-1]}"


@dataclass(frozen=True)
class Run:
    """An experiment, the settings to run it with, and what has been computed so far."""

    experiment: Experiment[Any]
    settings: TrialSettings
    parts: list[Result[Any]] = field(default_factory=list)
    failures: list[tuple[Task, Failure]] = field(default_factory=list)

    @property
    def result(self) -> Result[Any] | None:
        """All parts as one; None while some are missing."""
        done = sum(part.settings.trials for part in self.parts)
        return merge(self.parts) if done == self.settings.trials else None

    @property
    def seconds(self) -> float:
        """The computing time of all parts."""
        return sum(part.seconds for part in self.parts)


def plan(experiment: Experiment[Any], *, full: bool = False, trials: int | None = None) -> Run:
    """Plan a run with the quick or the full settings.

    `trials` replaces their number of trials, except where that is part of the claim.
    """
    settings = experiment.full if full else experiment.quick
    if trials is not None and not experiment.fixed_trials:
        settings = replace(settings, trials=trials)
    return Run(experiment, settings)


def execute(runs: Sequence[Run], out: Path, backend: Backend, console: Console) -> None:
    """Compute what `out` does not hold yet, and fill in the runs.

    A chunk is on disk as soon as it is done. All folders are claimed first, so that one with
    results of other settings stops everything before it starts.
    """
    for run in runs:
        storage.claim(out, run.experiment, run.settings)
    there = out.resolve()
    work = Work(compute, partial(_compute_and_save, there), partial(_find, there))
    by_name = {run.experiment.name: run for run in runs}
    totals = {name: run.settings.trials for name, run in by_name.items()}
    with interrupts() as interrupted, ProgressBars(totals, "trials", console) as bars:
        tasks = [task for run in runs for task in _missing(run, out, bars)]
        for task, outcome in backend(work, tasks) if tasks else ():
            if interrupted():
                raise KeyboardInterrupt
            run = by_name[task.name]
            if isinstance(outcome, Failure):
                run.failures.append((task, outcome))
                bars.say(f"failed: {task}: {outcome.message}")
            else:
                storage.save(out, run.experiment, outcome)
                _count(run, outcome, bars)


def compute(task: Task) -> Result[Any]:
    """Compute a chunk; a backend calls this, perhaps on another machine."""
    import torch

    torch.set_num_threads(1)  # chunks use the cores
    return load(task.module).compute(task.settings)


def _missing(run: Run, out: Path, bars: ProgressBars) -> list[Task]:
    """Take the chunks that are stored, and return tasks for the others."""
    experiment, tasks = run.experiment, []
    for settings in split(run.settings, experiment.chunk):
        found = None
        try:
            found = storage.load(out, experiment, settings)
        except storage.DamagedResult as error:
            bars.say(f"computing again: {error}")
        if found is None:
            tasks.append(Task(experiment.name, experiment.module, settings))
        else:
            _count(run, found, bars)
    return tasks


def _count(run: Run, part: Result[Any], bars: ProgressBars) -> None:
    run.parts.append(part)
    name, trials, note = run.experiment.name, run.settings.trials, f"{run.seconds:.1f} s"
    bars.advance(name, part.settings.trials, note)
    if not bars.console.is_terminal and bars.done[name] == trials:
        bars.say(f"{name}: {trials} trial{'s' * (trials > 1)}, {note}")


def _compute_and_save(out: Path, task: Task) -> None:
    storage.save(out, load(task.module), compute(task))


def _find(out: Path, task: Task) -> Result[Any] | None:
    return storage.load(out, load(task.module), task.settings)
