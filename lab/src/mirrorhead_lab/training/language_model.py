"""Train a small GPT on the characters of IMDb's reviews, with AdamW or MirrorAdam.

The training set's reviews are the text; the last of them, and reviews of the test set, which are of
other films, are kept for validation and for the score. The rate rises linearly over a tenth of the
steps and falls to a tenth by a cosine. Gradients are clipped at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
from mirrorhead_lab.training.settings import check

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

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer of all the model's parameters."""
        if self.p is not None:
            return MirrorAdam(model.parameters(), lr, self.p, knee=self.knee)
        matrices = [param for param in model.parameters() if param.ndim >= 2]
        others = [param for param in model.parameters() if param.ndim < 2]
        decayed = {"params": matrices, "weight_decay": self.weight_decay}
        return AdamW([decayed, {"params": others, "weight_decay": 0.0}], lr, fused=True)


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


def rate(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step: linear warm-up, then a cosine to a tenth.

    >>> [round(rate(step, 100), 2) for step in (0, 9, 54, 99)]
    [0.1, 1.0, 0.55, 0.1]
    """
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step + 1 - warmup) / max(1, steps - warmup))


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
    method: Method,
    lr: float,
    seed: int,
    after_step: Callable[[int, Any, Optimizer], None] | None = None,
) -> Trained:
    """Train one model; weights and batches depend on the seed alone, not on the method."""
    torch.manual_seed(seed)
    model = GPT(settings.model)
    optimizer = method.optimizer(model, lr)
    rng = np.random.default_rng(seed)
    length = settings.model.length + 1
    curve: list[float] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * rate(step, settings.steps)
        starts = rng.integers(len(corpus.train) - length + 1, size=settings.batch_size)
        optimizer.zero_grad()
        _loss(model, _cut(corpus.train, starts, length)).backward()
        if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            break
        optimizer.step()
        if after_step is not None:
            after_step(step, model, optimizer)
        if (step + 1) % settings.record_every == 0:
            curve.append(loss_of(model, corpus.validation))
    return Trained(model, tuple(curve))


def _cut(text: Tensor, starts: np.ndarray, length: int) -> Tensor:
    return text[torch.from_numpy(starts)[:, None] + torch.arange(length)]  # (windows, length)


def _loss(model: nn.Module, windows: Tensor, reduction: str = "mean") -> Tensor:
    ids = windows.long()
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)
