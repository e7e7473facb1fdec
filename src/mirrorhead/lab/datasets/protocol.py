"""IMDb as every experiment here uses it: training, validation and test sets without overlap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mirrorhead.lab.datasets.cad import PAIRS, load_cad
from mirrorhead.lab.datasets.imdb import load_imdb
from mirrorhead.lab.datasets.splits import validation_split, without
from mirrorhead.lab.datasets.texts import Texts


@dataclass(frozen=True)
class Protocol:
    """Three sets of reviews, and how many were left out of training and why."""

    train: Texts
    validation: Texts
    test: Texts
    in_test: int
    in_cad: int


def imdb_protocol(
    folder: str | Path | None = None,
    *,
    share: float = 0.1,
    seed: int = 0,
    download: bool = False,
    partial: bool = False,
) -> Protocol:
    """IMDb without its overlaps, with a validation part of other films.

    Two kinds of texts are removed from the published training split, so that both can be scored:
    those that are also in test, which stays as published, and those of counterfactual pairs. The
    rest is split by `validation_split`.
    """
    whole = load_imdb("train", folder, download=download, partial=partial)
    test = load_imdb("test", folder, download=download, partial=partial)
    kept = whole.take(without(whole, test.texts))
    pairs = [load_cad(split, folder, download=download, partial=partial) for split in PAIRS]
    clean = kept.take(
        without(kept, [t for pair in pairs for t in pair.original.texts + pair.revision.texts])
    )
    train, validation = validation_split(clean, share, seed)
    return Protocol(
        train=clean.take(train),
        validation=clean.take(validation),
        test=test,
        in_test=len(whole) - len(kept),
        in_cad=len(kept) - len(clean),
    )
