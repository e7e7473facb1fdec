"""Today's optimizers on the small GPT of `language_model`: which has the lowest loss?

Every method has the same budget: four learning rates, half a decade apart, with seed 0. The lowest
validation loss chooses, and the chosen rate is run with seeds 1 to 5. The claims and the rule that
judges them were written before the first run; prototypes of one seed had seen Muon ahead.

Muon, as is usual, moves the matrices inside the blocks; another optimizer moves the embeddings, the
head and the gains. Both have the same rate, as torch's `match_rms_adamw` intends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import mirrorhead as mh
from mirrorhead_lab.findings.table import Table, between, word
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, mean_band, panels
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.studies import language_model
from mirrorhead_lab.studies.claims import PLAIN_RULE, Claim, Comparison, Measure
from mirrorhead_lab.studies.language_model import GUESS, TEST, Losses, tests_of
from mirrorhead_lab.studies.study import Drawing, Method, Rows, Study, own_runs
from mirrorhead_lab.studies.tables import (
    PLUS_MINUS,
    Columns,
    in_words,
    over_seeds,
    seeds_column,
    tuning_table,
)
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings, Optimizers

SETTINGS = LanguageSettings()
#: Learning rates that are tried, half a decade apart: those of methods that step like Adam, and of
#: methods whose every entry moves by the whole rate.
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SIGN_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
#: Shares of zeros in the table.
SHOWN = (0.5, 0.7, 0.9)


def hidden_and_rest(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices inside the blocks, and all other parameters."""
    hidden, rest = [], []
    for name, param in model.named_parameters():
        (hidden if name.startswith("blocks.") and param.ndim == 2 else rest).append(param)
    return hidden, rest


def adamw(beta2: float) -> Optimizers:
    return lambda model, lr: [
        AdamW(model.parameters(), lr, (0.9, beta2), weight_decay=0, fused=True)
    ]


def mirror_adam(p: float, knee: float | None = 1.0) -> Optimizers:
    return lambda model, lr: [mh.MirrorAdam(model.parameters(), lr, p, knee=knee)]


def muon(rest: Callable[[list[Tensor], float], Any]) -> Optimizers:
    def make(model: nn.Module, lr: float) -> list[Any]:
        hidden, others = hidden_and_rest(model)
        how: Any = {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw"}
        return [Muon(hidden, lr, **how), rest(others, lr)]

    return make


def packaged(name: str, **options: Any) -> Optimizers:
    """Return an optimizer of the package pytorch_optimizer, which takes seconds to import."""

    def make(model: nn.Module, lr: float) -> list[Any]:
        import pytorch_optimizer

        return [getattr(pytorch_optimizer, name)(model.parameters(), lr, **options)]

    return make


def signum(model: nn.Module, lr: float) -> list[Any]:
    return [mh.SteepestDescent(model.parameters(), lr, float("inf"), momentum=0.9)]


def _method(rates: tuple[float, ...], how: Optimizers) -> Method:
    return Method(tuple({"lr": lr} for lr in rates), how)


METHODS = {
    "AdamW": _method(RATES, adamw(0.999)),
    "AdamW, beta2 .99": _method(RATES, adamw(0.99)),
    "AdamW, beta2 .95": _method(RATES, adamw(0.95)),
    "Muon, AdamW": _method(RATES, muon(partial(AdamW, weight_decay=0, fused=True))),
    "Muon, MirrorAdam p=1.25": _method(RATES, muon(partial(mh.MirrorAdam, geometry=1.25))),
    "SOAP": _method(RATES, packaged("SOAP", weight_decay=0.0)),
    "Lion": _method(SIGN_RATES, packaged("Lion")),
    "Signum": _method(SIGN_RATES, signum),
    "MirrorAdam p=1.25": _method(RATES, mirror_adam(1.25)),
    "MirrorAdam p=1.1": _method(RATES, mirror_adam(1.1)),
    "MirrorAdam p=1.1, knee 3": _method(RATES, mirror_adam(1.1, 3.0)),
    "MirrorAdam p=1.1, knee 10": _method(RATES, mirror_adam(1.1, 10.0)),
    "MirrorAdam p=1.1, no knee": _method(RATES, mirror_adam(1.1, None)),
}
MUON, NO_KNEE = "Muon, AdamW", "MirrorAdam p=1.1, no knee"
ADAMW = ("AdamW", "AdamW, beta2 .99", "AdamW, beta2 .95")


def load(task: str, data: Path | None, settings: LanguageSettings = SETTINGS) -> Corpus:
    if find_spec("pytorch_optimizer") is None:
        raise UserError("SOAP and Lion are of another package: pip install './lab[optimizers]'")
    return Corpus.of_imdb(settings, data)


def pruned_test(share: float) -> Measure:
    name = f"test loss with {100 * share:g} % pruned"
    return Measure(name, lambda run: run.pruned[share], higher=False)


def _lowest(measure: Measure, name: str, *primary: str) -> tuple[Comparison, ...]:
    """Claim that a method is below these; and below all others, which is secondary."""
    others = [*primary, *(one for one in METHODS if one != name and one not in primary)]
    return tuple(Comparison(measure, name, one, primary=one in primary) for one in others)


CLAIMS = (
    Claim(
        "optimizers-muon",
        "Is Muon the optimizer to beat?",
        "A small GPT whose matrices Muon trains has a lower test loss than one trained with AdamW,"
        " at any of three $\\beta_2$, or with MirrorAdam.",
        _lowest(TEST, MUON, *ADAMW, "MirrorAdam p=1.25", NO_KNEE),
    ),
    Claim(
        "optimizers-mirror-adam",
        "Is MirrorAdam below a well-tuned AdamW?",
        "MirrorAdam, $p = 1.25$, has a lower test loss than AdamW at any of three $\\beta_2$.",
        tuple(Comparison(TEST, "MirrorAdam p=1.25", one) for one in ADAMW),
    ),
    Claim(
        "optimizers-rest",
        "MirrorAdam beside Muon",
        "Where Muon trains the matrices, MirrorAdam, $p = 1.25$, on the rest has a lower test loss"
        " than AdamW on the rest.",
        (Comparison(TEST, "Muon, MirrorAdam p=1.25", MUON),),
    ),
    Claim(
        "optimizers-knee",
        "A knee between 1 and none",
        "At $p = 1.1$ a knee of 3 or 10 has a lower test loss than the default of 1.",
        tuple(
            Comparison(TEST, f"MirrorAdam p=1.1, knee {knee}", "MirrorAdam p=1.1")
            for knee in (3, 10)
        ),
    ),
    Claim(
        "optimizers-pruning",
        "Which optimizer leaves weights that can be pruned?",
        "With the smallest 70 % of every matrix set to 0, MirrorAdam, $p = 1.1$ without a knee, has"
        " a lower test loss than every other method.",
        _lowest(pruned_test(0.7), NO_KNEE, *ADAMW, MUON),
    ),
)


def _curves(
    axis: Any, rows: Rows[Losses], x: Callable[[Losses], np.ndarray], **labels: str
) -> None:
    for name, colour in zip(METHODS, [*COLOURS, *COLOURS], strict=False):
        if found := rows.final(name):
            curves = np.array([run.curve for run in found])
            mean_band(axis, x(found[0]), curves, label=name, color=colour)
    axis.set(ylabel="validation loss, nats per character", **labels)


def _figure(rows: Rows[Losses]) -> Figure:
    """Draw the validation loss against steps, and against processor time."""
    figure, (steps, seconds) = panels(2, height=4.6)

    def done(run: Losses) -> np.ndarray:
        return np.arange(1, len(run.curve) + 1) / len(run.curve)

    def spent(run: Losses) -> np.ndarray:
        return done(run) * (run.cpu_seconds or 0.0)

    _curves(steps, rows, done, xlabel="share of all steps")
    _curves(seconds, rows, spent, xlabel="seconds of one processor core")
    if steps.lines:
        legend_below(figure, steps, columns=3)
    return figure


def _tables(rows: Rows[Losses]) -> list[Table]:
    final = partial(over_seeds, rows)
    columns: Columns = {
        "Method": word,
        "Rate": lambda name: word(in_words(rows.chosen(name) or {})),
        "Test loss": final(lambda run: run.test, 4),
        "Lowest to highest": lambda name: between(tests_of(rows.final(name)), 4),
        **{f"{100 * s:g} % pruned": final(lambda run, s=s: run.pruned[s]) for s in SHOWN},
        "Core seconds": final(lambda run: run.cpu_seconds or 0.0, 0),
        "Seeds": seeds_column(rows),
    }
    begun = [name for name in rows.study.methods if rows.final(name)]
    results = Table.of(f"{rows.study.id}-results", "Results", columns, begun, PLUS_MINUS)
    return [results, tuning_table(rows)]


STUDY: Study[Losses] = dataclasses.replace(
    language_model.STUDY,
    name="optimizers",
    prefix="",
    title="Today's optimizers on a small GPT",
    methods=METHODS,
    load=load,
    run=partial(language_model.run, settings=SETTINGS, methods=METHODS),
    more=lambda rows: (),
    side=own_runs,
    about=(
        "The GPT of the study of language models (4 blocks, 128 wide), 2,000 steps with batches of"
        " 4 windows of 64 characters. Muon moves the matrices inside the blocks, and the optimizer"
        " after the comma the rest."
    ),
    tuning="",
    verdict_rule=f"{PLAIN_RULE} A run that diverged counts with the loss of a guess at random.",
    guess=GUESS,
    claims=CLAIMS,
    figures=(
        Drawing(
            "curves",
            "Validation loss at the chosen rates, against steps and against processor time: mean,"
            " and where the middle 80 % of the seeds are.",
            _figure,
        ),
    ),
    tables=_tables,
    docs=("evidence/language-model", "todays-optimizers"),
)
