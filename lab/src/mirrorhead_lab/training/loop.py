"""The training loop, which resumes to the bit after a kill, and a run from start to test score.

The order of the examples is a function of (seed, epoch), the random numbers of dropout of
(seed, step), and the learning rate of the step. So the weights, the optimizer's state and the
position in the epoch are all that a checkpoint has to hold.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mirrorhead._files import sha256_of, write_atomically, write_json
from mirrorhead.optim._sharded import local
from mirrorhead_lab.datasets.batches import (
    Examples,
    epoch_batches,
    even_batches,
    fingerprint,
    pieces,
)
from mirrorhead_lab.models.attention_maps import evaluating
from mirrorhead_lab.runtime.errors import Diverged, RunError
from mirrorhead_lab.runtime.json_files import from_plain, read_json
from mirrorhead_lab.training import run_folder
from mirrorhead_lab.training.checkpoints import (
    checkpoints,
    load_checkpoint,
    model_tensors,
    save_checkpoint,
)
from mirrorhead_lab.training.loggers import Event, JsonLines, Kind, Logger
from mirrorhead_lab.training.presets import Preset, Sets
from mirrorhead_lab.training.process_group import ProcessGroup, own_device, process_group
from mirrorhead_lab.training.run_folder import Outcome
from mirrorhead_lab.training.settings import TrainSettings, build_optimizer

TEST = "test.json"
LOG_EVERY = 20  # steps
#: Increases when the same settings give other numbers: runs of older versions are not resumed.
ARITHMETIC = 2
#: Tokens that a CPU processes at once. More would cost memory, and time to allocate it; the
#: gradients of a larger batch are summed over pieces of it.
TOKENS_AT_ONCE = 8_192


@dataclass
class Position:
    """How far a run is, beside its weights."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # loss, correct, seen
    epochs: list[dict[str, float]] = field(default_factory=list)
    best_sha256: str = ""  # of the best weights so far; "" if an older version wrote them


def train(
    model: nn.Module,
    examples: Examples,
    validation: Examples,
    settings: TrainSettings,
    folder: str | Path,
    *,
    loggers: Sequence[Logger] = (),
) -> Outcome:
    """Train `model`, or resume where an earlier call with the same arguments was stopped.

    At the end `model` has the weights after the last epoch; folder/best.safetensors has those
    of the epoch that `settings.choose` names. A finished run is not run again: its outcome is
    read from folder/result.json.

    Args:
        model: from a batch of inputs to logits (batch, classes).
        examples, validation: what has labels and `batch(indices)`, such as `datasets.Encoded`.
        settings: everything that decides the result; a folder belongs to one settings.
        folder: of this run, see `run_folder`. A folder that is not empty and not of this run is
            refused.
        loggers: called with every `Event`, beside the log in the folder.
    """
    for name, given in (("examples", examples), ("validation", validation)):
        if not len(given):
            raise ValueError(f"{name} must not be empty")
    folder = Path(folder)
    with process_group() as group:
        run = _Run(model, examples, validation, settings, folder, group, loggers)
        with run_folder.locked_run(folder) if group.is_first else nullcontext():
            return run.outcome()


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
    group, settings = group or ProcessGroup(), chosen.training
    with run_folder.locked_run(folder, wait=wait) if group.is_first else nullcontext():
        if group.is_first and run_folder.check_run_folder(folder) is None:
            run_folder.describe_run(folder, chosen)
        torch.manual_seed(settings.seed)
        model = chosen.build().to(own_device())
        run = _Run(model, sets.train, sets.validation, settings, folder, group, loggers)
        outcome = run.outcome(restore=False)
        if group.is_first:  # it may be lost; that the run is this one is now certain
            run_folder.describe_run(folder, chosen)
        if not test:
            return outcome, None
        score = read_score(folder)
        group.barrier()  # before the first process writes it
        if score is None:
            best = chosen.build().to(own_device())  # whole, where the trained one may be sharded
            run_folder.load_best(folder, best)
            score = Score(**evaluate(best, sets.test, group=group))
            if group.is_first:
                write_json(folder / TEST, dataclasses.asdict(score))
        return outcome, score


def read_score(folder: Path) -> Score | None:
    """Return the score of the best weights on the test set; None if there is none yet."""
    path, remedy = folder / TEST, "Delete it, and the weights are scored again"
    return read_json(path, Score, remedy) if path.exists() else None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Examples,
    *,
    batch_size: int = 128,
    group: ProcessGroup | None = None,
) -> dict[str, float]:
    """Return mean cross-entropy and accuracy, with dropout off."""
    group, device = group or ProcessGroup(), next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, seen
    with evaluating(model):
        for batch in even_batches(np.arange(len(examples)), batch_size, _lengths(examples)):
            # A process without a share still takes part, as sharded weights are gathered by all.
            indices = group.part(batch)
            x, y = examples.batch(indices if len(indices) else batch[:1])
            sums += _sums(model(x.to(device)), y.to(device)) * bool(len(indices))
    loss, correct, seen = group.sum(sums).tolist()
    return {"loss": loss / seen, "accuracy": correct / seen}


@dataclass
class _Run:
    """The arguments of `train`, in a folder whose lock the first process holds."""

    model: nn.Module
    examples: Examples
    validation: Examples
    settings: TrainSettings
    folder: Path
    group: ProcessGroup
    loggers: Sequence[Logger]
    called: Any = None  # what is called: the model, perhaps wrapped and compiled
    optimizer: Any = None
    at: Position = field(default_factory=Position)

    def outcome(self, *, restore: bool = True) -> Outcome:
        """Train to the end; without `restore`, a finished run leaves the model as it is."""
        folder, group, settings = self.folder, self.group, self.settings
        run_folder.claim(folder, self._about(), write=group.is_first)
        finished = run_folder.read_outcome(folder)
        if finished is not None and not restore:
            return finished
        wrapped = group.wrap(self.model, settings.parallel)
        self.called = torch.compile(wrapped, dynamic=True) if settings.compile else wrapped
        self.optimizer = build_optimizer(self.model, settings.optimizer, settings.fused)
        if saved := checkpoints(folder / "checkpoints"):
            state = load_checkpoint(saved[-1], self.model, self.optimizer)
            self.at = from_plain(state, Position, str(saved[-1] / "state.json"))
        group.barrier()  # before the first process writes another
        if finished is not None:
            if self.at.epoch != len(finished.epochs):
                raise RunError(
                    f"{folder} holds a finished run without its last checkpoint, so that the"
                    " weights after the last epoch are lost. Those of the best epoch are in"
                    f" {folder / run_folder.BEST}: use load_run"
                )
            return finished
        if group.is_first and self.at.epochs:
            self._check_best(redone=self.at.epoch + 1)
        log = [JsonLines(folder / "log.jsonl", self.at.step)] if group.is_first else []
        self.loggers = [*log, *self.loggers] if group.is_first else []
        self._train()
        accuracies = [epoch["validation_accuracy"] for epoch in self.at.epochs]
        best = int(np.argmax(accuracies)) if settings.choose == "best" else len(accuracies) - 1
        early = self._reached() and self.at.epoch < settings.epochs
        epochs, sha256 = tuple(self.at.epochs), self.at.best_sha256 or None
        outcome = Outcome(best + 1, accuracies[best], early, epochs, sha256)
        if group.is_first:
            self._check_best()
            write_json(folder / run_folder.RESULT, dataclasses.asdict(outcome))
        group.barrier()
        return outcome

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def steps(self) -> int:
        return self.settings.epochs * math.ceil(len(self.examples) / self.settings.batch_size)

    def _train(self) -> None:
        self._tell("start")
        if self.at.step == 0:
            self._save()
        while self.at.epoch < self.settings.epochs and not self._reached():
            began = time.perf_counter()
            self._epoch()
            seconds = time.perf_counter() - began
            # The log comes first: events after the checkpoint are dropped when a run resumes.
            self._tell("epoch", self._close_epoch() | {"seconds": seconds})
            self._save()
        self._tell("end")

    def _reached(self) -> bool:
        goal, epochs = self.settings.stop_at, self.at.epochs
        return goal is not None and bool(epochs) and epochs[-1]["train_accuracy"] >= goal

    def _tell(self, kind: Kind, values: dict[str, float] | None = None) -> None:
        for logger in self.loggers:
            logger(Event(kind, self.at.step, self.steps, self.at.epoch, values or {}))

    def _epoch(self) -> None:
        """Train from the current position to the end of the epoch."""
        settings, at, lengths = self.settings, self.at, _lengths(self.examples)
        self.called.train()
        every = np.arange(len(self.examples))
        size, seed = settings.batch_size, settings.seed
        batches = epoch_batches(every, size, seed=seed, epoch=at.epoch, lengths=lengths)
        # The first process carries on the sums; those of the others start at 0 and are added.
        before = at.sums if self.group.is_first else [0.0] * 3
        sums = torch.tensor(before, dtype=torch.float64, device=self.device)
        for batch in batches[at.batch :]:
            rate = settings.optimizer.lr * settings.rate(at.step, self.steps)
            sums += self._step(batch, at.step, rate)
            at.step += 1
            at.batch += 1
            last = at.batch == len(batches)
            save = at.step % settings.checkpoint_every == 0
            if last or save or at.step % LOG_EVERY == 0:
                at.sums = self.group.sum(sums.clone()).tolist()
                if not math.isfinite(at.sums[0]):
                    raise Diverged(
                        f"the loss is not finite, found at step {at.step}: lower lr"
                        f" (now {rate:g}), or clip the gradient. The last checkpoint is from before"
                    )
                self._tell("step", {**_means(at), "lr": rate})
                if save and not last:
                    self._save()

    def _step(self, batch: np.ndarray, step: int, rate: float) -> Tensor:
        """Take one step; return sums of loss, correct answers and examples of this process."""
        settings = self.settings
        # Every step and process has its own random numbers: no state to restore after a kill.
        torch.manual_seed(_mix(settings.seed, step, self.group.rank))
        self.optimizer.zero_grad()
        lengths = _lengths(self.examples)
        on_cpu = self.device.type == "cpu"
        parts = [batch] if lengths is None or not on_cpu else pieces(batch, lengths, TOKENS_AT_ONCE)
        sums = torch.stack([self._backward(part, len(batch)) for part in parts])
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            self.optimizer.step()
        except RuntimeError as error:  # mirror descent refuses gradients that are not finite
            grads = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
            if all(grad.isfinite().all() for grad in grads):
                raise
            raise Diverged(f"step {step}: {error}") from error
        return sums.sum(dim=0)

    def _backward(self, piece: np.ndarray, size: int) -> Tensor:
        """Add the gradient of a piece of a batch of `size`; return its sums, as in `_step`."""
        indices = self.group.part(piece)
        x, y = self.examples.batch(indices if len(indices) else piece[:1])
        logits, y = self.called(x.to(self.device)), y.to(self.device)
        # Processes average their gradients: with this weight, the average is the batch mean.
        share = len(indices) * self.group.size / size
        (F.cross_entropy(logits, y) * share).backward()
        return _sums(logits.detach(), y) * bool(len(indices))

    def _close_epoch(self) -> dict[str, float]:
        """Validate, record the epoch, and keep the weights if they are the best so far."""
        at = self.at
        found = evaluate(self.called, self.validation, group=self.group)
        if not math.isfinite(found["loss"]):
            raise Diverged(
                f"the validation loss is not finite after epoch {at.epoch + 1}: lower lr"
            )
        record = _means(at) | {f"validation_{name}": value for name, value in found.items()}
        best = max((e["validation_accuracy"] for e in at.epochs), default=-1.0)
        before = max((e["train_accuracy"] for e in at.epochs), default=-1.0)
        passed = [m for m in self.settings.milestones if before < m <= record["train_accuracy"]]
        at.epochs.append(record)
        at.epoch, at.batch, at.sums = at.epoch + 1, 0, [0.0, 0.0, 0.0]
        keep = record["validation_accuracy"] > best or self.settings.choose == "last"
        if keep or passed:
            weights = model_tensors(self.model)  # gathered by all processes
            if self.group.is_first:
                # One entry: safetensors writes several in any order, and files should be the same.
                content = save(weights, metadata={"epoch": str(at.epoch)})
                if keep:
                    at.best_sha256 = sha256_of(content)
                    write_atomically(self.folder / run_folder.BEST, content)
                for share in passed:
                    write_atomically(run_folder.milestone_path(self.folder, share), content)
        return record

    def _save(self) -> None:
        folder, step, state = self.folder / "checkpoints", self.at.step, dataclasses.asdict(self.at)
        keep, write = self.settings.keep, self.group.is_first
        save_checkpoint(folder, step, self.model, self.optimizer, state, keep=keep, write=write)

    def _check_best(self, redone: int | None = None) -> None:
        """Check that the best weights are those that this run wrote.

        A kill after they were written and before the checkpoint leaves those of the epoch that is
        about to be done again, `redone`.
        """
        path, wanted = self.folder / run_folder.BEST, self.at.best_sha256
        try:
            content = path.read_bytes()
            if not wanted or sha256_of(content) == wanted:
                return
            with safe_open(path, "pt") as file:
                if redone is not None and (file.metadata() or {}).get("epoch") == str(redone):
                    return
            why = "it is not the file that this run wrote"
        except OSError as error:
            why = error.strerror
        except SafetensorError as error:
            why = str(error)
        again = f"Delete {self.folder / 'checkpoints'} to train again"
        raise RunError(f"{path} has been damaged ({why}). {again}")

    def _about(self) -> dict[str, Any]:
        """Return what a folder belongs to: all settings but those that do not change the result."""
        params = self.model.named_parameters()
        shapes = repr([(name, tuple(p.shape), str(p.dtype)) for name, p in params])
        about = {
            **self.settings.identity(),
            "arithmetic": ARITHMETIC,
            "model": sha256_of(shapes.encode())[:16],
            "examples": fingerprint(self.examples),
            "validation": fingerprint(self.validation),
        }
        return json.loads(json.dumps(about))  # as it is read back


def _sums(logits: Tensor, y: Tensor) -> Tensor:
    """Return the sums of loss, correct answers and examples: (3,)."""
    loss = F.cross_entropy(logits.double(), y, reduction="sum")
    correct = (logits.argmax(dim=-1) == y).sum()
    return torch.stack([loss, correct.double(), torch.tensor(len(y)).to(loss)])


def _means(at: Position) -> dict[str, float]:
    loss, correct, seen = at.sums
    return {"train_loss": loss / seen, "train_accuracy": correct / seen}


def _lengths(examples: Examples) -> np.ndarray | None:
    return getattr(examples, "lengths", None)


def _mix(*numbers: int) -> int:
    """Return a seed that differs for every combination."""
    digest = bytes.fromhex(sha256_of(repr(numbers).encode()))
    return int.from_bytes(digest[:8], "little") >> 1
