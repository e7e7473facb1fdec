"""A run's folder: which files are in it, which run it belongs to, and reading it back.

    settings.json     everything that decides the result; the folder belongs to these settings
    preset.json       data set and model, from which `load_run` builds the model again
    log.jsonl         one line for every event
    checkpoints/      the last states, to resume from
    best.safetensors  weights of the epoch with the best validation accuracy, or of the last epoch
                      if the settings choose that one
    milestones/       weights after the first epoch that reached a training accuracy
    result.json       the outcome; there exactly if the run has finished, and then the truth
    test.json         loss and accuracy of the best weights on the test set
    mirrorhead.lock   held by the process that trains

A run of `mirrorhead tune` has other results, see `tuning`. A folder that is neither empty nor a run
is refused before anything in it is changed.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import nn

from mirrorhead._files import remove_leftovers, sha256_of, write_json
from mirrorhead_lab.datasets.dataset import Kind
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.runtime.folders import check_folder, check_writable
from mirrorhead_lab.runtime.json_files import from_plain, read_bytes, read_json
from mirrorhead_lab.training.loggers import read_log
from mirrorhead_lab.training.presets import MODELS, Preset
from mirrorhead_lab.training.settings import TrainSettings

SETTINGS, PRESET, BEST, RESULT = "settings.json", "preset.json", "best.safetensors", "result.json"
LOCK, LOG, CHECKPOINTS, TEST = "mirrorhead.lock", "log.jsonl", "checkpoints", "test.json"
#: Increases when the same settings give other numbers: such runs are not resumed. Every run's
#: settings.json has it.
ARITHMETIC = 2


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `epochs` has the losses and accuracies of each epoch.

    `sha256` is the checksum of best.safetensors.
    """

    best_epoch: int
    best_accuracy: float
    stopped_early: bool
    epochs: tuple[dict[str, float], ...]
    sha256: str

    def __post_init__(self) -> None:
        if not 1 <= self.best_epoch <= len(self.epochs):
            raise ValueError(f"best_epoch is {self.best_epoch}, of {len(self.epochs)} epochs")


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy and accuracy on a data set; test.json has those on the test set."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """A run: its folder, its settings, and the model with the weights of its best epoch."""

    folder: Path
    preset: Preset
    model: nn.Module


def check_run_folder(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a folder; None if the folder is new or empty.

    Anything else is a RunError. Nothing is changed.
    """
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        check_writable(folder)  # which says what is wrong
        raise
    except OSError as error:
        raise RunError(f"{folder} cannot hold a run: {error.strerror}") from error
    if SETTINGS in names:
        settings = read_json(folder / SETTINGS, dict[str, Any])
        if "arithmetic" not in settings:
            raise RunError(f"{folder / SETTINGS} is not of a run: choose a new or empty folder")
        return settings
    if PRESET in names:
        read_preset(folder)
    own = {LOCK, PRESET}  # of a run that was killed before it wrote its settings
    check_folder(folder, "run", (), own)
    return None


def locked_run(folder: Path, *, wait: bool = False) -> AbstractContextManager[None]:
    """Make the folder of a run and hold its lock; see `locked_folder`."""
    check_run_folder(folder)
    return locked_folder(folder, wait=wait)


@contextmanager
def locked_folder(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Make the folder and hold its lock, which ends with the process.

    Other machines see the lock if they share the file system and it has locks, as NFS does. While
    another process holds it, `wait`, or a BlockingIOError is raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    try:
        lock = FileLock(path, timeout=-1 if wait else 0, poll_interval=0.5).acquire()
    except Timeout:
        raise BlockingIOError(f"{folder} is in use by another process") from None
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise  # it says so itself
        why = f"the file system cannot lock files ({error.strerror})"
        raise OSError(error.errno, why, str(path)) from error
    with lock:  # which releases it
        yield


def belongs(folder: Path, about: dict[str, Any]) -> bool:
    """Whether the folder has the run that `about` describes; False if it is new or empty.

    Any other folder is refused.
    """
    there = check_run_folder(folder)
    if there is None:
        return False
    for key, value in {**about, "arithmetic": ARITHMETIC}.items():
        if there.get(key) != value:
            raise RunError(
                f"{folder} holds a run with other settings: {key} is {there.get(key)!r} there,"
                f" {value!r} here. Choose another folder"
            )
    return True


def claim(folder: Path, about: dict[str, Any], *, write: bool) -> None:
    """Check that the folder belongs to the run that `about` describes, or make it so.

    Leftovers of a killed process are removed, once the folder is known to be this run's.
    """
    there = belongs(folder, about)
    if write:
        if not there:
            write_json(folder / SETTINGS, {**about, "arithmetic": ARITHMETIC})
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        remove_leftovers(folder, r"[a-z]+\.(json|jsonl|safetensors)")
        remove_leftovers(folder / CHECKPOINTS, r"step-\d+")
        remove_leftovers(folder / "milestones", r"[\d.]+\.safetensors")


def milestone_path(folder: Path, share: float) -> Path:
    """Return the file with the weights after the first epoch of that training accuracy.

    >>> milestone_path(Path("run"), 0.975).name
    '0.975.safetensors'
    """
    return folder / "milestones" / f"{share:g}.safetensors"


def describe_run(folder: str | Path, chosen: Preset) -> None:
    """Write what `load_run` needs to build the run's model again."""
    path = Path(folder) / PRESET
    if not path.exists():
        write_json(path, dataclasses.asdict(chosen))


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome of a finished run; None if it has not finished."""
    path, remedy = folder / RESULT, "Delete it, and the run resumes from its last checkpoint"
    return read_json(path, Outcome, remedy) if path.exists() else None


def read_score(folder: Path) -> Score | None:
    """Return the score of the best weights on the test set; None if there is none yet."""
    path, remedy = folder / TEST, "Delete it, and the weights are scored again"
    return read_json(path, Score, remedy) if path.exists() else None


def fastest_epoch(folder: Path) -> float | None:
    """Return the seconds of the fastest epoch in the log: other work can only add to them."""
    events = (event for _, event in read_log(folder / LOG))
    return min((event["seconds"] for event in events if event["kind"] == "epoch"), default=None)


def load_run(folder: str | Path) -> Run:
    """Read a run that `mirrorhead train` or a sweep has made; the model is in evaluation mode."""
    folder = Path(folder)
    for name in (PRESET, BEST):
        if not (folder / name).is_file():
            raise RunError(
                f"{folder} has no {name}: give the folder of a run that `mirrorhead train`,"
                " `sweep` or `study` made, with at least one epoch done"
            )
    chosen = read_preset(folder)
    model = chosen.build()
    load_best(folder, model)
    return Run(folder, chosen, model.eval())


@dataclass(frozen=True)
class SavedWeights:
    """Weights at one moment of a run; without a file, those that it began with."""

    run: Run
    name: str
    epoch: int | None
    train_accuracy: float | None
    path: Path | None

    def load_into(self, model: nn.Module) -> None:
        """Load them into a model of the run's preset."""
        if self.path is None:
            torch.manual_seed(self.run.preset.training.seed)  # as in `complete_run`
            model.load_state_dict(self.run.preset.build().state_dict())
        else:
            _load_weights(self.path, model, self.path.read_bytes())


def weights_along(run: Run) -> list[SavedWeights]:
    """Return what a run kept, in order: its first weights, those at milestones, the chosen ones."""
    outcome, folder = read_outcome(run.folder), run.folder
    paths = {m: milestone_path(folder, m) for m in run.preset.training.milestones}
    there = [(f"milestone {m:g}", path) for m, path in sorted(paths.items()) if path.is_file()]
    found = [SavedWeights(run, "before training", 0, None, None)]
    for name, path in [*there, ("chosen weights", folder / BEST)]:
        epoch = _epoch_of(path)
        accuracy = None
        if outcome is not None and epoch is not None and epoch <= len(outcome.epochs):
            accuracy = outcome.epochs[epoch - 1]["train_accuracy"]
        if epoch is None or epoch != found[-1].epoch:  # an epoch may pass several milestones
            found.append(SavedWeights(run, name, epoch, accuracy, path))
    return found


def _epoch_of(path: Path) -> int | None:
    """Return the epoch that a file of weights is of, if it says so."""
    try:
        with safe_open(path, "pt") as file:
            epoch = (file.metadata() or {}).get("epoch")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read as weights: {error}") from error
    return int(epoch) if epoch is not None and epoch.isdecimal() else None


def load_best(folder: Path, model: nn.Module) -> None:
    """Load the weights that the run kept; their checksum is compared with the finished run's."""
    path, outcome = folder / BEST, read_outcome(folder)
    content = read_bytes(path)
    if outcome and sha256_of(content) != outcome.sha256:
        raise RunError(
            f"{path} is damaged: its SHA-256 is not the one in {RESULT}. Delete {RESULT} and"
            " checkpoints/ to train the run again"
        )
    _load_weights(path, model, content)


def _load_weights(path: Path, model: nn.Module, content: bytes) -> None:
    try:
        model.load_state_dict(load(content))
    except (SafetensorError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise RunError(f"{path} cannot be read as the weights of this run: {first}") from error


@dataclass(frozen=True)
class _StoredPreset:
    """A preset as it is written; the kind says which class the model's settings are."""

    kind: Kind
    model: dict[str, Any]
    training: TrainSettings
    data: str
    classes: tuple[str, ...]


def read_preset(folder: Path) -> Preset:
    """Return what `describe_run` wrote."""
    path = folder / PRESET
    stored = read_json(path, _StoredPreset)
    model = from_plain(stored.model, MODELS[stored.kind][1], str(path))
    return Preset(stored.kind, model, stored.training, stored.data, stored.classes)
