"""How far weights of different sizes move in a step, by method, at the same learning rate.

The steps of all matrices in the second half of a short run, over the learning rate, by the size of
the weight over the first root mean square r of its matrix. Nothing is tuned and no data are read
but those of training.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead_lab.findings.table import Table, number, word
from mirrorhead_lab.studies.language_model import METHODS
from mirrorhead_lab.studies.study import Method, Rows, Study, Trial
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings, train

SETTINGS = LanguageSettings(steps=200, record_every=200)
EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SIZES = (*(f"{a:g}-{b:g}" for a, b in pairwise((0, *EDGES))), f"> {EDGES[-1]:g}")
RATE = 1e-3


class Moves(Struct, frozen=True):
    """The mean change of a weight per step over the learning rate, by size."""

    means: dict[str, float]


class Steps:
    """Sums the changes of weights."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.rms: dict[str, float] = {}
        self.sums, self.counts = torch.zeros(2, len(SIZES), dtype=torch.float64)

    def __call__(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or name == "tokens.weight":  # rows of other characters do not move
                continue
            now = weight.detach().clone()
            self.rms.setdefault(name, float(now.square().mean().sqrt()))
            if step >= SETTINGS.steps // 2:
                before = self.before[name]
                place = torch.bucketize(before.abs() / self.rms[name], torch.tensor(EDGES))
                moved = (now - before).abs().double() / optimizer.param_groups[0]["lr"]
                self.sums += torch.bincount(place.flatten(), moved.flatten(), len(self.sums))
                self.counts += torch.bincount(place.flatten(), minlength=len(self.sums))
            self.before[name] = now


def load(task: str, data: Path | None) -> Corpus:
    return Corpus.of_imdb(SETTINGS, data)


def run(trial: Trial, corpus: Corpus, folder: Path) -> Moves:
    steps = Steps()
    train(corpus, SETTINGS, METHODS[trial.method].how, trial.setting["lr"], trial.seed, steps)
    return Moves(dict(zip(SIZES, (steps.sums / steps.counts).tolist(), strict=True)))


def table(rows: Rows[Moves]) -> Table:
    found = (
        (word(row.trial.method), *(number(row.measured.means[size]) for size in SIZES))
        for row in rows
    )
    note = "Mean change of a weight per step over the learning rate, by |w| / r."
    return Table("language-moves", "Steps by size", ("Method", *SIZES), tuple(found), note)


STUDY = Study(
    name="language-model-moves",
    title="Language models: how far do weights move?",
    methods={name: Method(({"lr": RATE},), method.how) for name, method in METHODS.items()},
    seeds=(),
    tuning_seed=0,
    measured=Moves,
    load=load,
    run=run,
    score=lambda measured: 0.0,
    seconds=10,
    tuning="none",
    tables=lambda rows: (table(rows),),
)
