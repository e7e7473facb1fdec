"""One run from its first weights to its test score: train, load the best, score, write it down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from mirrorhead._files import write_json
from mirrorhead.lab.runtime.json_files import read_json
from mirrorhead.lab.training.loggers import Logger
from mirrorhead.lab.training.loop import evaluate, train_locked
from mirrorhead.lab.training.presets import Preset, Sets
from mirrorhead.lab.training.process_group import ProcessGroup, own_device
from mirrorhead.lab.training.run_folder import (
    Outcome,
    check_run_folder,
    describe_run,
    load_best,
    locked_run,
)

TEST = "test.json"


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy and accuracy on a data set; test.json has those on the test set."""

    loss: float
    accuracy: float


def complete_run(
    chosen: Preset,
    sets: Sets,
    folder: Path,
    *,
    test: bool = True,
    wait: bool = False,
    group: ProcessGroup | None = None,
    loggers: Sequence[Logger] = (),
) -> tuple[Outcome, Score | None]:
    """Train a preset in `folder`, then score the weights of the best epoch on the test set.

    What is done already is read from the folder: result.json for training, test.json for the
    score. So a finished run needs none of its checkpoints.

    Args:
        test: False leaves the test set alone; the score is then None.
        wait: while another process trains in the folder, instead of a BlockingIOError.
        group: the processes that train together; one alone if None.
    """
    group = group or ProcessGroup()
    with locked_run(folder, wait=wait) if group.is_first else nullcontext():
        if group.is_first and check_run_folder(folder) is None:
            describe_run(folder, chosen)
        torch.manual_seed(chosen.training.seed)
        model = chosen.build().to(own_device())
        settings = chosen.training
        outcome = train_locked(
            model, sets.train, sets.validation, settings, folder, group, loggers, restore=False
        )
        if group.is_first:
            describe_run(folder, chosen)  # it may be lost; that the run is this one is now certain
        return outcome, _test_score(chosen, sets, folder, group) if test else None


def read_score(folder: Path) -> Score | None:
    """Return the score of the best weights on the test set; None if there is none yet."""
    path = folder / TEST
    if not path.exists():
        return None
    return read_json(path, Score, "Delete it, and the weights are scored again")


def _test_score(chosen: Preset, sets: Sets, folder: Path, group: ProcessGroup) -> Score:
    known = read_score(folder)
    group.barrier()  # before the first process writes it
    if known is not None:
        return known
    model = chosen.build().to(own_device())  # whole, where the trained one may be sharded
    load_best(folder, model)
    found = evaluate(model, sets.test, group=group)
    if group.is_first:
        write_json(folder / TEST, found)
    return Score(**found)
