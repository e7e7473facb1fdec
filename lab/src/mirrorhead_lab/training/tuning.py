"""Fine-tune a pretrained text classifier so that few weights change, and score patches of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mirrorhead._files import remove_folder, write_atomically, write_json
from mirrorhead.optim import CenteredAdam
from mirrorhead.patches import Patch
from mirrorhead.patches.checkpoints import checkpoint_files
from mirrorhead.patches.model_config import KEY, classifier_config
from mirrorhead_lab.datasets import Splits, Texts, fingerprint_of
from mirrorhead_lab.models.pretrained import HEAD, PretrainedClassifier, Tokens, accuracy
from mirrorhead_lab.runtime.folders import check_writable
from mirrorhead_lab.training import run_folder
from mirrorhead_lab.training.checkpoints import checkpoints
from mirrorhead_lab.training.loggers import Logger
from mirrorhead_lab.training.loop import Loop, Task
from mirrorhead_lab.training.settings import Schedule, check

#: What a run leaves in its folder: the patch, all tuned weights, the table of sizes.
PATCH, TUNED, TABLE = "patch.safetensors", "tuned.safetensors", "table.json"
#: Shares of the fine-tuned weights for which a patch is scored.
SHARES = (1.0, 0.1, 0.01, 0.003, 0.001, 0.0003, 0.0001)


@dataclass(frozen=True)
class TuneSettings:
    """How to fine-tune."""

    p: float = 1.03  # exponent of the norm, above 1: the nearer to 1, the fewer weights matter
    reach: float | None = None  # of a weight whose gradient keeps its sign; None: `default_reach`
    texts: int | None = 2000  # to train on, drawn at random; None: all
    epochs: int = 2
    batch_size: int = 32
    max_length: int = 32  # tokens of a text
    head_lr: float = 5e-3  # AdamW's rate for the new head
    warmup: float = 0.1  # share of the steps in which rates grow from 0; then they fall to 0
    seed: int = 0  # of the order of the texts and of the draw

    def __post_init__(self) -> None:
        if not 1 < self.p <= 2:
            raise ValueError(f"p must be above 1 and at most 2, got {self.p}")
        for name in ("reach", "head_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in ("texts", "epochs", "batch_size", "max_length"):
            if getattr(self, name) is not None:
                check(name, getattr(self, name), low=1)
        check("seed", self.seed, low=0, below=2**63)
        check("warmup", self.warmup, low=0, below=1)


def default_reach(p: float) -> float:
    """A reach that suits p: 1.5 up to p = 1.18, then less.

    A weight whose gradient is mostly noise has a mean direction of about 1/4 and moves by
    reach / 4^(1/(p-1)). That should stay near 0.001, as in a run of AdamW.

    >>> [round(default_reach(p), 3) for p in (1.05, 1.1, 1.3, 1.5, 2)]
    [1.5, 1.5, 0.102, 0.016, 0.004]
    """
    return min(1.5, 1e-3 * 4 ** min(1 / (p - 1), 10))


@dataclass(frozen=True, eq=False)
class TuneSets:
    """The tokens of a task's three sets."""

    train: Tokens
    validation: Tokens
    test: Tokens

    @classmethod
    def of(cls, task: Splits[Texts], folder: Any, settings: TuneSettings) -> TuneSets:
        parts = (task.train.sample(settings.texts, settings.seed), task.validation, task.test)
        length = settings.max_length
        return cls(*(Tokens(folder, part.texts, part.labels, length) for part in parts))


def schedule(step: int, steps: int, warmup: float) -> float:
    """Return what rates are multiplied by in step number `step` of `steps`, counted from 0."""
    return Schedule("linear", warmup)(step, steps)


class FineTuning(Task[PretrainedClassifier]):
    """The head with AdamW, and the encoder's matrices with `optimizer`.

    That is centred mirror descent with the settings' p and reach, unless given.
    """

    def __init__(
        self,
        model: PretrainedClassifier,
        sets: TuneSets,
        settings: TuneSettings,
        optimizer: Optimizer | None = None,
        validated: bool = True,
    ) -> None:
        self.model, self.sets, self.validated = model, sets, validated
        generator, size = torch.Generator().manual_seed(settings.seed), settings.batch_size
        self.orders = [sets.train.shuffled(size, generator) for _ in range(settings.epochs)]
        self.epochs, self.steps = settings.epochs, sum(map(len, self.orders))
        self.schedule, self.seed = Schedule("linear", settings.warmup), settings.seed
        if optimizer is None:
            reach = settings.reach or default_reach(settings.p)
            matrices = list(model.train_matrices().values())
            full = sum(self.schedule(step, self.steps) for step in range(self.steps))
            optimizer = CenteredAdam(matrices, settings.p, reach=reach, total_steps=full)
        head = AdamW(model.head.parameters(), settings.head_lr, weight_decay=0.0)
        self.optimizers = [optimizer, head]

    def batches(self, epoch: int) -> list[list[int]]:
        return self.orders[epoch]

    def backward(self, batch: list[int]) -> Tensor:
        ids, mask, labels = self.sets.train.batch(batch)
        loss = nn.functional.cross_entropy(self.model(ids, mask).float(), labels)
        loss.backward()
        return torch.tensor([loss.item(), 1.0], dtype=torch.float64)

    def validate(self) -> dict[str, float]:
        if not self.validated:
            return {}
        return {"validation_accuracy": accuracy(self.model, self.sets.validation)}


@dataclass(frozen=True)
class TuneResult:
    """The mean loss of each epoch, and validation accuracy after it."""

    losses: list[float]
    validation: list[float]


def fine_tune(
    model: PretrainedClassifier,
    sets: TuneSets,
    settings: TuneSettings,
    optimizer: Optimizer | None = None,
    after_step: Callable[[float], None] | None = None,
    validate: bool = True,
) -> TuneResult:
    """Train a model by `FineTuning`, without a folder.

    Args:
        after_step: called after each step with the schedule's factor.
        validate: whether to score validation data after each epoch; without, the accuracy is NaN.
    """
    task = FineTuning(model, sets, settings, optimizer, validate)
    after = None if after_step is None else lambda s: after_step(task.schedule(s, task.steps))
    epochs = Loop(task, after_step=after).run()
    scores = [epoch.get("validation_accuracy", math.nan) for epoch in epochs]
    return TuneResult([epoch["train_loss"] for epoch in epochs], scores)


def tune(
    task: Splits[Texts],
    base: Path,
    settings: TuneSettings,
    keep: float,
    folder: Path,
    *,
    loggers: Sequence[Logger] = (),
) -> None:
    """Fine-tune a base in a folder, or resume there; score patches of every size and write one.

    The folder gets the log, the patch with the share `keep` of the changes, all tuned weights and,
    last, the table of sizes, with which the run is finished. Checkpoints are removed then. Nothing
    is done for a finished run.
    """
    about = {"task": task.name, "classes": list(task.classes), "base": str(base)}
    about |= {"keep": keep} | asdict(settings)
    # The same names can stand for other texts and weights, whose results are not these.
    about |= {"content of the data": fingerprint_of(task), "content of the base": _sha256(base)}

    def finished() -> bool:
        there = all((folder / name).exists() for name in (TABLE, PATCH, TUNED))
        return run_folder.belongs(folder, about) and there

    if finished():
        return
    check_writable(folder)
    model = PretrainedClassifier(base, len(task.classes))
    model.config = classifier_config(task.classes, settings.max_length)
    sets = TuneSets.of(task, base, settings)
    longest = max(part.longest() for part in (sets.train, sets.validation, sets.test))
    positions = getattr(model.encoder.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        most = f"{positions}, the number of positions of {base}"
        raise ValueError(f"max_length must be at most {most}, got {settings.max_length}")
    with run_folder.locked_run(folder):
        if finished():  # another process may have been faster
            return
        run_folder.claim(folder, about, write=True)
        epochs = Loop(FineTuning(model, sets, settings), folder, loggers=loggers).run()
        tuned = model.tuned_state()
        rows, patch = size_table(model, tuned, sets, keep)
        patch.save(folder / PATCH)
        config = {KEY: json.dumps(model.config)}
        tensors = {name: tensor.contiguous() for name, tensor in tuned.items()}
        write_atomically(folder / TUNED, save(tensors, config))
        chosen = next(row for row in rows if row.share == keep)
        content = {
            "weights": _weights(model),
            "epochs": epochs,
            "table": [asdict(row) for row in rows],
            "patch": {"file": PATCH, **asdict(chosen)},
        }
        write_json(folder / TABLE, content)
        for checkpoint in checkpoints(folder / run_folder.CHECKPOINTS):
            remove_folder(checkpoint)


@dataclass(frozen=True)
class SizeRow:
    """Accuracy with a part of the changes."""

    share: float  # of the fine-tuned weights
    changed: int
    bytes: int
    validation: float
    test: float


def patch_of(model: PretrainedClassifier, tuned: dict[str, Tensor], count: int | None) -> Patch:
    """The patch with the `count` largest changes (None: all), the head, and its labels."""
    patch = Patch.between(model.base, tuned, count=count, whole=HEAD)
    return replace(patch, config=model.config)


def size_table(
    model: PretrainedClassifier, tuned: dict[str, Tensor], sets: TuneSets, keep: float
) -> tuple[list[SizeRow], Patch]:
    """Return the accuracies of patches of several sizes, and the patch of the share `keep`.

    The model is left with the weights `tuned`.
    """
    rows, weights, chosen = [], _weights(model), None
    for share in sorted({*SHARES, keep}, reverse=True):
        patch = patch_of(model, tuned, None if share == 1 else max(1, round(share * weights)))
        state = {n: t.clone() if n in patch.tensors else t for n, t in model.base.items()}
        patch.apply(state)
        model.load_tuned(state)
        scores = accuracy(model, sets.validation), accuracy(model, sets.test)
        changed = sum(len(p.values) for p in patch.tensors.values() if p.index is not None)
        rows.append(SizeRow(share, changed, patch.bytes, *scores))
        chosen = patch if share == keep else chosen
    model.load_tuned(tuned)
    assert chosen is not None, "keep is one of the shares"
    return rows, chosen


def _sha256(base: Path) -> str:
    """Return a hash of the files with a base's weights."""
    digest = hashlib.sha256()
    for path in checkpoint_files(base):
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()[:16]


def _weights(model: PretrainedClassifier) -> int:
    return sum(matrix.numel() for matrix in model.train_matrices().values())
