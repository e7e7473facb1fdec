"""The study of language models in the report: what is claimed of MirrorAdam, figures and tables.

The claims and the rule are those of `mirrorhead.lab.evaluation.language_results`, written before
the first run. Losses are nats per character on test data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mirrorhead.lab.evaluation.language_results import (
    METHODS,
    RATES,
    SEEDS,
    SHARES,
    TABLE_SEEDS,
    TUNING_SEED,
    LanguageRun,
    Runs,
    chosen_rate,
)
from mirrorhead.lab.plots import COLOURS, Figure, legend_below, mean_band, panels
from mirrorhead.lab.report.figures import PartFigure
from mirrorhead.lab.report.findings import Finding, Part
from mirrorhead.lab.report.real_data.claims import Claim, Comparison, Measure, judge_comparisons
from mirrorhead.lab.report.table import NOTHING, Cell, Table, between, mean, number, word
from mirrorhead.lab.training.language_model import CHARACTERS

NAME = "language"
COMMAND = "python benchmarks/language_model.py run"
#: By how much a loss may exceed AdamW's at the same rate, in nats per character.
MARGIN = 0.02
RULE = (
    "Each comparison is between means over seeds: seeds 1 to 5 at the chosen rates, seeds 0 to 2 at"
    " given rates. It is as claimed if Welch's 95 % interval of the difference lies entirely on the"
    " claimed side. A claim holds if all its comparisons are as claimed, and holds with a remark if"
    " every primary one is but a secondary one is not. Otherwise it does not hold. A run that"
    " diverged counts with the loss of a guess at random."
)
#: The loss of a run that diverged: all characters are equally likely.
GUESS = math.log(len(CHARACTERS))
#: Between a method and a rate, in the name of a side of a comparison.
AT = " at "
PLUS_MINUS = "Mean over seeds ± their standard deviation."


def part(runs: Runs) -> Part:
    """Judge, draw and tabulate the study."""
    first = next(iter(runs.values()))
    about = (
        f"{len(METHODS)} methods train the same GPT (4 blocks, 128 wide, context of 64 characters)"
        f" on the characters of IMDb's training reviews for {first.steps:,} steps,"
        f" {first.characters:,} characters. The validation set is training reviews that were kept"
        f" out, the test set reviews of other films. {len(runs)} runs."
    )
    tuning = (
        f"{len(RATES)} learning rates for each method, each run once with seed {TUNING_SEED}; the"
        " lowest validation loss chooses; the chosen rate is run with seeds"
        f" {SEEDS[0]} to {SEEDS[-1]}, and only these are compared"
    )
    findings = tuple(judge(runs, claim) for claim in CLAIMS)
    tables = (_results(runs), _rates(runs), _pruned(runs))
    title = "Language models: is MirrorAdam a better AdamW?"
    figures = tuple(PartFigure(name, text, partial(draw, runs)) for name, text, draw in DRAWINGS)
    return Part(NAME, title, about, tuning, RULE, COMMAND, findings, figures, tables)


def judge(runs: Runs, claim: Claim) -> Finding:
    """Judge a claim; one that lacks runs is not finished."""
    finding = Finding(
        name=claim.name, title=claim.title, claim=claim.text, command=COMMAND,
        docs=("language-models", "results"),
        about=f"{len(SEEDS)} seeds for each method at its chosen rate. To make the runs:",
    )  # fmt: skip
    sides = dict.fromkeys(side for c in claim.comparisons for side in (c.one, c.two))
    gone = [
        f"{side}, seed {run.seed}" for side in sides for run in _runs(runs, side) if run.diverged
    ]
    counted = f" Diverged, and counted as {GUESS:.2f}: {'; '.join(gone)}." if gone else ""
    return judge_comparisons(finding, claim, partial(_values, runs), counted)


def _values(runs: Runs, side: str, measure: Measure) -> list[float]:
    """Return a number of each run of a side; a ValueError says what is missing."""
    method, lr, seeds = _asked(runs, side)
    if lr is None:
        raise ValueError(f"the tuning of {method} is not finished, or all its rates diverged")
    found = _runs(runs, side)
    if left := sorted({*seeds} - {run.seed for run in found}):
        raise ValueError(f"{method} at {lr:g} has no run of seeds {left}")
    of: Any = measure.of
    return [GUESS if run.diverged else of(run) for run in found]


def _runs(runs: Runs, side: str) -> list[LanguageRun]:
    """Return the runs of a side that are there: a method at its chosen rate, or "at" another."""
    method, lr, seeds = _asked(runs, side)
    return [runs[key] for seed in seeds if lr and (key := (method, lr, seed)) in runs]


def _asked(runs: Runs, side: str) -> tuple[str, float | None, tuple[int, ...]]:
    method, _, rate = side.partition(AT)
    if rate:
        return method, float(rate), (TUNING_SEED, *TABLE_SEEDS)
    return method, chosen_rate(runs, method), SEEDS


def final_runs(runs: Runs, name: str) -> list[LanguageRun]:
    """Return the runs at the chosen rate that are compared, without those that diverged."""
    lr = chosen_rate(runs, name)
    found = [runs.get((name, lr, seed)) for seed in SEEDS] if lr else []
    return [run for run in found if run and not run.diverged]


def draw_curves(runs: Runs) -> Figure:
    """Validation loss against steps."""
    figure, (axis,) = panels(1, height=4.2)
    for name, colour in _colours():
        if found := final_runs(runs, name):
            count = len(found[0].curve)
            steps = found[0].steps // count * np.arange(1, count + 1)
            curves = np.array([run.curve for run in found])
            mean_band(axis, steps, curves, label=name, color=colour)
    axis.set(xlabel="steps", ylabel="validation loss, nats per character")
    if axis.lines:
        legend_below(figure, axis, columns=3)
    return figure


def draw_rates(runs: Runs) -> Figure:
    """Test loss against the learning rate."""
    figure, (axis,) = panels(1, height=4.2)
    for name, colour in _colours():
        rates = [lr for lr in sorted(RATES) if _at(runs, name, lr)]
        middle = [float(np.mean(_at(runs, name, lr))) for lr in rates]
        if rates:
            axis.plot(rates, middle, "o-", label=name, color=colour)
    axis.set(xlabel="learning rate", ylabel="test loss, nats per character", xscale="log")
    legend_below(figure, axis, columns=3)
    return figure


def draw_pruned(runs: Runs) -> Figure:
    """Test loss against the share of weights that are set to 0."""
    figure, (axis,) = panels(1, height=4.2)
    shares = (0.0, *SHARES)
    for name, colour in _colours():
        if found := final_runs(runs, name):
            losses = np.array([[run.test, *(run.pruned[s] for s in SHARES)] for run in found])
            mean_band(axis, shares, losses.astype(float), label=name, color=colour, marker="o")
    axis.set(xlabel="share of each matrix set to 0", ylabel="test loss, nats per character")
    if axis.lines:
        legend_below(figure, axis, columns=3)
    return figure


DRAWINGS: tuple[tuple[str, str, Callable[[Runs], Figure]], ...] = (
    (
        f"{NAME}-curves-figure",
        "Validation loss at the chosen rates: mean, and where the middle 80 % of the seeds are.",
        draw_curves,
    ),
    (
        f"{NAME}-rates-figure",
        "Test loss against the learning rate: mean over the seeds that were run.",
        draw_rates,
    ),
    (
        f"{NAME}-pruned-figure",
        "Test loss against the share of weights set to 0: mean, and where the middle 80 % are.",
        draw_pruned,
    ),
)


def _colours() -> list[tuple[str, str]]:
    return list(zip(METHODS, COLOURS, strict=True))


def _at(runs: Runs, name: str, lr: float) -> list[float]:
    """Return the test losses of all runs at a rate."""
    found = [runs.get((name, lr, seed)) for seed in (TUNING_SEED, *SEEDS)]
    return [run.test for run in found if run and run.test is not None]


def _results(runs: Runs) -> Table:
    rows = []
    for name in METHODS:
        found, lr = final_runs(runs, name), chosen_rate(runs, name)
        test = [run.test for run in found if run.test is not None]
        weights = [run.weights for run in found if run.weights is not None]
        rows.append(
            (
                word(name),
                Cell(f"{lr:g}{_edge(lr)}", lr) if lr else NOTHING,
                mean(test, 4),
                between(test, 4),
                mean([run.validation for run in found if run.validation is not None], 4),
                mean([w.largest for w in weights]),
                mean([100 * w.small for w in weights], 1),
                number(len(found), 0),
            )
        )
    columns = (
        "Method", "lr", "Test loss", "Lowest to highest", "Validation loss", "Largest weight",
        "Weights below 1 % of the largest, %", "Seeds",
    )  # fmt: skip
    note = (
        f"{PLUS_MINUS} The last column but one is the mean over matrices. ** The rate is the"
        " smallest or largest of those tried, so that a rate beyond might be better."
    )
    return Table(f"{NAME}-results", "Results at the chosen rates", columns, tuple(rows), note)


def _edge(lr: float) -> str:
    return " **" if lr in (min(RATES), max(RATES)) else ""


def _rates(runs: Runs) -> Table:
    rates = sorted(RATES)
    rows = []
    for name in METHODS:
        cells = [_rate_cell(runs, name, lr) for lr in rates]
        rows.append((word(name), *cells))
    note = (
        f"Test loss at each learning rate. {PLUS_MINUS} A single number is one seed. In brackets:"
        " how many seeds diverged, which the mean leaves out."
    )
    columns = ("Method", *(f"lr {lr:g}" for lr in rates))
    return Table(f"{NAME}-rates", "The same learning rate for all", columns, tuple(rows), note)


def _rate_cell(runs: Runs, name: str, lr: float) -> Cell:
    cell = mean(_at(runs, name, lr), 3)
    tried = [runs.get((name, lr, seed)) for seed in (TUNING_SEED, *SEEDS)]
    gone = sum(run is not None and run.diverged for run in tried)
    return replace(cell, text=f"{cell.text} ({gone} diverged)") if gone else cell


def _pruned(runs: Runs) -> Table:
    rows = []
    for name in METHODS:
        found = final_runs(runs, name)
        test = [run.test for run in found if run.test is not None]
        cells = [mean([run.pruned[share] for run in found], 3) for share in SHARES]
        rows.append((word(name), mean(test, 3), *cells))
    columns = ("Method", "Whole", *(f"{100 * share:g} % pruned" for share in SHARES))
    note = "Test loss when the smallest weights of every matrix are set to 0, without retraining."
    return Table(f"{NAME}-pruned", "Pruning", columns, tuple(rows), f"{note} {PLUS_MINUS}")


TEST = Measure("test loss", lambda run: run.test, digits=4, higher=False)  # pyright: ignore[reportAttributeAccessIssue]


def _after(share: float) -> Measure:
    name = f"test loss with {100 * share:g} % pruned"
    return Measure(name, lambda run: run.pruned[share], digits=3, higher=False)  # pyright: ignore[reportAttributeAccessIssue]


def _mirror(p: float) -> str:
    return f"MirrorAdam p={p:g}"


def _keeps_rate(p: float) -> Claim:
    return Claim(
        f"{NAME}-rate-{f'{p:g}'.replace('.', '-')}",
        NAME,
        f"Keep your learning rate: p = {p:g}",
        f"With MirrorAdam, $p = {p:g}$, the test loss is less than {MARGIN:g} above AdamW's at each"
        " of four learning rates that are given to both.",
        tuple(
            Comparison(TEST, f"{_mirror(p)}{AT}{lr:g}", f"AdamW{AT}{lr:g}", margin=MARGIN)
            for lr in sorted(RATES)
        ),
    )


CLAIMS = (
    Claim(
        f"{NAME}-better",
        NAME,
        "Is MirrorAdam p = 1.5 a better AdamW?",
        "A small GPT trained with MirrorAdam, $p = 1.5$, has a lower test loss than one trained"
        " with AdamW, without and with weight decay. (Not in the paper.)",
        (
            Comparison(TEST, _mirror(1.5), "AdamW"),
            Comparison(TEST, _mirror(1.5), "AdamW, decay 0.1"),
            Comparison(TEST, _mirror(1.25), "AdamW", primary=False),
            Comparison(TEST, _mirror(1.75), "AdamW", primary=False),
        ),
    ),
    *(_keeps_rate(p) for p in (1.1, 1.25, 1.5, 1.75)),
    Claim(
        f"{NAME}-pruning",
        NAME,
        "Language models that can be pruned",
        "A small GPT trained with MirrorAdam, $p = 1.1$, has a lower test loss than one trained"
        " with AdamW when the smallest 50 % and 80 % of every weight matrix are set to 0, without"
        " retraining.",
        tuple(
            Comparison(_after(share), _mirror(1.1), "AdamW", primary=share in (0.5, 0.8))
            for share in (0.5, 0.8, 0.6, 0.7, 0.9)
        ),
    ),
)
