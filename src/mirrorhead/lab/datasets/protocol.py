"""IMDb as every experiment here uses it: what is trained on, what chooses, what is scored."""

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

    Left out of the published training split are the texts that stand in test too (test stays
    as published), and every text of a counterfactual pair, so that both may be scored. What is
    left is split by `validation_split`.
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
