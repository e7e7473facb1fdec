"""The study of language models in the report: what is claimed of MirrorAdam, figures and tables.

The claims and the rule were written before the first run. Losses are nats per character.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from mirrorhead_lab.evaluation import language_results as study
from mirrorhead_lab.evaluation.language_results import METHODS, RATES, SEEDS, LanguageRun, Runs
from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.findings.finding import Finding, Part
from mirrorhead_lab.findings.statistics import welch
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, between, mean, number, word
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, mean_band, panels
from mirrorhead_lab.report.real_data.claims import (
    Claim,
    Comparison,
    Measure,
    compare,
    judge_comparisons,
    with_remark,
)
from mirrorhead_lab.training.language_model import CHARACTERS

NAME = "language"
COMMAND = "mirrorhead study language-model"
#: By how much a loss may exceed AdamW's at the same rate, in nats per character.
MARGIN = 0.02
RULE = (
    "Each comparison is between means over seeds: seeds 1 to 5 at the chosen rates, seeds 0 to 2 at"
    " given rates. It is as claimed if Welch's 95 % interval of the difference lies entirely on the"
    " claimed side. A claim holds if all its comparisons are as claimed, and holds with a remark if"
    " every primary one is but a secondary one is not. It does not hold if a primary one is the"
    " other way with its whole interval, and is otherwise not decided. A run that diverged counts"
    " with the loss of a guess at random."
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
        f"{len(_begun(runs))} methods train the same GPT (4 blocks, 128 wide, context of 64"
        f" characters) on the characters of IMDb's training reviews for {first.steps:,} steps,"
        f" {first.characters:,} characters. The validation set is training reviews that were kept"
        f" out, the test set reviews of other films. {len(runs)} runs."
    )
    tuning = (
        f"{len(RATES)} learning rates for each method, each run once with seed {study.TUNING_SEED};"
        " the lowest validation loss chooses; the chosen rate is run with seeds"
        f" {SEEDS[0]} to {SEEDS[-1]}, and only these are compared"
    )
    findings = tuple(judge(runs, claim) for claim in CLAIMS)
    tables = (_results(runs), _rates(runs), _later(runs), _pruned(runs))
    tables = tuple(table for table in tables if table.rows)
    title = "Language models: is MirrorAdam a better AdamW?"
    figures = tuple(
        PartFigure(f"{NAME}-{name}-figure", caption, partial(draw, runs))
        for name, caption, draw in DRAWINGS
    )
    group = "Beyond the paper"
    return Part(NAME, title, about, tuning, RULE, COMMAND, findings, figures, tables, group)


def judge(runs: Runs, claim: Claim) -> Finding:
    """Judge a claim; one that lacks runs is not finished."""
    gone = [
        f"{side}, seed {run.seed}"
        for side in claim.sides
        for run in _found(runs, *_asked(runs, side))
        if run.diverged
    ]
    found = judge_comparisons(
        claim,
        partial(_values, runs),
        command=COMMAND,
        docs=("evidence/language-model", "results"),
        about=f"{len(SEEDS)} seeds for each method at its chosen rate. To make the runs:",
        left_out=f" Diverged, and counted as {GUESS:.2f}: {'; '.join(gone)}." if gone else "",
    )
    remark = _remark_on_later_rates(runs) if claim is BETTER else ""
    if found.verdict is None or not remark:
        return found
    return replace(found, verdict=with_remark(found.verdict, remark))


def _remark_on_later_rates(runs: Runs) -> str:
    """Say if AdamW, at the best rate that it alone was given later, is level or better."""
    ours = _losses(_final(runs, _mirror(1.5)))
    later = {one: _losses(_found(runs, *one, SEEDS)) for one in study.LATER}
    if not ours or any(len(losses) < len(SEEDS) for losses in later.values()):
        return ""
    name, lr = min(later, key=lambda one: fmean(later[one]))
    side = f"{name}{AT}{lr:g}"
    found = compare(Comparison(TEST, _mirror(1.5), side), ours, later[name, lr])
    if found.outcome == "as claimed":
        return ""
    return (
        "Later AdamW alone was given rates between and below those of the study."
        f" {_mirror(1.5)} minus {side}: {found}."
    )


def _values(runs: Runs, side: str, measure: Measure) -> list[float]:
    """Return a number of each run of a side; a ValueError says what is missing."""
    method, lr, seeds = _asked(runs, side)
    if lr is None:
        raise ValueError(f"the tuning of {method} is not finished, or all its rates diverged")
    found = _found(runs, method, lr, seeds)
    if left := sorted({*seeds} - {run.seed for run in found}):
        raise ValueError(f"{method} at {lr:g} has no run of seeds {left}")
    of: Callable[[LanguageRun], Any] = measure.of
    return [GUESS if run.diverged else of(run) for run in found]


def _asked(runs: Runs, side: str) -> tuple[str, float | None, tuple[int, ...]]:
    """Return method, rate and seeds of a side: a method at its chosen rate, or "at" another."""
    method, _, rate = side.partition(AT)
    if rate:
        return method, float(rate), (study.TUNING_SEED, *study.TABLE_SEEDS)
    return method, study.chosen_rate(runs, method), SEEDS


def _found(runs: Runs, name: str, lr: float | None, seeds: Sequence[int]) -> list[LanguageRun]:
    """Return those of the runs that are there."""
    return [runs[key] for seed in seeds if lr and (key := (name, lr, seed)) in runs]


def _final(runs: Runs, name: str) -> list[Any]:
    """Return the runs at the chosen rate that are compared, without those that diverged."""
    found = _found(runs, name, study.chosen_rate(runs, name), SEEDS)
    return [run for run in found if not run.diverged]


def _begun(runs: Runs) -> list[str]:
    """Return the methods that have runs."""
    return [name for name in METHODS if any(run.method == name for run in runs.values())]


def _at(runs: Runs, name: str, lr: float) -> list[LanguageRun]:
    return _found(runs, name, lr, (study.TUNING_SEED, *SEEDS))


def _losses(found: Sequence[LanguageRun]) -> list[float]:
    return [run.test for run in found if run.test is not None]


def _drawn(plot: Callable[..., None], xlabel: str, ylabel: str, runs: Runs) -> Figure:
    """Draw a line for each method."""
    figure, (axis,) = panels(1, height=4.2)
    for name, colour in zip(METHODS, COLOURS, strict=True):
        plot(axis, runs, name, label=name, color=colour)
    axis.set(xlabel=xlabel, ylabel=f"{ylabel} loss, nats per character")
    if axis.lines:
        legend_below(figure, axis, columns=3)
    return figure


def _plot_curve(axis: Any, runs: Runs, name: str, **line: Any) -> None:
    if found := _final(runs, name):
        count = len(found[0].curve)
        steps = found[0].steps // count * np.arange(1, count + 1)
        mean_band(axis, steps, np.array([run.curve for run in found]), **line)


def _plot_rates(axis: Any, runs: Runs, name: str, **line: Any) -> None:
    axis.set(xscale="log")
    losses = {lr: found for lr in sorted(RATES) if (found := _losses(_at(runs, name, lr)))}
    if losses:
        axis.plot(list(losses), [float(np.mean(some)) for some in losses.values()], "o-", **line)


def _plot_pruned(axis: Any, runs: Runs, name: str, **line: Any) -> None:
    if found := _final(runs, name):
        losses = np.array([[run.test, *(run.pruned[s] for s in study.SHARES)] for run in found])
        mean_band(axis, (0.0, *study.SHARES), losses, marker="o", **line)


#: Name, caption, what is drawn for a method, and the axes.
DRAWINGS = (
    (
        "curves",
        "Validation loss at the chosen rates: mean, and where the middle 80 % of the seeds are.",
        partial(_drawn, _plot_curve, "steps", "validation"),
    ),
    (
        "rates",
        "Test loss against the learning rate: mean over the seeds that were run.",
        partial(_drawn, _plot_rates, "learning rate", "test"),
    ),
    (
        "pruned",
        "Test loss against the share of weights set to 0: mean, and where the middle 80 % are.",
        partial(_drawn, _plot_pruned, "share of each matrix set to 0", "test"),
    ),
)


def _results(runs: Runs) -> Table:
    def rate(name: str) -> Cell:
        lr = study.chosen_rate(runs, name)
        edge = " **" if lr in (min(RATES), max(RATES)) else ""
        return Cell(f"{lr:g}{edge}", lr) if lr else NOTHING

    def final(of: Callable[[Any], float], digits: int = 3) -> Callable[[str], Cell]:
        return lambda name: mean([of(run) for run in _final(runs, name)], digits)

    columns = {
        "Method": word,
        "lr": rate,
        "Test loss": final(lambda run: run.test, 4),
        "Lowest to highest": lambda name: between(_losses(_final(runs, name)), 4),
        "Validation loss": final(lambda run: run.validation, 4),
        "Largest weight": final(lambda run: run.weights.largest),
        "Weights below 1 % of the largest, %": final(lambda run: 100 * run.weights.small, 1),
        "Seeds": lambda name: number(len(_final(runs, name)), 0),
    }
    note = (
        f"{PLUS_MINUS} The last column but one is the mean over matrices. ** The rate is the"
        " smallest or largest of those tried, so that a rate beyond might be better."
    )
    return Table.of(f"{NAME}-results", "Results at the chosen rates", columns, _begun(runs), note)


def _rates(runs: Runs) -> Table:
    def at(lr: float, name: str) -> Cell:
        found = _at(runs, name, lr)
        cell, gone = mean(_losses(found), 3), sum(run.diverged for run in found)
        return replace(cell, text=f"{cell.text} ({gone} diverged)") if gone else cell

    columns = {"Method": word, **{f"lr {lr:g}": partial(at, lr) for lr in sorted(RATES)}}
    note = (
        f"Test loss at each learning rate. {PLUS_MINUS} A single number is one seed. In brackets:"
        " how many seeds diverged, which the mean leaves out."
    )
    return Table.of(f"{NAME}-rates", "The same learning rate for all", columns, _begun(runs), note)


def _later(runs: Runs) -> Table:
    """Compare every p at its chosen rate with AdamW at rates that it alone was given."""

    def loss(one: tuple[str, float]) -> Cell:
        return mean(_losses(_found(runs, *one, SEEDS)), 4)

    def ahead(p: float, one: tuple[str, float]) -> Cell:
        ours, theirs = _losses(_final(runs, _mirror(p))), _losses(_found(runs, *one, SEEDS))
        if min(len(ours), len(theirs)) < 2:
            return NOTHING
        found = welch(ours, theirs)
        return Cell(" to ".join(TEST.signed(found.low, found.high)), found.value)

    columns: dict[str, Callable[[tuple[str, float]], Cell]] = {
        "Method": lambda one: word(one[0]),
        "lr": lambda one: number(one[1], 4),
        "Test loss": loss,
        **{f"p = {p:g}": partial(ahead, p) for p in (1.1, 1.25, 1.5, 1.75)},
    }
    rows = [one for one in study.LATER if _found(runs, *one, SEEDS)]
    note = (
        f"{PLUS_MINUS} Rates that AdamW alone was given, after the study. The last columns:"
        " MirrorAdam's test loss at its chosen rate minus this one, as 95 % intervals; below 0,"
        " MirrorAdam is better."
    )
    return Table.of(f"{NAME}-later", "AdamW at rates of its own", columns, rows, note)


def _pruned(runs: Runs) -> Table:
    def at(share: float, name: str) -> Cell:
        return mean([run.pruned[share] if share else run.test for run in _final(runs, name)], 3)

    columns = {"Method": word, "Whole": partial(at, 0.0)}
    columns |= {f"{100 * share:g} % pruned": partial(at, share) for share in study.SHARES}
    note = "Test loss when the smallest weights of every matrix are set to 0, without retraining."
    return Table.of(f"{NAME}-pruned", "Pruning", columns, _begun(runs), f"{note} {PLUS_MINUS}")


TEST = Measure("test loss", lambda run: run.test, digits=4, higher=False)


def _after(share: float) -> Measure:
    name = f"test loss with {100 * share:g} % pruned"
    return Measure(name, lambda run: run.pruned[share], higher=False)


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


BETTER = Claim(
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
)
CLAIMS = (
    BETTER,
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
