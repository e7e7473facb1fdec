"""Fine-tune a pretrained text classifier so that few weights change, and score patches of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mirrorhead.optim import MirrorAdam
from mirrorhead.patches import Patch
from mirrorhead_lab.datasets.sentences import Sentences
from mirrorhead_lab.models.pretrained import HEAD, PretrainedClassifier, Tokens, accuracy
from mirrorhead_lab.runtime.errors import Diverged
from mirrorhead_lab.training.checkpoints import checkpoints as find_checkpoints
from mirrorhead_lab.training.checkpoints import load_checkpoint, save_checkpoint
from mirrorhead_lab.training.settings import check

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


def full_steps(factors: Sequence[float]) -> float:
    """`steps` of a centred optimizer: the sum of the factors, at most 8 times its root.

    In long runs no weight's gradient keeps its sign. The mean direction of noise over n steps falls
    like 1/sqrt(n), and with the whole sum nothing would move (docs/patches.md).

    >>> full_steps([1.0, 0.5]), full_steps([1.0] * 10_000)
    (1.5, 800.0)
    """
    total = sum(factors)
    return min(total, 8 * math.sqrt(total))


@dataclass(frozen=True, eq=False)
class TuneSets:
    """The tokens of a task's three sets."""

    train: Tokens
    validation: Tokens
    test: Tokens

    @classmethod
    def of(cls, task: Sentences, folder: Any, settings: TuneSettings) -> TuneSets:
        parts = (task.train.sample(settings.texts, settings.seed), task.validation, task.test)
        length = settings.max_length
        return cls(*(Tokens(folder, part.texts, part.labels, length) for part in parts))


@dataclass
class TuneResult:
    """The mean loss of each epoch, and validation accuracy after it."""

    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)


def schedule(step: int, steps: int, warmup: float) -> float:
    """What rates are multiplied by in step number `step` of `steps`, counted from 0."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return (steps - step) / (steps - rising)


def fine_tune(
    model: PretrainedClassifier,
    sets: TuneSets,
    settings: TuneSettings,
    optimizer: Optimizer | None = None,
    after_step: Callable[[float], None] | None = None,
    on_epoch: Callable[[int, float, float], None] | None = None,
    checkpoints: Path | None = None,
    validate: bool = True,
) -> TuneResult:
    """Train the head with AdamW and the encoder's matrices with `optimizer`.

    Args:
        optimizer: centred mirror descent with the settings' p and reach, unless given.
        after_step: called after each step with the schedule's factor.
        on_epoch: called with the epoch, its mean loss, and validation accuracy.
        checkpoints: a folder that gets the state after each epoch, and is resumed from. Calls
            are not repeated for epochs that are done.
        validate: whether to score validation data after each epoch; without, the accuracy is NaN.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    per_epoch = max(1, len(sets.train) // settings.batch_size)
    steps = settings.epochs * per_epoch
    factors = [schedule(step, steps, settings.warmup) for step in range(steps)]
    if optimizer is None:
        reach = settings.reach or default_reach(settings.p)
        matrices = list(model.train_matrices().values())
        full = full_steps(factors)
        optimizer = MirrorAdam(matrices, reach, settings.p, center="init", steps=full)
    head = AdamW(model.head.parameters(), settings.head_lr, weight_decay=0.0)
    rates = [group["lr"] for o in (optimizer, head) for group in o.param_groups]
    result = TuneResult()
    if checkpoints is not None:
        result = _resumed(checkpoints, model, optimizer, head)
    step = 0
    for epoch in range(settings.epochs):
        batches = sets.train.shuffled(settings.batch_size, generator)
        if epoch < len(result.losses):  # done before; the generator has moved on
            step += len(batches)
            continue
        model.train()
        total = 0.0
        for places in batches:
            factor = factors[min(step, steps - 1)]
            groups = (group for o in (optimizer, head) for group in o.param_groups)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            ids, mask, labels = sets.train.batch(places)
            loss = nn.functional.cross_entropy(model(ids, mask).float(), labels)
            if not math.isfinite(loss.item()):
                raise Diverged(f"the loss is {loss.item()} in step {step}: reduce the rate")
            loss.backward()
            for one in (optimizer, head):
                one.step()
                one.zero_grad()
            if after_step is not None:
                after_step(factor)
            total += loss.item()
            step += 1
        result.losses.append(total / len(batches))
        result.validation.append(accuracy(model, sets.validation) if validate else math.nan)
        if checkpoints is not None:
            for name, one in (("head", head), ("encoder", optimizer)):
                save_checkpoint(checkpoints / name, epoch + 1, model, one, asdict(result), keep=2)
        if on_epoch is not None:
            on_epoch(epoch + 1, result.losses[-1], result.validation[-1])
    return result


def _resumed(
    folder: Path, model: PretrainedClassifier, encoder: Optimizer, head: Optimizer
) -> TuneResult:
    """Load the newest epoch that has both checkpoints, and return what was measured so far."""
    both = [{path.name for path in find_checkpoints(folder / n)} for n in ("head", "encoder")]
    newest = max(both[0] & both[1], default=None)
    if newest is None:
        return TuneResult()
    load_checkpoint(folder / "head" / newest, model, head)
    return TuneResult(**load_checkpoint(folder / "encoder" / newest, model, encoder))


@dataclass(frozen=True)
class SizeRow:
    """Accuracy with a part of the changes."""

    share: float  # of the fine-tuned weights
    changed: int
    bytes: int
    validation: float
    test: float | None


def patch_of(model: PretrainedClassifier, tuned: dict[str, Tensor], count: int | None) -> Patch:
    """The patch with the `count` largest changes (None: all), the head, and its labels."""
    patch = Patch.between(model.base, tuned, count=count, whole=HEAD)
    return replace(patch, config=model.config)


def size_table(
    model: PretrainedClassifier,
    tuned: dict[str, Tensor],
    sets: TuneSets,
    weights: int,
    shares: Sequence[float] = SHARES,
    test: bool = True,
) -> list[SizeRow]:
    """Accuracy of patches of several sizes. The model is left with the weights `tuned`."""
    rows = []
    for share in shares:
        patch = patch_of(model, tuned, None if share == 1 else max(1, round(share * weights)))
        state = {n: t.clone() if n in patch.tensors else t for n, t in model.base.items()}
        patch.apply(state)
        model.load_tuned(state)
        scored = accuracy(model, sets.test) if test else None
        changed = sum(len(p.values) for p in patch.tensors.values() if p.index is not None)
        rows.append(SizeRow(share, changed, patch.bytes, accuracy(model, sets.validation), scored))
    model.load_tuned(tuned)
    return rows
