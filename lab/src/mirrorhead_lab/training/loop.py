"""The loop that trains everything here, and resumes to the bit after a kill.

A `Task` says what is trained. Its batches are a function of the epoch, the random numbers of
dropout of (seed, step), and the learning rates of the step. So the weights, the optimizers' states
and the position in the epoch are all that a checkpoint has to hold.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead._files import sha256_of, write_atomically
from mirrorhead.optim._sharded import local
from mirrorhead_lab.runtime.errors import Diverged, RunError
from mirrorhead_lab.runtime.json_files import from_plain
from mirrorhead_lab.training.checkpoints import (
    checkpoints,
    load_checkpoint,
    packed,
    save_checkpoint,
)
from mirrorhead_lab.training.loggers import Event, JsonLines, Kind, Logger
from mirrorhead_lab.training.process_group import ProcessGroup
from mirrorhead_lab.training.run_folder import BEST, CHECKPOINTS, LOG, milestone_path
from mirrorhead_lab.training.settings import Schedule

LOG_EVERY = 20  # steps


M = TypeVar("M", bound=nn.Module)


class Task(ABC, Generic[M]):
    """What is trained.

    Attributes:
        model, optimizers: the optimizers' rates are multiplied by the schedule's factor.
        epochs, steps: after each epoch the task is validated; steps are those of all epochs.
        clip: largest 2-norm of the gradient.
        seed: of dropout.
        measures: what `backward` sums.
    """

    model: M
    optimizers: Sequence[Optimizer]
    epochs: int
    steps: int
    schedule: Schedule
    clip: float | None = None
    seed: int = 0
    measures: tuple[str, ...] = ("train_loss",)

    @abstractmethod
    def batches(self, epoch: int) -> Sequence[Any]:
        """Return the batches of an epoch, counted from 0."""

    @abstractmethod
    def backward(self, batch: Any) -> Tensor:
        """Add the gradient of a batch; return the sums of the measures, and of what is counted."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Measure the weights after an epoch."""


@dataclass
class Position:
    """How far a run is, beside its weights."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    sums: list[float] = field(default_factory=list)  # of the epoch; empty at its start
    epochs: list[dict[str, float]] = field(default_factory=list)
    best_sha256: str = ""  # of the best weights so far


@dataclass
class Loop:
    """A task in training.

    Args:
        folder: of the run, see `run_folder`, which gets log, checkpoints and weights; or none.
        group: the processes that train together.
        loggers: called with every `Event`, beside the log in the folder.
        after_step: called with the number of each step, counted from 0.
        stop_at: stop after an epoch with this train_accuracy.
        choose: the epoch whose weights best.safetensors has, that of the best
            validation_accuracy or the last; None writes no such file.
        milestones: keep also the weights of the first epoch with each train_accuracy.
        checkpoint_every: steps between checkpoints, beside one after every epoch.
        keep: how many checkpoints.
    """

    task: Task[Any]
    folder: Path | None = None
    group: ProcessGroup = field(default_factory=ProcessGroup)
    loggers: Sequence[Logger] = ()
    after_step: Callable[[int], None] | None = None
    stop_at: float | None = None
    choose: Literal["best", "last"] | None = None
    milestones: tuple[float, ...] = ()
    checkpoint_every: int | None = None
    keep: int = 2
    at: Position = field(default_factory=Position, init=False)

    def __post_init__(self) -> None:
        groups = [group for one in self.task.optimizers for group in one.param_groups]
        self._rates = [group["lr"] for group in groups]

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        if self.folder is not None and (saved := checkpoints(self.folder / CHECKPOINTS)):
            state = load_checkpoint(saved[-1], self.task.model, self.task.optimizers)
            self.at = from_plain(state, Position, str(saved[-1] / "state.json"))
        self.group.barrier()  # before the first process writes another

    def run(self) -> list[dict[str, float]]:
        """Train to the end, from the newest checkpoint; return the measures of each epoch."""
        self.resume()
        at, first = self.at, self.group.is_first
        if first:
            self.check_best(redone=at.epoch + 1)
        log = [JsonLines(self.folder / LOG, at.step)] if first and self.folder is not None else []
        self.loggers = [*log, *self.loggers] if first else []
        self._tell("start")
        if at.step == 0:
            self._save()
        while at.epoch < self.task.epochs and not self.stopped():
            self._epoch()
        self._tell("end")
        return at.epochs

    def stopped(self) -> bool:
        """Whether the last epoch reached the accuracy at which training stops."""
        goal, epochs = self.stop_at, self.at.epochs
        return goal is not None and bool(epochs) and epochs[-1]["train_accuracy"] >= goal

    def _epoch(self) -> None:
        """Train from the current position to the end of the epoch, and validate."""
        at, task, began = self.at, self.task, time.perf_counter()
        task.model.train()
        batches = task.batches(at.epoch)
        # The first process carries on the sums; those of the others start at 0 and are added.
        before = at.sums if at.sums and self.group.is_first else [0.0] * (len(task.measures) + 1)
        device = next(task.model.parameters()).device
        sums = torch.tensor(before, dtype=torch.float64, device=device)
        for batch in batches[at.batch :]:
            sums += self._step(batch)
            at.step, at.batch = at.step + 1, at.batch + 1
            last = at.batch == len(batches)
            save = self.checkpoint_every is not None and at.step % self.checkpoint_every == 0
            if last or save or at.step % LOG_EVERY == 0:
                at.sums = self.group.sum(sums.clone()).tolist()
                rate = task.optimizers[0].param_groups[0]["lr"]
                if not math.isfinite(at.sums[0]):
                    raise Diverged(
                        f"the loss is not finite, found at step {at.step}: lower lr"
                        f" (now {rate:g}), or clip the gradient. The last checkpoint is from before"
                    )
                self._tell("step", {**self._means(), "lr": rate})
                if save and not last:
                    self._save()
        record = self._means() | task.validate()
        if not math.isfinite(sum(record.values())):
            raise Diverged(
                f"the validation loss is not finite after epoch {at.epoch + 1}: lower lr"
            )
        kept = self._kept(record)
        at.epochs.append(record)
        at.epoch, at.batch, at.sums = at.epoch + 1, 0, []
        # The log comes first: events after the checkpoint are dropped when a run resumes.
        self._tell("epoch", record | {"seconds": time.perf_counter() - began})
        self._save(kept)

    def _step(self, batch: Any) -> Tensor:
        """Take one step; return the sums of this process."""
        task, step = self.task, self.at.step
        factor = task.schedule(step, task.steps)
        # Every step and process has its own random numbers: no state to restore after a kill.
        torch.manual_seed(mix(task.seed, step, self.group.rank))
        for optimizer in task.optimizers:
            optimizer.zero_grad()
        sums = task.backward(batch)
        if task.clip is not None:
            norm = nn.utils.clip_grad_norm_(task.model.parameters(), task.clip)
            if not norm.isfinite():
                raise Diverged(f"step {step}: the gradient is not finite: lower lr")
        groups = (group for one in task.optimizers for group in one.param_groups)
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * factor
        try:
            for optimizer in task.optimizers:
                optimizer.step()
        except RuntimeError as error:  # mirror descent refuses gradients that are not finite
            grads = [local(p.grad) for p in task.model.parameters() if p.grad is not None]
            if all(grad.isfinite().all() for grad in grads):
                raise
            raise Diverged(f"step {step}: {error}") from error
        if self.after_step is not None:
            self.after_step(step)
        return sums

    def _means(self) -> dict[str, float]:
        *sums, count = self.at.sums
        return {name: x / count for name, x in zip(self.task.measures, sums, strict=True)}

    def _tell(self, kind: Kind, values: dict[str, float] | None = None) -> None:
        for logger in self.loggers:
            logger(Event(kind, self.at.step, self.task.steps, self.at.epoch, values or {}))

    def _kept(self, record: dict[str, float]) -> list[Path]:
        """Return the files, beside the checkpoint, that get the weights of this epoch."""
        if self.folder is None:
            return []
        before, found = self.at.epochs, []
        if self.choose:
            best = max((epoch["validation_accuracy"] for epoch in before), default=-1.0)
            if self.choose == "last" or record["validation_accuracy"] > best:
                found.append(self.folder / BEST)
        if self.milestones:
            reached = max((epoch["train_accuracy"] for epoch in before), default=-1.0)
            passed = (m for m in self.milestones if reached < m <= record["train_accuracy"])
            found += [milestone_path(self.folder, share) for share in passed]
        return found

    def _save(self, kept: Sequence[Path] = ()) -> None:
        if self.folder is None:
            return
        at, write, task = self.at, self.group.is_first, self.task
        weights = packed(task.model, {"epoch": str(at.epoch)})  # gathered by all processes
        for path in kept if write else ():
            write_atomically(path, weights)
        if self.folder / BEST in kept:
            at.best_sha256 = sha256_of(weights)
        twin = kept[0] if kept else None
        folder, state = self.folder / CHECKPOINTS, dataclasses.asdict(at)
        how: Any = {"keep": self.keep, "twin": twin, "write": write}
        save_checkpoint(folder, at.step, task.model, task.optimizers, state, weights, **how)

    def check_best(self, redone: int | None = None) -> None:
        """Check that the best weights are those that this run wrote.

        A kill after they were written and before the checkpoint leaves those of the epoch that is
        about to be done again, `redone`.
        """
        if self.folder is None or not self.at.best_sha256:
            return
        path = self.folder / BEST
        try:
            if sha256_of(path.read_bytes()) == self.at.best_sha256:
                return
            with safe_open(path, "pt") as file:
                if redone is not None and (file.metadata() or {}).get("epoch") == str(redone):
                    return
            why = "it is not the file that this run wrote"
        except OSError as error:
            why = error.strerror
        except SafetensorError as error:
            why = str(error)
        again = f"Delete {self.folder / CHECKPOINTS} to train again"
        raise RunError(f"{path} has been damaged ({why}). {again}")


def mix(*numbers: int) -> int:
    """Return a seed that differs for every combination."""
    digest = bytes.fromhex(sha256_of(repr(numbers).encode()))
    return int.from_bytes(digest[:8], "little") >> 1
