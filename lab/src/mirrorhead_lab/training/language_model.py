"""Train a small GPT on the characters of IMDb's reviews, with AdamW or MirrorAdam.

The training set's reviews are the text; the last of them, and reviews of the test set, which are of
other films, are kept for validation and for the score. The rate rises linearly over a tenth of the
steps and falls to a tenth by a cosine. Gradients are clipped at 1. What the loop calls an epoch is
the steps between two validations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mirrorhead.optim import MirrorAdam
from mirrorhead_lab.datasets import load_imdb
from mirrorhead_lab.models.gpt import GPT, GPTSettings
from mirrorhead_lab.runtime.errors import Diverged
from mirrorhead_lab.training.loop import Loop, Task
from mirrorhead_lab.training.settings import Schedule, check

#: A line break and the printable ASCII characters; all others are left out of the text.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
#: Reviews of each label that are kept from training.
HELD_OUT = 500


@dataclass(frozen=True)
class LanguageSettings:
    """The model, and how long it is trained and how it is scored."""

    model: GPTSettings = field(default_factory=GPTSettings)
    steps: int = 2_000
    batch_size: int = 4
    record_every: int = 200  # steps between validations
    windows: int = 512  # of validation and of test, each as long as the context

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "record_every", "windows"):
            check(name, getattr(self, name), low=1)


@dataclass(frozen=True)
class Method:
    """An optimizer without its rate: AdamW (p is None) or MirrorAdam.

    weight_decay acts on matrices only, as is usual for language models.
    """

    p: float | None = None
    weight_decay: float = 0.0
    knee: float | None = 1.0

    def __call__(self, model: nn.Module, lr: float) -> list[Optimizer]:
        """Return the optimizer of all the model's parameters."""
        if self.p is not None:
            return [MirrorAdam(model.parameters(), lr, self.p, knee=self.knee)]
        matrices = [param for param in model.parameters() if param.ndim >= 2]
        others = [param for param in model.parameters() if param.ndim < 2]
        decayed = {"params": matrices, "weight_decay": self.weight_decay}
        return [AdamW([decayed, {"params": others, "weight_decay": 0.0}], lr, fused=True)]


#: What makes the optimizers of a model, given the learning rate: a `Method`, or a function.
Optimizers = Callable[[nn.Module, float], Sequence[Optimizer]]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Character numbers: the text to train on, and windows to validate and to score on."""

    train: Tensor  # (characters,), uint8
    validation: Tensor  # (windows, length + 1)
    test: Tensor

    @staticmethod
    def of_imdb(settings: LanguageSettings, folder: str | Path | None = None) -> Corpus:
        """Read the reviews; windows are drawn once, the same for all runs."""
        train, other = load_imdb("train", folder), load_imdb("test", folder)
        kept = np.zeros(len(train), bool)
        for label in (0, 1):
            kept[np.flatnonzero(train.labels == label)[-HELD_OUT:]] = True
        texts = np.array(train.texts, dtype=object)
        score = np.random.default_rng(0).choice(len(other), 2 * HELD_OUT, replace=False)
        held_out = (encode(texts[kept]), encode(other.texts[i] for i in score))
        return Corpus(encode(texts[~kept]), *(windows(text, settings) for text in held_out))


def encode(texts: Iterable[str]) -> Tensor:
    """Return the characters' numbers, the texts one after the other with an empty line between.

    >>> encode(["a<br />b", "é~"]).tolist()
    [66, 0, 67, 0, 0, 95, 0, 0]
    """
    table = np.full(256, 255, np.uint8)
    table[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))
    whole = "".join(text.replace("<br />", "\n") + "\n\n" for text in texts)
    codes = table[np.frombuffer(whole.encode("ascii", "ignore"), np.uint8)]
    return torch.from_numpy(codes[codes != 255])


def windows(text: Tensor, settings: LanguageSettings) -> Tensor:
    """Draw windows of the text, one character longer than the context, with a fixed seed."""
    length = settings.model.length + 1
    if len(text) < length:
        raise ValueError(f"the text must have at least {length} characters, got {len(text)}")
    starts = np.random.default_rng(1).integers(len(text) - length + 1, size=settings.windows)
    return _cut(text, starts, length)


def loss_of(model: nn.Module, windows: Tensor, batch: int = 64) -> float:
    """Return the mean loss in nats per character."""
    with torch.no_grad():
        losses = [_loss(model, part, "sum") for part in windows.split(batch)]
    return float(sum(losses)) / (windows.shape[0] * (windows.shape[1] - 1))


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, and the validation loss every `record_every` steps."""

    model: GPT
    curve: tuple[float, ...]


def train(
    corpus: Corpus,
    settings: LanguageSettings,
    method: Optimizers,
    lr: float,
    seed: int,
    after_step: Callable[[int, Any, Optimizer], None] | None = None,
) -> Trained:
    """Train one model; weights and batches depend on the seed alone, not on the method.

    The curve of a run that diverges ends there. `after_step` gets the first optimizer.
    """
    torch.manual_seed(seed)
    task = LanguageModelling(corpus, settings, method, lr, seed)
    optimizer = task.optimizers[0]
    after = None if after_step is None else lambda step: after_step(step, task.model, optimizer)
    loop = Loop(task, after_step=after)
    with suppress(Diverged):
        loop.run()
    whole = loop.at.epochs[: settings.steps // settings.record_every]
    curve = tuple(epoch["validation_loss"] for epoch in whole)
    return Trained(task.model, curve)


class LanguageModelling(Task[GPT]):
    """The next character, at windows of the text that the seed draws."""

    def __init__(
        self, corpus: Corpus, settings: LanguageSettings, method: Optimizers, lr: float, seed: int
    ) -> None:
        self.model, self.corpus, self.every = GPT(settings.model), corpus, settings.record_every
        self.optimizers = method(self.model, lr)
        self.steps, self.seed, self.clip = settings.steps, seed, 1.0
        self.epochs = math.ceil(settings.steps / self.every)
        self.schedule = Schedule("cosine", warmup=0.1, end=0.1)
        self.length = settings.model.length + 1
        size, count = (settings.steps, settings.batch_size), len(corpus.train) - self.length + 1
        self.starts = np.random.default_rng(seed).integers(count, size=size)

    def batches(self, epoch: int) -> list[np.ndarray]:
        return list(self.starts[epoch * self.every : (epoch + 1) * self.every])

    def backward(self, batch: np.ndarray) -> Tensor:
        loss = _loss(self.model, _cut(self.corpus.train, batch, self.length))
        loss.backward()
        return torch.tensor([float(loss.detach()), 1.0], dtype=torch.float64)

    def validate(self) -> dict[str, float]:
        return {"validation_loss": loss_of(self.model, self.corpus.validation)}


def _cut(text: Tensor, starts: np.ndarray, length: int) -> Tensor:
    return text[torch.from_numpy(starts)[:, None] + torch.arange(length)]  # (windows, length)


def _loss(model: nn.Module, windows: Tensor, reduction: str = "mean") -> Tensor:
    ids = windows.long()
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)
