"""Named settings: the paper's, for a GPU, and small ones of the same kind for a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from mirrorhead.lab.datasets.batches import Examples
from mirrorhead.lab.datasets.cifar10 import Pictures, load_cifar10
from mirrorhead.lab.datasets.encoded import encode
from mirrorhead.lab.datasets.protocol import imdb_protocol
from mirrorhead.lab.datasets.tokenizer import load_tokenizer
from mirrorhead.lab.models import TextClassifier, TextSettings, ViT, ViTSettings
from mirrorhead.lab.training.settings import OptimizerSettings, TrainSettings

#: Learning rates of the paper's Table 1, by size and p. They are for a loss that is summed over a
#: batch of 100; ours is the mean, hence the factor.
PAPER_LR = {
    (size, p): 100 * lr
    for size, rates in {
        3: {1.1: 8e-4, 2.0: 4e-4, 3.0: 4e-6},
        4: {1.1: 6e-4, 2.0: 4e-4, 3.0: 6e-6},
        6: {1.1: 1e-3, 2.0: 1e-3, 3.0: 1e-5},
    }.items()
    for p, lr in rates.items()
}
#: What validation chose on IMDb at the laptop's size: docs/results.md.
LAPTOP_LR = {1.1: 0.3, 1.5: 0.3, 2.0: 1.0, 3.0: 3e-3}
#: The last 5,000 training images are the validation set.
CIFAR10_VALIDATION = 5_000

NAMES = ("laptop", "laptop-vit", "paper-3", "paper-4", "paper-6", "vit-paper")


@dataclass(frozen=True)
class Preset:
    """A data set, a model and how to train it."""

    data: Literal["imdb", "cifar10"]
    model: TextSettings | ViTSettings
    training: TrainSettings

    def build(self) -> nn.Module:
        """Return a new model, initialised from torch's current random state."""
        if isinstance(self.model, TextSettings):
            return TextClassifier(self.model)
        return ViT(self.model)


@dataclass(frozen=True)
class Sets:
    """Training set, validation set, and the test set that is scored once at the end."""

    train: Examples
    validation: Examples
    test: Examples


def preset(name: str, optimizer: OptimizerSettings | None = None, p: float = 1.1) -> Preset:
    """Return settings by name, with mirror descent at the known rate for `p` or another optimizer.

    >>> preset("paper-3", p=2.0).training.optimizer
    OptimizerSettings(name='mirror-descent', lr=0.04, p=2.0, momentum=0.0, normalize=None,
    weight_decay=0.0, l1=0.0)
    """
    if name not in NAMES:
        raise ValueError(f"preset must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "laptop":
        rule = optimizer or _known(LAPTOP_LR, p, p, name)
        return Preset(
            "imdb",
            TextSettings.laptop(),
            TrainSettings(
                epochs=5,
                batch_size=32,
                optimizer=rule,
                schedule="cosine",
                clip=1.0,
                fused=True,
            ),
        )
    if name == "laptop-vit":
        rule = optimizer or OptimizerSettings("mirror-adam", lr=3e-3, p=p)
        return Preset(
            "cifar10",
            ViTSettings.laptop(),
            TrainSettings(epochs=3, batch_size=50, optimizer=rule, schedule="cosine", fused=True),
        )
    if name == "vit-paper":
        rule = optimizer or _known({1.1: 5e-2}, p, p, name)
        return Preset(
            "cifar10",
            ViTSettings(),
            TrainSettings(epochs=1_000, batch_size=100, optimizer=rule, fused=True),
        )
    size = int(name.removeprefix("paper-"))
    rule = optimizer or _known(PAPER_LR, (size, p), p, name)
    return Preset(
        "imdb",
        TextSettings.paper(size),
        # "Until train accuracy 99.5 %": the number of epochs is only a bound.
        TrainSettings(epochs=200, batch_size=100, optimizer=rule, stop_at=0.995, fused=True),
    )


def load_sets(
    chosen: Preset,
    folder: str | Path | None = None,
    *,
    cache: str | Path | None = None,
    download: bool = False,
    partial: bool = False,
) -> Sets:
    """Load the data of a preset: IMDb by `imdb_protocol`, or CIFAR-10 with 5,000 for validation.

    Args:
        chosen: the preset.
        folder: of all data sets, or $MIRRORHEAD_DATA.
        cache: where encoded texts are kept; see `data.encode`.
        download: fetch what is not there.
        partial: accept slices of the sets.
    """
    if chosen.data == "imdb":
        assert isinstance(chosen.model, TextSettings)
        tokenizer = load_tokenizer(
            folder, max_length=chosen.model.max_length, download=download, partial=partial
        )
        found = imdb_protocol(folder, download=download, partial=partial)
        parts = (encode(x, tokenizer, cache) for x in (found.train, found.validation, found.test))
        return Sets(*parts)
    pictures = load_cifar10("train", folder, download=download, partial=partial)
    split = len(pictures) - min(CIFAR10_VALIDATION, len(pictures) // 2)
    first, last = np.arange(split), np.arange(split, len(pictures))
    return Sets(
        Pictures(pictures.pixels[first], pictures.labels[first]),
        Pictures(pictures.pixels[last], pictures.labels[last]),
        load_cifar10("test", folder, download=download, partial=partial),
    )


def _known(rates: dict[Any, float], key: object, p: float, name: str) -> OptimizerSettings:
    if key not in rates:
        known = sorted({k[1] if isinstance(k, tuple) else k for k in rates})
        raise ValueError(
            f"no learning rate is known for p = {p:g} in {name}, only for"
            f" {', '.join(f'{k:g}' for k in known)}: give one"
        )
    return OptimizerSettings("mirror-descent", lr=rates[key], p=p)
