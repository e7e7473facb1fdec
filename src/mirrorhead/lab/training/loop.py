"""The training loop: one epoch after the other, able to go on after a kill, to the bit.

The order of the examples is a function of (seed, epoch), the random numbers of dropout of
(seed, step), the learning rate of the step: nothing has to be remembered but the weights, the
optimizer's state and where we are. Checkpoints hold these.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from mirrorhead._files import locked, remove_leftovers, write_atomically, write_json
from mirrorhead.lab.datasets.batches import Examples, epoch_batches, even_batches, pieces
from mirrorhead.lab.training.checkpoints import (
    checkpoints,
    load_checkpoint,
    model_tensors,
    save_checkpoint,
)
from mirrorhead.lab.training.loggers import Event, JsonLines, Logger
from mirrorhead.lab.training.optimizers import build_optimizer
from mirrorhead.lab.training.settings import TrainSettings
from mirrorhead.lab.training.team import Team, joined
from mirrorhead.optim.sharded import local

LOG_EVERY = 20  # steps
#: Goes up when the same settings give other numbers: a folder is not gone on with then.
ARITHMETIC = 2
#: Tokens that a CPU takes at once. More would cost memory, and time to get it from the system; a
#: larger batch is done in pieces whose gradients add up.
TOKENS_AT_ONCE = 8_192


class Diverged(Exception):
    """The loss, or a gradient, is not finite any more."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `epochs` has a record of each: losses, accuracies, seconds."""

    best_epoch: int
    best_accuracy: float
    stopped_early: bool
    epochs: tuple[dict[str, float], ...]


@dataclass
class Position:
    """Where a run is, beside its weights."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # loss, correct, seen
    epochs: list[dict[str, float]] = field(default_factory=list)


def train(
    model: nn.Module,
    examples: Examples,
    validation: Examples,
    settings: TrainSettings,
    folder: str | Path,
    *,
    loggers: Sequence[Logger] = (),
) -> Outcome:
    """Train `model`, or go on where an earlier call with the same arguments was stopped.

    At the end `model` has the weights after the last epoch; folder/best.safetensors has those
    of the epoch with the best validation accuracy. A run that is done is not run again.

    Args:
        model: from a batch of inputs to logits (batch, classes).
        examples, validation: what has labels and `batch(indices)`, such as `data.Encoded`.
        settings: all that decides the result; a folder belongs to one settings.
        folder: of this run: log.jsonl, checkpoints/, best.safetensors, result.json.
        loggers: called with every `Event`, beside the log in the folder.
    """
    for name, given in (("examples", examples), ("validation", validation)):
        if not len(given):
            raise ValueError(f"{name} must not be empty")
    folder = Path(folder)
    with joined() as team, _owned(folder, team):
        _claim(folder, _about(model, examples, validation, settings), team)
        result = folder / "result.json"
        wrapped = team.wrap(model, settings.parallel)
        called = torch.compile(wrapped, dynamic=True) if settings.compile else wrapped
        optimizer = build_optimizer(model, settings.optimizer, settings.fused)
        at = Position()
        if saved := checkpoints(folder / "checkpoints"):
            at = Position(**load_checkpoint(saved[-1], model, optimizer))
        team.wait()  # before the first of us writes another
        if result.exists():
            return _outcome(at, settings)
        run = _Run(called, model, optimizer, examples, validation, settings, folder, team)
        tell = [JsonLines(folder / "log.jsonl", at.step), *loggers] if team.leads else []
        run.go(at, tell)
        if team.leads:
            write_json(result, dataclasses.asdict(_outcome(at, settings)))
        team.wait()
        return _outcome(at, settings)


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Examples, *, batch_size: int = 128, team: Team | None = None
) -> dict[str, float]:
    """Mean cross-entropy and accuracy, with dropout off."""
    team = team or Team()
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in even_batches(np.arange(len(examples)), batch_size, _lengths(examples)):
        # A process without a share still takes part, as sharded weights are gathered by all.
        indices = team.part(batch)
        x, y = examples.batch(indices if len(indices) else batch[:1])
        sums += _sums(model(x.to(device)), y.to(device)) * bool(len(indices))
    model.train(was_training)
    loss, correct, seen = team.add_up(sums).tolist()
    return {"loss": loss / seen, "accuracy": correct / seen}


@dataclass(frozen=True)
class _Run:
    called: nn.Module | Any  # what is called: the model, perhaps wrapped and compiled
    model: nn.Module
    optimizer: torch.optim.Optimizer
    examples: Examples
    validation: Examples
    settings: TrainSettings
    folder: Path
    team: Team

    def go(self, at: Position, tell: Sequence[Logger]) -> None:
        settings = self.settings
        per_epoch = math.ceil(len(self.examples) / settings.batch_size)
        steps = settings.epochs * per_epoch
        for logger in tell:
            logger(Event("start", at.step, steps, at.epoch))
        if at.step == 0:
            self._save(at)
        while at.epoch < settings.epochs and not _reached(at, settings):
            began = time.perf_counter()
            self._epoch(at, steps, tell)
            values = self._close_epoch(at, time.perf_counter() - began)
            # First the log, then the checkpoint: what is logged twice is dropped on resuming.
            for logger in tell:
                logger(Event("epoch", at.step, steps, at.epoch, values))
            self._save(at)
        for logger in tell:
            logger(Event("end", at.step, steps, at.epoch))

    def _epoch(self, at: Position, steps: int, tell: Sequence[Logger]) -> None:
        """From where we are to the end of the epoch."""
        settings = self.settings
        self.called.train()
        batches = epoch_batches(
            np.arange(len(self.examples)),
            settings.batch_size,
            seed=settings.seed,
            epoch=at.epoch,
            lengths=_lengths(self.examples),
        )
        # The first process carries on the sums; those of the others start at 0 and are added.
        sums = torch.tensor(at.sums if self.team.leads else [0.0] * 3, dtype=torch.float64)
        sums = sums.to(next(self.model.parameters()).device)
        for batch in batches[at.batch :]:
            rate = settings.optimizer.lr * settings.rate(at.step, steps)
            sums += self._step(batch, at.step, rate)
            at.step += 1
            at.batch += 1
            last = at.batch == len(batches)
            if last or at.step % LOG_EVERY == 0 or at.step % settings.checkpoint_every == 0:
                at.sums = self.team.add_up(sums.clone()).tolist()
                if not math.isfinite(at.sums[0]):
                    raise Diverged(
                        f"the loss is not finite, found at step {at.step}: lower lr"
                        f" (now {rate:g}), or clip the gradient. The last checkpoint is from before"
                    )
                for logger in tell:
                    logger(Event("step", at.step, steps, at.epoch, {**_means(at), "lr": rate}))
                if at.step % settings.checkpoint_every == 0 and not last:
                    self._save(at)

    def _step(self, batch: np.ndarray, step: int, rate: float) -> Tensor:
        """One step; sums of loss, correct answers and examples of this process."""
        team, settings = self.team, self.settings
        # A stream of its own for every step and process: nothing to restore after a kill.
        torch.manual_seed(_mix(settings.seed, step, team.rank))
        self.optimizer.zero_grad()
        sums = torch.stack([self._backward(part, len(batch)) for part in self._pieces(batch)])
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            self.optimizer.step()
        except RuntimeError as error:  # mirror descent refuses gradients that are not finite
            if all(
                local(p.grad).isfinite().all()
                for p in self.model.parameters()
                if p.grad is not None
            ):
                raise
            raise Diverged(f"step {step}: {error}") from error
        return sums.sum(dim=0)

    def _pieces(self, batch: np.ndarray) -> list[np.ndarray]:
        lengths = _lengths(self.examples)
        if lengths is None or next(self.model.parameters()).device.type != "cpu":
            return [batch]
        return pieces(batch, lengths, TOKENS_AT_ONCE)

    def _backward(self, piece: np.ndarray, size: int) -> Tensor:
        """Add the gradient of a piece of a batch of `size`; its sums, as in `_step`."""
        device = next(self.model.parameters()).device
        indices = self.team.part(piece)
        x, y = self.examples.batch(indices if len(indices) else piece[:1])
        logits, y = self.called(x.to(device)), y.to(device)
        # Processes average their gradients: so weighed, that is the mean over the whole batch.
        share = len(indices) * self.team.size / size
        (F.cross_entropy(logits, y) * share).backward()
        return _sums(logits.detach(), y) * bool(len(indices))

    def _close_epoch(self, at: Position, seconds: float) -> dict[str, float]:
        """Validate, note the epoch, keep the weights if they are the best so far."""
        found = evaluate(self.called, self.validation, team=self.team)
        if not math.isfinite(found["loss"]):
            raise Diverged(
                f"the validation loss is not finite after epoch {at.epoch + 1}: lower lr"
            )
        record = {
            **_means(at),
            "validation_loss": found["loss"],
            "validation_accuracy": found["accuracy"],
        }
        best = max((e["validation_accuracy"] for e in at.epochs), default=-1.0)
        at.epochs.append(record)
        at.epoch, at.batch, at.sums = at.epoch + 1, 0, [0.0, 0.0, 0.0]
        if record["validation_accuracy"] > best:
            weights = model_tensors(self.model)  # gathered by all processes
            if self.team.leads:
                # One entry: safetensors writes several in any order, and files should be the same.
                note = {"epoch": str(at.epoch)}
                write_atomically(self.folder / "best.safetensors", save(weights, metadata=note))
        return {**record, "seconds": seconds}

    def _save(self, at: Position) -> None:
        save_checkpoint(
            self.folder / "checkpoints",
            at.step,
            self.model,
            self.optimizer,
            dataclasses.asdict(at),
            keep=self.settings.keep,
            write=self.team.leads,
        )


def _reached(at: Position, settings: TrainSettings) -> bool:
    goal = settings.stop_at
    return goal is not None and bool(at.epochs) and at.epochs[-1]["train_accuracy"] >= goal


def _outcome(at: Position, settings: TrainSettings) -> Outcome:
    accuracies = [epoch["validation_accuracy"] for epoch in at.epochs]
    best = int(np.argmax(accuracies))
    early = _reached(at, settings) and at.epoch < settings.epochs
    return Outcome(best + 1, accuracies[best], early, tuple(at.epochs))


def _sums(logits: Tensor, y: Tensor) -> Tensor:
    """Loss, correct answers and examples, added up: (3,)."""
    loss = F.cross_entropy(logits.double(), y, reduction="sum")
    correct = (logits.argmax(dim=-1) == y).sum()
    return torch.stack([loss, correct.double(), torch.tensor(len(y)).to(loss)])


def _means(at: Position) -> dict[str, float]:
    loss, correct, seen = at.sums
    return {"train_loss": loss / seen, "train_accuracy": correct / seen}


def _lengths(examples: Examples) -> np.ndarray | None:
    return getattr(examples, "lengths", None)


def _mix(*numbers: int) -> int:
    """A seed that differs for every combination."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _about(
    model: nn.Module, examples: Examples, validation: Examples, settings: TrainSettings
) -> dict[str, Any]:
    """What a folder belongs to; `keep` and `checkpoint_every` may change, results do not."""
    wanted = dataclasses.asdict(settings)
    for name in ("keep", "checkpoint_every"):
        del wanted[name]
    shapes = repr([(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()])
    return {
        **wanted,
        "arithmetic": ARITHMETIC,
        "model": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "examples": fingerprint(examples),
        "validation": fingerprint(validation),
    }


def fingerprint(examples: Examples) -> str:
    """What tells one set of examples from another: their number, labels and lengths."""
    lengths = _lengths(examples)
    content = np.asarray(examples.labels).tobytes() + (
        b"" if lengths is None else np.asarray(lengths).tobytes()
    )
    return f"{len(examples)} examples, {hashlib.sha256(content).hexdigest()[:16]}"


def _claim(folder: Path, about: dict[str, Any], team: Team) -> None:
    """The folder is ours, or of the same run; anything else is an error."""
    path = folder / "settings.json"
    about = json.loads(json.dumps(about))
    if path.exists():
        there = json.loads(path.read_text())
        differ = [key for key in about if there.get(key) != about[key]]
        if differ:
            key = differ[0]
            raise ValueError(
                f"folder {folder} holds a run with other settings: {key} is"
                f" {there.get(key)!r} there, {about[key]!r} here. Choose another folder"
            )
    elif team.leads:
        write_json(path, about)


@contextmanager
def _owned(folder: Path, team: Team) -> Iterator[None]:
    """One run at a time in a folder; the lock dies with the process."""
    if not team.leads:
        yield
        return
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "lock"))
        except BlockingIOError:
            raise BlockingIOError(f"folder {folder} is in use by another process") from None
        remove_leftovers(folder)
        remove_leftovers(folder / "checkpoints")
        yield
