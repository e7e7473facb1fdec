"""One run of a sweep, in a folder that is named by its settings.

A second process that wants the same run waits for the first and takes its result. Between
machines this needs a shared file system with locks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mirrorhead._files import write_json
from mirrorhead.lab.datasets.batches import fingerprint
from mirrorhead.lab.runtime.errors import Diverged
from mirrorhead.lab.runtime.fingerprints import digest
from mirrorhead.lab.training.loop import ARITHMETIC
from mirrorhead.lab.training.presets import Preset, Sets, load_sets
from mirrorhead.lab.training.run_folder import (
    check_run_folder,
    data_matches,
    locked_run,
    read_outcome,
)
from mirrorhead.lab.training.runs import complete_run, read_score
from mirrorhead.lab.training.settings import TrainSettings

_ONE_AT_A_TIME = threading.Lock()  # torch's random numbers belong to the whole process
DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Trial:
    """A run to make: the candidate it belongs to, its settings, the folder of all runs, its data.

    With `test`, the weights of the best epoch are scored on the test set.
    """

    candidate: str
    chosen: Preset
    root: Path
    data: Path | None = None
    partial: bool = False
    test: bool = False

    def __str__(self) -> str:
        training = self.chosen.training
        return f"{self.candidate}, lr {training.optimizer.lr:g}, seed {training.seed}"

    @property
    def folder(self) -> Path:
        return self.root / run_key(self.chosen)


def run_key(chosen: Preset) -> str:
    """Return a name that changes with everything that changes the result.

    >>> from mirrorhead.lab.training import preset
    >>> run_key(preset("laptop", p=1.1)) == run_key(preset("laptop", p=2.0))
    False
    """
    about = {**dataclasses.asdict(chosen), "training": chosen.training.identity()}
    return digest([ARITHMETIC, about])


def run_trial(trial: Trial) -> dict[str, Any]:
    """Make the run, or what is left of it; return a record of the outcome.

    A run that diverged is a result too, and is not tried again.
    """
    torch.set_num_threads(1)
    folder, chosen = trial.folder, trial.chosen
    with _ONE_AT_A_TIME:
        sets = trial_sets(chosen, trial.data, trial.partial)
        prints = fingerprint(sets.train), fingerprint(sets.validation)
        with locked_run(folder, wait=True):  # another process may be at it
            found = find_trial(prints, trial)
        if found is None:
            try:
                complete_run(chosen, sets, folder, test=trial.test, wait=True)
            except Diverged as error:
                write_json(folder / DIVERGED, {"error": str(error)})
            found = find_trial(prints, trial)
        assert found is not None
        return found


def find_trial(prints: tuple[str, str], trial: Trial) -> dict[str, Any] | None:
    """Return the record of a finished run on data with these fingerprints; None if not finished."""
    folder, chosen = trial.folder, trial.chosen
    # A listing asks a network file system again, where a test for one name may be answered from
    # its cache.
    there = set(os.listdir(folder)) if folder.is_dir() else set[str]()
    settings = check_run_folder(folder)
    if settings is None or not data_matches(settings, prints):
        return None
    record: dict[str, Any] = {"run": folder.name, "seed": chosen.training.seed}
    record |= dataclasses.asdict(chosen.training.optimizer)
    if DIVERGED in there:
        return {**record, "diverged": True}
    outcome = read_outcome(folder)
    score = read_score(folder) if trial.test else None
    if outcome is None or "preset.json" not in there or (trial.test and score is None):
        return None
    record |= {
        "diverged": False,
        "best_epoch": outcome.best_epoch,
        "validation_accuracy": outcome.best_accuracy,
        "train_accuracy": outcome.epochs[outcome.best_epoch - 1]["train_accuracy"],
    }
    if score is not None:
        record["test_accuracy"] = score.accuracy
    return record


def trial_sets(chosen: Preset, data: Path | None, partial: bool) -> Sets:
    """Return the data of a preset, read once in a process that makes many runs."""
    return _sets(dataclasses.replace(chosen, training=TrainSettings()), data, partial)


@functools.lru_cache(maxsize=1)
def _sets(chosen: Preset, data: Path | None, partial: bool) -> Sets:
    return load_sets(chosen, data, partial=partial)
