"""Language models with three times as many steps as in `language_model`: does the order stay?

AdamW at the best rate of all that it was given, and two exponents at theirs. Nothing is claimed.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from mirrorhead_lab.findings.table import Table, word
from mirrorhead_lab.studies import language_model
from mirrorhead_lab.studies.language_model import Losses
from mirrorhead_lab.studies.study import Method, Rows, Study
from mirrorhead_lab.studies.tables import PLUS_MINUS, Columns, in_words, over_seeds, seeds_column
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings

SETTINGS = LanguageSettings(steps=6_000)
RATES = {"AdamW": 1.7e-3, "MirrorAdam p=1.25": 3e-3, "MirrorAdam p=1.1, no knee": 1e-3}


def load(task: str, data: Path | None) -> Corpus:
    return Corpus.of_imdb(SETTINGS, data)


def table(rows: Rows[Losses]) -> Table:
    final = partial(over_seeds, rows)
    columns: Columns = {
        "Method": word,
        "Rate": lambda name: word(in_words({"lr": RATES[name]})),
        "Test loss": final(lambda run: run.test, 4),
        "70 % pruned": final(lambda run: run.pruned[0.7], 2),
        "Seeds": seeds_column(rows),
    }
    return Table.of("language-longer", f"{SETTINGS.steps:,} steps", columns, RATES, PLUS_MINUS)


STUDY: Study[Losses] = dataclasses.replace(
    language_model.STUDY,
    name="language-model-longer",
    prefix="",
    title="Language models, three times as many steps",
    methods={
        name: Method(({"lr": lr},), language_model.METHODS[name].how) for name, lr in RATES.items()
    },
    seeds=(1, 2),
    load=load,
    run=partial(language_model.run, settings=SETTINGS),
    more=lambda rows: (),
    seconds=270,
    about="The GPT of the study of language models, trained for 6,000 steps.",
    tuning="the rates are those that the study of language models chose",
    claims=(),
    figures=(),
    tables=lambda rows: (table(rows),),
)
