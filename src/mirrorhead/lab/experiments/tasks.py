"""The pieces of experiments as work for a backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mirrorhead.lab.experiments import load as load_experiment
from mirrorhead.lab.experiments import storage
from mirrorhead.lab.experiments.base import Result, TrialSettings
from mirrorhead.lab.runtime.jobs import Work


@dataclass(frozen=True)
class Task:
    """A piece to compute: the experiment's name, its module, and the settings of the piece."""

    name: str
    module: str
    settings: TrialSettings

    def __str__(self) -> str:
        seeds = self.settings.seeds
        return f"{self.name}, trials {seeds[0]} to {seeds[-1]}"


def piece_work(out: Path) -> Work[Task, Result[Any]]:
    """Compute pieces; where nobody waits for them they are stored in out."""
    out = out.resolve()
    return Work(compute, partial(_compute_and_save, out), partial(_find, out))


def compute(task: Task) -> Result[Any]:
    """The result of a piece."""
    import torch

    torch.set_num_threads(1)  # the cores are used by the pieces
    return load_experiment(task.module).compute(task.settings)


def _compute_and_save(out: Path, task: Task) -> None:
    storage.save(out, load_experiment(task.module), compute(task))


def _find(out: Path, task: Task) -> Result[Any] | None:
    return storage.load(out, load_experiment(task.module), task.settings)
