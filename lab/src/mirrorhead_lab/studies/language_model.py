"""Language models: is MirrorAdam a better AdamW?

A small GPT learns the characters of IMDb's reviews. Each method is tuned by the same rule: four
learning rates with seed 0; the lowest validation loss chooses. The chosen rate is run with seeds 1
to 5, and only these are compared. Then every rate is scored with seeds 0 to 2, for the table by
rate; with seed 0 these are the models of tuning. After the study AdamW alone was given two more
rates, in case its best one lies between or below those that all were given. They do not take part
in tuning, but can qualify a verdict.

The claims and the rule that judges them were written before the first run. Losses are nats per
character.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta, Struct

from mirrorhead._files import write_atomically
from mirrorhead_lab.evaluation.sparsity import pruned
from mirrorhead_lab.findings.statistics import welch
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, between, mean, number, word
from mirrorhead_lab.models.gpt import GPT
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, mean_band, panels
from mirrorhead_lab.studies.claims import Claim, Comparison, Measure, compare
from mirrorhead_lab.studies.study import Drawing, Method, Row, Rows, Study, Trial, own_runs
from mirrorhead_lab.studies.tables import (
    PLUS_MINUS,
    Columns,
    draw_pruning,
    over_seeds,
    seeds_column,
)
from mirrorhead_lab.training import language_model as training
from mirrorhead_lab.training.language_model import CHARACTERS, Corpus, LanguageSettings, loss_of

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TUNING_SEED = 0
SEEDS = (1, 2, 3, 4, 5)
#: Of the table by rate.
TABLE_SEEDS = (0, 1, 2)
#: What AdamW alone was given later.
LATER = tuple((name, lr) for lr in (1.7e-3, 3e-4) for name in ("AdamW", "AdamW, decay 0.1"))
#: Shares of each weight matrix that are set to 0.
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
#: The loss of a run that diverged: all characters are equally likely.
GUESS = math.log(len(CHARACTERS))
#: By how much a loss may exceed AdamW's at the same rate, in nats per character.
MARGIN = 0.02
SETTINGS = LanguageSettings()

METHODS = {
    name: Method(tuple({"lr": lr} for lr in RATES), how)
    for name, how in {
        "AdamW": training.Method(),
        "AdamW, decay 0.1": training.Method(weight_decay=0.1),
        "MirrorAdam p=1.5": training.Method(p=1.5),
        "MirrorAdam p=1.25": training.Method(p=1.25),
        "MirrorAdam p=1.75": training.Method(p=1.75),
        "MirrorAdam p=1.1": training.Method(p=1.1),
        "MirrorAdam p=1.1, no knee": training.Method(p=1.1, knee=None),
    }.items()
}

Loss = Annotated[float, Meta(ge=0)]


class WeightSizes(Struct, frozen=True):
    """Sizes of the weights of all matrices.

    small: the mean over matrices of the share below 1 % of the matrix's largest weight.
    """

    largest: Annotated[float, Meta(ge=0)]
    rms: Annotated[float, Meta(ge=0)]
    small: Annotated[float, Meta(ge=0, le=1)]


class Losses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run measures; one that diverged has nothing, one of tuning no test loss.

    curve: validation loss every `record_every` steps; pruned: test loss by share of zeros.
    """

    curve: tuple[Loss, ...] = ()
    validation: Loss | None = None
    test: Loss | None = None
    pruned: dict[float, Loss] = {}
    weights: WeightSizes | None = None
    cpu_seconds: Annotated[float, Meta(ge=0)] | None = None  # of training, validation included

    def __post_init__(self) -> None:
        scored = self.test is not None
        if {self.weights is not None, set(self.pruned) == set(SHARES)} != {scored}:
            raise ValueError("a run has either all test scores or none")


def load(task: str, data: Path | None) -> Corpus:
    return Corpus.of_imdb(SETTINGS, data)


def run(
    trial: Trial,
    corpus: Corpus,
    folder: Path,
    settings: LanguageSettings = SETTINGS,
    methods: Mapping[str, Method] = METHODS,
) -> Losses:
    """Train one model and measure it; the final runs of the tuning seed take tuning's model."""
    model, curve, spent = _trained(trial, corpus, folder, settings, methods[trial.method].how)
    validation = loss_of(model, corpus.validation)
    whole = len(curve) == settings.steps // settings.record_every
    if not whole or not math.isfinite(validation):
        return Losses()
    if not trial.final:
        return Losses(curve=curve, validation=validation)
    test = loss_of(model, corpus.test)
    if not math.isfinite(test):
        return Losses()
    matrices = [p.detach().double().abs() for p in model.parameters() if p.ndim >= 2]
    every = torch.cat([m.flatten() for m in matrices])
    return Losses(
        curve=curve,
        validation=validation,
        test=test,
        pruned={share: loss_of(pruned(model, share), corpus.test) for share in SHARES},
        weights=WeightSizes(
            float(every.max()),
            float(every.square().mean().sqrt()),
            fmean(float((m < 0.01 * m.max()).double().mean()) for m in matrices),
        ),
        cpu_seconds=spent,
    )


def _trained(
    trial: Trial,
    corpus: Corpus,
    folder: Path,
    settings: LanguageSettings,
    how: training.Optimizers,
) -> tuple[GPT, tuple[float, ...], float | None]:
    """Return the model, its curve and the processor time: as tuning kept them, or trained now."""
    kept = folder / "model.pt"
    if trial.final and kept.exists():
        state = torch.load(kept, weights_only=True)
        model = GPT(settings.model)
        model.load_state_dict(state["model"])
        return model, tuple(state["curve"]), None
    before = time.process_time()
    found = training.train(corpus, settings, how, trial.setting["lr"], trial.seed)
    spent = round(time.process_time() - before, 1)
    if not trial.final:
        buffer = io.BytesIO()
        torch.save({"model": found.model.state_dict(), "curve": list(found.curve)}, buffer)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, buffer.getvalue())
    return found.model, found.curve, spent


def more(rows: Rows[Losses]) -> Iterator[Trial]:
    """Yield the runs of the table by rate, and AdamW at the rates that it was given later."""
    for lr in RATES:
        for seed in TABLE_SEEDS:
            for name in METHODS:
                yield Trial(method=name, setting={"lr": lr}, seed=seed, final=True)
    for name, lr in LATER:
        for seed in SEEDS:
            yield Trial(method=name, setting={"lr": lr}, seed=seed, final=True)


def score(measured: Losses) -> float | None:
    return None if measured.validation is None else -measured.validation


#: Between a method and a rate, in the name of a side of a comparison.
AT = " at "


def side(rows: Rows[Losses], name: str) -> list[Row[Losses]]:
    """Return the runs of a method at its chosen rate, or "at" another."""
    method, _, rate = name.partition(AT)
    if rate:
        return rows.complete(method, {"lr": float(rate)}, TABLE_SEEDS)
    return own_runs(rows, method)


def about(rows: Rows[Losses]) -> str:
    begun = {row.trial.method for row in rows}
    characters = SETTINGS.steps * SETTINGS.batch_size * SETTINGS.model.length
    return (
        f"{len(begun)} methods train the same GPT (4 blocks, 128 wide, context of 64"
        f" characters) on the characters of IMDb's training reviews for {SETTINGS.steps:,} steps,"
        f" {characters:,} characters. The validation set is training reviews that were kept"
        f" out, the test set reviews of other films. {rows.trainings()} runs."
    )


def later_rates(rows: Rows[Losses]) -> str:
    """Say if AdamW, at the best rate that it alone was given later, is level or better."""
    ours = tests_of(rows.final(_mirror(1.5)))
    later = {one: _at(rows, *one, SEEDS) for one in LATER}
    if not ours or any(len(losses) < len(SEEDS) for losses in later.values()):
        return ""
    name, lr = min(later, key=lambda one: fmean(later[one]))
    other = f"{name}{AT}{lr:g}"
    found = compare(Comparison(TEST, _mirror(1.5), other), ours, later[name, lr])
    if found.outcome == "as claimed":
        return ""
    return (
        "Later AdamW alone was given rates between and below those of the study."
        f" {_mirror(1.5)} minus {other}: {found}."
    )


def tests_of(found: list[Losses]) -> list[float]:
    return [run.test for run in found if run.test is not None]


def _at(rows: Rows[Losses], name: str, lr: float, seeds: tuple[int, ...]) -> list[float]:
    """Return the test losses at a rate, without runs that diverged."""
    return tests_of([row.measured for row in rows.at(name, {"lr": lr}, seeds)])


def _begun(rows: Rows[Losses]) -> list[str]:
    return [name for name in METHODS if any(row.trial.method == name for row in rows)]


def _drawn(plot: Callable[..., None], xlabel: str, ylabel: str, rows: Rows[Losses]) -> Figure:
    """Draw a line for each method."""
    figure, (axis,) = panels(1, height=4.2)
    for name, colour in zip(METHODS, COLOURS, strict=True):
        plot(axis, rows, name, label=name, color=colour)
    axis.set(xlabel=xlabel, ylabel=f"{ylabel} loss, nats per character")
    if axis.lines:
        legend_below(figure, axis, columns=3)
    return figure


def _plot_curve(axis: Any, rows: Rows[Losses], name: str, **line: Any) -> None:
    if found := rows.final(name):
        steps = SETTINGS.record_every * np.arange(1, len(found[0].curve) + 1)
        mean_band(axis, steps, np.array([run.curve for run in found]), **line)


def _plot_rates(axis: Any, rows: Rows[Losses], name: str, **line: Any) -> None:
    axis.set(xscale="log")
    losses = {lr: found for lr in RATES if (found := _at(rows, name, lr, (0, *SEEDS)))}
    if losses:
        axis.plot(list(losses), [fmean(some) for some in losses.values()], "o-", **line)


def _results(rows: Rows[Losses]) -> Table:
    def rate(name: str) -> Cell:
        lr = (rows.chosen(name) or {}).get("lr")
        edge = " **" if lr in (min(RATES), max(RATES)) else ""
        return Cell(f"{lr:g}{edge}", lr) if lr else NOTHING

    final = partial(over_seeds, rows)
    columns: Columns = {
        "Method": word,
        "lr": rate,
        "Test loss": final(lambda run: run.test, 4),
        "Lowest to highest": lambda name: between(tests_of(rows.final(name)), 4),
        "Validation loss": final(lambda run: run.validation, 4),
        "Largest weight": final(lambda run: run.weights.largest),
        "Weights below 1 % of the largest, %": final(lambda run: 100 * run.weights.small, 1),
        "Seeds": seeds_column(rows),
    }
    note = (
        f"{PLUS_MINUS} The last column but one is the mean over matrices. ** The rate is the"
        " smallest or largest of those tried, so that a rate beyond might be better."
    )
    title = "Results at the chosen rates"
    return Table.of("language-results", title, columns, _begun(rows), note)


def _rates(rows: Rows[Losses]) -> Table:
    def at(lr: float, name: str) -> Cell:
        gone = sum(map(rows.diverged, rows.at(name, {"lr": lr}, (0, *SEEDS))))
        cell = mean(_at(rows, name, lr, (0, *SEEDS)), 3)
        return replace(cell, text=f"{cell.text} ({gone} diverged)") if gone else cell

    columns: Columns = {"Method": word, **{f"lr {lr:g}": partial(at, lr) for lr in RATES}}
    note = (
        f"Test loss at each learning rate. {PLUS_MINUS} A single number is one seed. In brackets:"
        " how many seeds diverged, which the mean leaves out."
    )
    title = "The same learning rate for all"
    return Table.of("language-rates", title, columns, _begun(rows), note)


def _later(rows: Rows[Losses]) -> Table:
    """Compare every p at its chosen rate with AdamW at rates that it alone was given."""

    def ahead(p: float, one: tuple[str, float]) -> Cell:
        ours, theirs = tests_of(rows.final(_mirror(p))), _at(rows, *one, SEEDS)
        if min(len(ours), len(theirs)) < 2:
            return NOTHING
        found = welch(ours, theirs)
        return Cell(" to ".join(TEST.signed(found.low, found.high)), found.value)

    columns: dict[str, Callable[[tuple[str, float]], Cell]] = {
        "Method": lambda one: word(one[0]),
        "lr": lambda one: number(one[1], 4),
        "Test loss": lambda one: mean(_at(rows, *one, SEEDS), 4),
        **{f"p = {p:g}": partial(ahead, p) for p in (1.1, 1.25, 1.5, 1.75)},
    }
    found = [one for one in LATER if _at(rows, *one, SEEDS)]
    note = (
        f"{PLUS_MINUS} Rates that AdamW alone was given, after the study. The last columns:"
        " MirrorAdam's test loss at its chosen rate minus this one, as 95 % intervals; below 0,"
        " MirrorAdam is better."
    )
    return Table.of("language-later", "AdamW at rates of its own", columns, found, note)


def _pruned(rows: Rows[Losses]) -> Table:
    final = partial(over_seeds, rows)
    columns: Columns = {"Method": word, "Whole": final(lambda run: run.test)}
    for share in SHARES:
        columns[f"{100 * share:g} % pruned"] = final(lambda run, s=share: run.pruned[s])
    note = "Test loss when the smallest weights of every matrix are set to 0, without retraining."
    return Table.of("language-pruned", "Pruning", columns, _begun(rows), f"{note} {PLUS_MINUS}")


TEST = Measure("test loss", lambda run: run.test, digits=4, higher=False)


def _after(share: float) -> Measure:
    name = f"test loss with {100 * share:g} % pruned"
    return Measure(name, lambda run: run.pruned[share], higher=False)


def _mirror(p: float) -> str:
    return f"MirrorAdam p={p:g}"


def _keeps_rate(p: float) -> Claim:
    return Claim(
        f"language-rate-{f'{p:g}'.replace('.', '-')}",
        f"Keep your learning rate: p = {p:g}",
        f"With MirrorAdam, $p = {p:g}$, the test loss is less than {MARGIN:g} above AdamW's at each"
        " of four learning rates that are given to both.",
        tuple(
            Comparison(TEST, f"{_mirror(p)}{AT}{lr:g}", f"AdamW{AT}{lr:g}", margin=MARGIN)
            for lr in RATES
        ),
    )


STUDY = Study(
    name="language-model",
    prefix="language",
    title="Language models: is MirrorAdam a better AdamW?",
    methods=METHODS,
    seeds=SEEDS,
    tuning_seed=TUNING_SEED,
    measured=Losses,
    load=load,
    run=run,
    score=score,
    more=more,
    seconds=90,
    about=about,
    tuning=(
        f"{len(RATES)} learning rates for each method, each run once with seed {TUNING_SEED};"
        " the lowest validation loss chooses; the chosen rate is run with seeds"
        f" {SEEDS[0]} to {SEEDS[-1]}, and only these are compared"
    ),
    verdict_rule=(
        "Each comparison is between means over seeds: seeds 1 to 5 at the chosen rates, seeds 0 to"
        " 2 at given rates. It is as claimed if Welch's 95 % interval of the difference lies"
        " entirely on the claimed side. A claim holds if all its comparisons are as claimed, and"
        " holds with a remark if every primary one is but a secondary one is not. It does not hold"
        " if a primary one is the other way with its whole interval, and is otherwise not decided."
        " A run that diverged counts with the loss of a guess at random."
    ),
    side=side,
    guess=GUESS,
    figures=(
        Drawing(
            "curves",
            "Validation loss at the chosen rates: mean, and where the middle 80 % of the seeds"
            " are.",
            partial(_drawn, _plot_curve, "steps", "validation"),
        ),
        Drawing(
            "rates",
            "Test loss against the learning rate: mean over the seeds that were run.",
            partial(_drawn, _plot_rates, "learning rate", "test"),
        ),
        Drawing(
            "pruned",
            "Test loss against the share of weights set to 0: mean, and where the middle 80 % are.",
            partial(
                draw_pruning,
                shares=SHARES,
                scale=1,
                height=4.2,
                xlabel="share of each matrix set to 0",
                ylabel="test loss, nats per character",
            ),
        ),
    ),
    tables=lambda rows: (_results(rows), _rates(rows), _later(rows), _pruned(rows)),
    docs=("evidence/language-model", "results"),
    claims=(
        Claim(
            "language-better",
            "Is MirrorAdam p = 1.5 a better AdamW?",
            "A small GPT trained with MirrorAdam, $p = 1.5$, has a lower test loss than one trained"
            " with AdamW, without and with weight decay. (Not in the paper.)",
            (
                Comparison(TEST, _mirror(1.5), "AdamW"),
                Comparison(TEST, _mirror(1.5), "AdamW, decay 0.1"),
                Comparison(TEST, _mirror(1.25), "AdamW", primary=False),
                Comparison(TEST, _mirror(1.75), "AdamW", primary=False),
            ),
            remark=later_rates,
        ),
        *(_keeps_rate(p) for p in (1.1, 1.25, 1.5, 1.75)),
        Claim(
            "language-pruning",
            "Language models that can be pruned",
            "A small GPT trained with MirrorAdam, $p = 1.1$, has a lower test loss than one trained"
            " with AdamW when the smallest 50 % and 80 % of every weight matrix are set to 0,"
            " without retraining.",
            tuple(
                Comparison(_after(share), _mirror(1.1), "AdamW", primary=share in (0.5, 0.8))
                for share in (0.5, 0.8, 0.6, 0.7, 0.9)
            ),
        ),
    ),
)
