"""One run of a sweep, in a folder that is named by its settings.

Whoever comes second waits for the one who is at it, and takes the result. Between machines this
needs a file system that they share and that has locks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mirrorhead._files import locked, write_json
from mirrorhead.lab.training.loop import ARITHMETIC, Diverged, evaluate, fingerprint, train
from mirrorhead.lab.training.presets import Preset, Sets, load_sets
from mirrorhead.lab.training.runs import describe_run
from mirrorhead.lab.training.settings import TrainSettings
from mirrorhead.lab.training.team import own_device

WAIT = 1.0  # seconds between looks at a run that another sweep has in hand

_ALONE = threading.Lock()  # torch's random numbers are the process's: one run at a time in it


@dataclass(frozen=True)
class Trial:
    """A run to make: whose it is, its settings, the folder of all runs, what it reads.

    With `test`, the weights of the best epoch are scored on the test set.
    """

    rival: str
    chosen: Preset
    root: Path
    data: Path | None = None
    partial: bool = False
    test: bool = False

    def __str__(self) -> str:
        training = self.chosen.training
        return f"{self.rival}, lr {training.optimizer.lr:g}, seed {training.seed}"

    @property
    def folder(self) -> Path:
        return self.root / run_key(self.chosen)


def run_key(chosen: Preset) -> str:
    """A name that changes with anything that changes the result.

    >>> from mirrorhead.lab.training import preset
    >>> run_key(preset("laptop", p=1.1)) == run_key(preset("laptop", p=2.0))
    False
    """
    about = dataclasses.asdict(chosen)
    for name in ("keep", "checkpoint_every"):
        del about["training"][name]
    text = json.dumps([ARITHMETIC, about], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_trial(trial: Trial) -> dict[str, Any]:
    """Make the run, or what is left of it; a record of what came out.

    A run that diverged is a result too, and is not tried again.
    """
    torch.set_num_threads(1)
    folder, chosen = trial.folder, trial.chosen
    with _ALONE, _when_free(folder / "sweep.lock"):
        sets = trial_sets(chosen, trial.data, trial.partial)
        prints = fingerprint(sets.train), fingerprint(sets.validation)
        if (found := find_trial(prints, trial)) is not None:
            return found
        describe_run(folder, chosen)
        torch.manual_seed(chosen.training.seed)
        model = chosen.build().to(own_device())
        try:
            _train(trial, sets, model)
        except Diverged as error:
            write_json(folder / "diverged.json", {"error": str(error)})
        else:
            if trial.test and not (folder / "test.json").exists():
                model.load_state_dict(load_file(folder / "best.safetensors"))
                write_json(folder / "test.json", evaluate(model, sets.test))
        found = find_trial(prints, trial)
        assert found is not None
        return found


def find_trial(prints: tuple[str, str], trial: Trial) -> dict[str, Any] | None:
    """The record of a run that is done, on data with these fingerprints; None if it is not."""
    folder, chosen = trial.folder, trial.chosen
    # A listing asks a network file system anew, where a look for one name may be answered from
    # memory.
    there = set(os.listdir(folder)) if folder.is_dir() else set[str]()
    record: dict[str, Any] = {"run": folder.name, "seed": chosen.training.seed}
    record |= dataclasses.asdict(chosen.training.optimizer)
    if "settings.json" not in there:
        return None
    about = json.loads((folder / "settings.json").read_text())
    if (about["examples"], about["validation"]) != prints:
        return None
    if "diverged.json" in there:
        return {**record, "diverged": True}
    if not {"result.json", "preset.json", *(["test.json"] if trial.test else [])} <= there:
        return None
    result = json.loads((folder / "result.json").read_text())
    record |= {
        "diverged": False,
        "best_epoch": result["best_epoch"],
        "validation_accuracy": result["best_accuracy"],
        "train_accuracy": result["epochs"][result["best_epoch"] - 1]["train_accuracy"],
    }
    if trial.test:
        record["test_accuracy"] = json.loads((folder / "test.json").read_text())["accuracy"]
    return record


def trial_sets(chosen: Preset, data: Path | None, partial: bool) -> Sets:
    """The data of a preset, read once in a process that makes many runs."""
    return _sets(dataclasses.replace(chosen, training=TrainSettings()), data, partial)


@functools.lru_cache(maxsize=1)
def _sets(chosen: Preset, data: Path | None, partial: bool) -> Sets:
    return load_sets(chosen, data, partial=partial)


def _train(trial: Trial, sets: Sets, model: torch.nn.Module) -> None:
    while True:
        try:
            train(model, sets.train, sets.validation, trial.chosen.training, trial.folder)
            return
        except BlockingIOError:  # somebody trains here outside of a sweep
            time.sleep(WAIT)


@contextmanager
def _when_free(path: Path) -> Iterator[None]:
    """A lock, waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(path))
                break
            except BlockingIOError:
                time.sleep(WAIT)
        yield
