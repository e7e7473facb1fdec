"""The study of fine-tuning in the report: what is claimed of MirrorAdam, a figure and tables.

The claims and the rule were written before the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mirrorhead_lab.evaluation import fine_tuning_results as study
from mirrorhead_lab.evaluation.fine_tuning_results import METHODS, RATES, SEEDS, SHARES, Key, Runs
from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.findings.finding import Finding, Part
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, mean, number, word
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, mean_band, panels
from mirrorhead_lab.report.real_data.claims import (
    MARGIN,
    Claim,
    Comparison,
    Measure,
    judge_comparisons,
)

NAME = "fine-tuning"
COMMAND = "mirrorhead study fine-tuning"
#: The accuracy of a run that diverged: both labels are equally likely.
GUESS = 0.5
RULE = (
    "Each comparison is between means over seeds. It is as claimed if Welch's 95 % interval of the"
    " difference lies entirely on the claimed side. A claim holds if all its comparisons are as"
    " claimed. It does not hold if one is the other way with its whole interval, and is otherwise"
    f" not decided. About as accurate means less than {100 * MARGIN:g} point below. A run that"
    " diverged counts with the accuracy of a guess, 50 %."
)
PRUNED_CAPTION = (
    "Test accuracy against the share of each encoder matrix set to 0, without retraining: mean, and"
    " where the middle 80 % of the seeds are."
)


def part(runs: Runs) -> Part:
    """Judge, draw and tabulate the study."""
    about = (
        f"{len(METHODS)} methods fine-tune the 36 matrices of all-MiniLM-L6-v2 (6 layers, 12"
        f" heads) on {study.TEXTS:,} IMDb reviews of at most 128 tokens for two epochs;"
        f" {study.HELD_OUT:,} reviews are the validation set and {study.HELD_OUT:,} the test set."
        f" Runs: {len(runs)}."
    )
    tuning = (
        f"{len(RATES)} learning rates for each method, each run once with seed {SEEDS[0]}; the best"
        " validation accuracy after the last epoch chooses, of equals the smaller rate; the chosen"
        f" one is run with {len(SEEDS)} seeds, and only these read the test set"
    )
    figure = PartFigure(f"{NAME}-pruned-figure", PRUNED_CAPTION, partial(draw, runs))
    title = "Fine-tuning a pretrained encoder"
    findings = tuple(judge(runs, claim) for claim in CLAIMS)
    tables = (_results(runs), _tuning(runs))
    group = "Beyond the paper"
    return Part(NAME, title, about, tuning, RULE, COMMAND, findings, (figure,), tables, group)


def judge(runs: Runs, claim: Claim) -> Finding:
    """Judge a claim; one that lacks runs is not finished."""
    gone = [str(run.key) for run in runs.values() if run.final and run.diverged]
    return judge_comparisons(
        claim,
        partial(_values, runs),
        command=COMMAND,
        docs=("evidence/fine-tuning", "verdicts"),
        about=f"{len(SEEDS)} seeds for each method at its chosen rate. To make the runs:",
        left_out=f" Diverged, and counted as 50 %: {'; '.join(gone)}." if gone else "",
    )


def _values(runs: Runs, method: str, measure: Measure) -> list[float]:
    """Return a number of each final run; a ValueError says what is missing."""
    lr = study.chosen_rate(runs, method)
    if lr is None:
        raise ValueError(f"the tuning of {method} is not finished, or all its rates diverged")
    found = [runs.get(Key(method, lr, seed, True)) for seed in SEEDS]
    if None in found:
        raise ValueError(f"{method} has {len(found) - found.count(None)} of {len(found)} seeds")
    of: Callable[[Any], Any] = measure.of
    return [GUESS if run is None or run.diverged else of(run) for run in found]


def _final(runs: Runs, method: str) -> list[Any]:
    """Return the final runs of a method, without those that diverged."""
    mine = (run for run in runs.values() if run.method == method and run.final)
    return [run for run in mine if not run.diverged]


def draw(runs: Runs) -> Figure:
    """Draw accuracy against the share of weights that are set to 0."""
    figure, (axis,) = panels(1, height=3.8, ylabel="test accuracy, %")
    for name, colour in zip(METHODS, COLOURS, strict=False):
        if found := _final(runs, name):
            kept = [[run.test, *(run.pruned[share] for share in SHARES)] for run in found]
            line = {"label": name, "color": colour, "marker": "o"}
            mean_band(axis, (0.0, *SHARES), 100 * np.array(kept), **line)
    axis.set(xlabel="share of each encoder matrix set to 0")
    if axis.lines:
        legend_below(figure, axis, columns=len(METHODS))
    return figure


def _results(runs: Runs) -> Table:
    def final(of: Callable[[Any], float], digits: int, scale: float = 1.0) -> Any:
        return lambda name: mean([of(run) for run in _final(runs, name)], digits, scale)

    def pruned(share: float) -> Any:
        return final(lambda run: run.pruned[share], 1, 100)

    columns: dict[str, Callable[[str], Cell]] = {
        "Method": word,
        "Test %": final(lambda run: run.test, 1, 100),
        **{f"{100 * share:g} % pruned": pruned(share) for share in SHARES},
        "Entropy": final(lambda run: run.attention.entropy, 3),
        "One-hot": final(lambda run: run.attention.one_hot, 3),
        "Largest weight": final(lambda run: run.largest_weight, 2),
        "Seeds": lambda name: number(len(_final(runs, name)), 0),
    }
    note = (
        "Test accuracy in %, whole and with the smallest weights of every encoder matrix set to 0,"
        " without retraining. Entropy is the normalized entropy of [CLS]'s attention, one-hot its"
        " largest weight, both over all layers and heads. Mean over seeds ± their standard"
        " deviation."
    )
    return Table.of(f"{NAME}-results", "Results at the chosen rates", columns, METHODS, note)


def _tuning(runs: Runs) -> Table:
    def at(lr: float, name: str) -> Cell:
        run = runs.get(Key(name, lr, SEEDS[0], False))
        if run is None or run.validation is None:
            return Cell("diverged", -1.0) if run else NOTHING
        edge = "**" if lr in (min(RATES), max(RATES)) else "*"
        star = f" {edge}" if study.chosen_rate(runs, name) == lr else ""
        return Cell(f"{100 * run.validation:.1f}{star}", run.validation)

    columns: dict[str, Callable[[str], Cell]] = {"Method": word}
    columns |= {f"lr {lr:g}": partial(at, lr) for lr in RATES}
    note = (
        "Validation accuracy in % of each learning rate, with one seed; * is the chosen one, ** if"
        " it is the smallest or largest, so that a rate beyond might be better."
    )
    return Table.of(f"{NAME}-tuning", "What tuning saw", columns, METHODS, note)


TEST = Measure("test accuracy", lambda run: run.test, digits=1, scale=100, unit=" points")


def _after(share: float) -> Measure:
    name = f"accuracy with {100 * share:g} % pruned"
    return Measure(name, lambda run: run.pruned[share], digits=1, scale=100, unit=" points")


def _claim(p: float) -> Claim:
    method = f"MirrorAdam p={p:g}"
    return Claim(
        f"{NAME}-{f'{p:g}'.replace('.', '-')}",
        NAME,
        f"Fine-tuning without a center: p = {p:g}",
        f"A pretrained encoder fine-tuned with MirrorAdam, $p = {p:g}$, is about as accurate as one"
        " fine-tuned with AdamW, and more accurate when the smallest 40 % and 60 % of every encoder"
        " matrix are set to 0, without retraining. (Not in the paper.)",
        (
            Comparison(TEST, method, "AdamW", margin=MARGIN),
            *(Comparison(_after(share), method, "AdamW") for share in (0.4, 0.6)),
        ),
    )


CLAIMS = tuple(_claim(p) for p in (1.5, 1.1))
