"""Training of classifiers, and a run from start to test score."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead._files import sha256_of, write_json
from mirrorhead_lab.datasets.batches import (
    Examples,
    epoch_batches,
    even_batches,
    fingerprint,
    pieces,
)
from mirrorhead_lab.models.attention_maps import evaluating
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.training import run_folder
from mirrorhead_lab.training.loggers import Logger
from mirrorhead_lab.training.loop import Loop, Task
from mirrorhead_lab.training.presets import Preset, Sets
from mirrorhead_lab.training.process_group import ProcessGroup, own_device, process_group
from mirrorhead_lab.training.run_folder import Outcome, Score
from mirrorhead_lab.training.settings import Schedule, TrainSettings, build_optimizer

#: Tokens that a CPU processes at once. More would cost memory, and time to allocate it; the
#: gradients of a larger batch are summed over pieces of it.
TOKENS_AT_ONCE = 8_192
#: Makes an optimizer of a model's parameters, or None for that of the settings.
MakeOptimizer = Callable[[nn.Module], Optimizer] | None


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
    with (
        process_group() as group,
        run_folder.locked_run(folder) if group.is_first else nullcontext(),
    ):
        return _outcome(model, examples, validation, settings, folder, group, loggers)


def complete_run(
    chosen: Preset,
    sets: Sets,
    folder: Path,
    *,
    test: bool = True,
    wait: bool = False,
    group: ProcessGroup | None = None,
    loggers: Sequence[Logger] = (),
    optimizer: MakeOptimizer = None,
) -> tuple[Outcome, Score | None]:
    """Train a preset in `folder`, then score the weights of the best epoch on the test set.

    What is done already is read from the folder: result.json for training, test.json for the
    score. So a finished run needs none of its checkpoints.

    Args:
        test: False leaves the test set alone; the score is then None.
        wait: while another process trains in the folder, instead of a BlockingIOError.
        group: the processes that train together; one alone if None.
        optimizer: from the model, instead of the optimizer of the settings, whose name is then
            "own": the folder must be that of this function alone.
    """
    group, settings = group or ProcessGroup(), chosen.training
    chosen = chosen.for_classes(sets.classes)
    with run_folder.locked_run(folder, wait=wait) if group.is_first else nullcontext():
        if group.is_first and run_folder.check_run_folder(folder) is None:
            run_folder.describe_run(folder, chosen)
        torch.manual_seed(settings.seed)
        model, parts = chosen.build().to(own_device()), (sets.train, sets.validation)
        how: Any = {"restore": False, "optimizer": optimizer}
        outcome = _outcome(model, *parts, settings, folder, group, loggers, **how)
        if group.is_first:  # it may be lost; that the run is this one is now certain
            run_folder.describe_run(folder, chosen)
        if not test:
            return outcome, None
        score = run_folder.read_score(folder)
        group.barrier()  # before the first process writes it
        if score is None:
            best = chosen.build().to(own_device())  # whole, where the trained one may be sharded
            run_folder.load_best(folder, best)
            score = Score(**evaluate(best, sets.test, group=group))
            if group.is_first:
                write_json(folder / run_folder.TEST, dataclasses.asdict(score))
        return outcome, score


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


class Classification(Task[nn.Module]):
    """Cross-entropy, in batches of similar length, on one process or several."""

    measures = ("train_loss", "train_accuracy")

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        validation: Examples,
        settings: TrainSettings,
        group: ProcessGroup,
        optimizer: MakeOptimizer = None,
    ) -> None:
        self.model, self.examples, self.validation = model, examples, validation
        self.group, self.batch_size = group, settings.batch_size
        wrapped = group.wrap(model, settings.parallel)
        self.called: Any = torch.compile(wrapped, dynamic=True) if settings.compile else wrapped
        made = optimizer(model) if optimizer is not None else None
        self.optimizers = [made or build_optimizer(model, settings.optimizer, settings.fused)]
        self.epochs, self.seed, self.clip = settings.epochs, settings.seed, settings.clip
        self.steps = settings.epochs * math.ceil(len(examples) / settings.batch_size)
        self.schedule = Schedule(settings.schedule, settings.warmup)

    def batches(self, epoch: int) -> list[np.ndarray]:
        every, lengths = np.arange(len(self.examples)), _lengths(self.examples)
        return epoch_batches(every, self.batch_size, seed=self.seed, epoch=epoch, lengths=lengths)

    def backward(self, batch: np.ndarray) -> Tensor:
        lengths = _lengths(self.examples)
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        parts = [batch] if lengths is None or not on_cpu else pieces(batch, lengths, TOKENS_AT_ONCE)
        return torch.stack([self._piece(part, len(batch)) for part in parts]).sum(dim=0)

    def _piece(self, piece: np.ndarray, size: int) -> Tensor:
        """Add the gradient of a piece of a batch of `size`; return sums as `backward` does."""
        device = next(self.model.parameters()).device
        indices = self.group.part(piece)
        x, y = self.examples.batch(indices if len(indices) else piece[:1])
        logits, y = self.called(x.to(device)), y.to(device)
        # Processes average their gradients: with this weight, the average is the batch mean.
        share = len(indices) * self.group.size / size
        (F.cross_entropy(logits, y) * share).backward()
        return _sums(logits.detach(), y) * bool(len(indices))

    def validate(self) -> dict[str, float]:
        found = evaluate(self.called, self.validation, group=self.group)
        return {f"validation_{name}": value for name, value in found.items()}


def _outcome(
    model: nn.Module,
    examples: Examples,
    validation: Examples,
    settings: TrainSettings,
    folder: Path,
    group: ProcessGroup,
    loggers: Sequence[Logger],
    *,
    restore: bool = True,
    optimizer: MakeOptimizer = None,
) -> Outcome:
    """Train in a folder whose lock the first process holds.

    Without `restore`, a finished run leaves the model as it is.
    """
    run_folder.claim(folder, _about(model, examples, validation, settings), write=group.is_first)
    finished = run_folder.read_outcome(folder)
    if finished is not None and not restore:
        return finished
    task = Classification(model, examples, validation, settings, group, optimizer)
    names = ("stop_at", "choose", "milestones", "checkpoint_every", "keep")
    how: Any = {name: getattr(settings, name) for name in names}
    loop = Loop(task, folder, group, loggers, **how)
    if finished is not None:
        loop.resume()
        if loop.at.epoch != len(finished.epochs):
            raise RunError(
                f"{folder} holds a finished run without its last checkpoint, so that the"
                " weights after the last epoch are lost. Those of the best epoch are in"
                f" {folder / run_folder.BEST}: use load_run"
            )
        return finished
    epochs = loop.run()
    accuracies = [epoch["validation_accuracy"] for epoch in epochs]
    best = int(np.argmax(accuracies)) if settings.choose == "best" else len(accuracies) - 1
    early = loop.stopped() and len(epochs) < settings.epochs
    outcome = Outcome(best + 1, accuracies[best], early, tuple(epochs), loop.at.best_sha256)
    if group.is_first:
        loop.check_best()
        write_json(folder / run_folder.RESULT, dataclasses.asdict(outcome))
    group.barrier()
    return outcome


def _about(
    model: nn.Module, examples: Examples, validation: Examples, settings: TrainSettings
) -> dict[str, Any]:
    """Return what a folder belongs to: all settings but those that do not change the result."""
    shapes = repr([(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()])
    about = {
        **settings.identity(),
        "model": sha256_of(shapes.encode())[:16],
        "examples": fingerprint(examples),
        "validation": fingerprint(validation),
    }
    return json.loads(json.dumps(about))  # as it is read back


def _sums(logits: Tensor, y: Tensor) -> Tensor:
    """Return the sums of loss, correct answers and examples: (3,)."""
    loss = F.cross_entropy(logits.double(), y, reduction="sum")
    correct = (logits.argmax(dim=-1) == y).sum()
    return torch.stack([loss, correct.double(), torch.tensor(len(y)).to(loss)])


def _lengths(examples: Examples) -> np.ndarray | None:
    return getattr(examples, "lengths", None)
