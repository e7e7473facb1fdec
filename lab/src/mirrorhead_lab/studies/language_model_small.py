"""The same learning rate for all, on a smaller GPT: 2 blocks, 64 wide, 600 steps.

Every method is run at every rate with every seed; nothing is tuned and nothing is claimed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mirrorhead_lab.findings.table import Cell, Table, mean, word
from mirrorhead_lab.models.gpt import GPTSettings
from mirrorhead_lab.studies import language_model
from mirrorhead_lab.studies.language_model import METHODS, Losses
from mirrorhead_lab.studies.study import Rows, Study, Trial
from mirrorhead_lab.studies.tables import PLUS_MINUS, Columns
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings

SETTINGS = LanguageSettings(GPTSettings(dim=64, layers=2), 600, 8, 600)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)


def load(task: str, data: Path | None) -> Corpus:
    return Corpus.of_imdb(SETTINGS, data)


def more(rows: Rows[Losses]) -> Iterator[Trial]:
    for lr in RATES:
        for seed in SEEDS:
            for name in METHODS:
                yield Trial(method=name, setting={"lr": lr}, seed=seed, final=True)


def table(rows: Rows[Losses]) -> Table:
    def at(lr: float, name: str) -> Cell:
        found = (row.measured.test for row in rows.at(name, {"lr": lr}, SEEDS))
        return mean([test for test in found if test is not None])

    columns: Columns = {"Method": word, **{f"lr {lr:g}": partial(at, lr) for lr in RATES}}
    note = f"Test loss. {PLUS_MINUS}"
    return Table.of("language-small", "The same rate for all", columns, METHODS, note)


STUDY: Study[Losses] = dataclasses.replace(
    language_model.STUDY,
    name="language-model-small",
    prefix="",
    title="Language models, smaller",
    methods={
        name: dataclasses.replace(method, settings=({"lr": RATES[0]},))
        for name, method in METHODS.items()
    },
    seeds=SEEDS,
    tuning_seed=None,
    load=load,
    run=partial(language_model.run, settings=SETTINGS),
    more=more,
    seconds=20,
    about="A GPT of 2 blocks, 64 wide, trained for 600 steps.",
    tuning="none: all rates are run with all seeds",
    claims=(),
    figures=(),
    tables=lambda rows: (table(rows),),
)
