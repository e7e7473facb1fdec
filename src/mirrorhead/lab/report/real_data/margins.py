"""Real heads against the theory: the figure, the table and the verdicts of results/margins.

The runs are those of `mirrorhead sweep imdb-to-the-end`; `q` is the exponent that a run was
trained with, `p` that of a solution. Each number of a run is the mean over its heads. Runs of
different q are compared by Welch's 95 % interval over seeds, two moments of the same runs by
Student's 95 % interval of the differences. The rules were written before the runs had finished:

    nearest   For every p among the trained exponents, runs with q = p have a smaller divergence
              from the lp solution, at the end, than runs with any other q. Divergences of
              different p have different scales, so a comparison never mixes them.
    rises     For every q, the share of the largest lq margin is higher at the end than before
              training (primary), and than after the first epoch (secondary).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from mirrorhead.lab.evaluation.head_margins import (
    CheckpointMargins,
    ModelMargins,
    exponents,
    mean_over_heads,
)
from mirrorhead.lab.plots import COLOURS, Figure, legend_below, panels
from mirrorhead.lab.report.figures import PartFigure
from mirrorhead.lab.report.findings import Finding, Part
from mirrorhead.lab.report.real_data.statistics import outcome, paired, welch
from mirrorhead.lab.report.table import Cell, Table, mean, word
from mirrorhead.lab.verdicts import judge

COMMAND = "mirrorhead margins RUN --json"
RULE = (
    "Each number of a run is the mean over its heads. Nearest: for every p, runs trained with q = p"
    " have a smaller divergence from the lp solution than runs with any other q, by Welch's 95 %"
    " interval over seeds. Grows: for every q, the share is higher at the end than before training,"
    " by the 95 % interval of the differences between two moments of the same runs; a remark says"
    " if it is not higher than after the first epoch."
)
CAPTION = (
    "Share of the largest margin that the heads of each run have, along training (left, for the"
    " exponent it was trained with), and divergence from the solution of each exponent at the end"
    " (right): a line or a dot for each seed, mean over heads."
)


def margins_part(found: Sequence[ModelMargins]) -> Part:
    """Judge, draw and tabulate what is in results/margins."""
    drawn = [PartFigure("margins-figure", CAPTION, partial(draw, found))]
    return Part(
        "margins",
        "Real heads against the theory",
        f"Models: {len(found)}. For each head, the tokens are those it attends to most.",
        "none",
        RULE,
        COMMAND,
        tuple(findings(found)),
        tuple(drawn if _by_exponent(found) else ()),
        (table(found),),
    )


def findings(found: Sequence[ModelMargins]) -> list[Finding]:
    """Judge the two claims, by the rules above."""
    return [_judged(claim, found) for claim in (_NEAREST, _RISES)]


@dataclass(frozen=True)
class _Claim:
    name: str
    title: str
    text: str
    compare: Callable[[dict[float, list[ModelMargins]]], list[tuple[str, bool, bool]]]


def _judged(claim: _Claim, found: Sequence[ModelMargins]) -> Finding:
    runs = _by_exponent(found)
    about: dict[str, Any] = {
        "name": claim.name,
        "title": claim.title,
        "claim": claim.text,
        "command": COMMAND,
        "docs": ("heads", "what-we-found"),
        "about": "Runs of `mirrorhead sweep imdb-to-the-end`. For each of them:",
    }
    try:
        _check_comparable(runs)
        compared = claim.compare(runs)
    except ValueError as error:
        return Finding(**about, failure=f"cannot be judged: {error}")
    missed = [text for text, primary, held in compared if not held and primary]
    weak = [text for text, primary, held in compared if not held and not primary]
    measured = "; ".join(text for text, *_ in compared) + "." + _left_out(runs)
    remark = "" if missed or not weak else f"Not as claimed: {'; '.join(weak)}."
    return Finding(**about, verdict=judge(measured, not missed, remark))


def _by_exponent(found: Sequence[ModelMargins]) -> dict[float, list[ModelMargins]]:
    """Return the runs of plain mirror descent by their exponent."""
    ours = [one for one in found if (one.optimizer or "").startswith("mirror-descent")]
    qs = sorted({one.p for one in ours if one.p is not None})
    return {q: [one for one in ours if one.p == q] for q in qs}


def _left_out(runs: dict[float, list[ModelMargins]]) -> str:
    """Say how many heads are not in the means."""
    found = [
        one.status
        for some in runs.values()
        for run in some
        for at in run.checkpoints
        for head in at.heads
        for one in head.by_p
    ]
    lost = len(found) - found.count("optimal")
    text = f" Left out: {lost} of {len(found)} problems, which have no certified solution."
    return text if lost else ""


def _check_comparable(runs: dict[float, list[ModelMargins]]) -> None:
    """Raise a ValueError unless the runs are final ones, measured alike."""
    if len(runs) < 2 or min(len(some) for some in runs.values()) < 2:
        seeds = ", ".join(f"{len(some)} with q = {q:g}" for q, some in runs.items()) or "none"
        raise ValueError(f"it needs 2 runs with each of two exponents, there are {seeds}")
    every = [run for some in runs.values() for run in some]
    if len({(run.texts, run.tokens, run.text_seed, run.query) for run in every}) > 1:
        raise ValueError("the runs were not measured on the same texts, tokens and query")
    for q, some in runs.items():
        if len({run.lr for run in some}) > 1 or len({run.seed for run in some}) < len(some):
            raise ValueError(
                f"runs with q = {q:g} differ in more than the seed, or have one twice: keep the"
                " final runs of the sweep alone"
            )
    if unfinished := [run.model for run in every if run.last.train_accuracy is None]:
        raise ValueError(f"the run {unfinished[0]} had not finished when it was measured")


def _share(at: CheckpointMargins, p: float) -> float | None:
    return mean_over_heads(at, p, lambda one: one.share)


def _divergence(at: CheckpointMargins, p: float) -> float | None:
    return mean_over_heads(at, p, lambda one: one.divergence)


def _values(
    of: Callable[[CheckpointMargins, float], float | None],
    runs: Sequence[ModelMargins],
    p: float,
    epoch: int | None = None,
) -> list[float]:
    """Return a mean over heads for each run, at the end or after an epoch."""
    values = []
    for run in runs:
        at = run.last if epoch is None else _after(run, epoch)
        value = of(at, p)
        if value is None:
            raise ValueError(f"{run.model}, {at.name}: no head has a solution for p = {p:g}")
        values.append(value)
    return values


def _after(run: ModelMargins, epoch: int) -> CheckpointMargins:
    found = next((at for at in run.checkpoints if at.epoch == epoch), None)
    if found is None:
        raise ValueError(f"{run.model} was not measured after epoch {epoch}, but with --last")
    return found


def _nearest(runs: dict[float, list[ModelMargins]]) -> list[tuple[str, bool, bool]]:
    compared = []
    for p in runs:
        own = _values(_divergence, runs[p], p)
        for q in runs:
            if q != p:
                other = _values(_divergence, runs[q], p)
                found = outcome(welch(other, own))
                text = (
                    f"from the l{p:g} solution q = {p:g} is at {fmean(own):.3g} and q = {q:g} at"
                    f" {fmean(other):.3g}, {found}"
                )
                compared.append((text, True, found == "as claimed"))
    return compared


def _rises(runs: dict[float, list[ModelMargins]]) -> list[tuple[str, bool, bool]]:
    compared = []
    for epoch, when in ((0, "before training"), (1, "after the first epoch")):
        for q, some in runs.items():
            start, end = _values(_share, some, q, epoch), _values(_share, some, q)
            found = outcome(paired(end, start))
            text = (
                f"q = {q:g}: share {fmean(start):.3g} {when} and {fmean(end):.3g} at the end,"
                f" {found}"
            )
            compared.append((text, epoch == 0, found == "as claimed"))
    return compared


_NEAREST = _Claim(
    "margins-nearest",
    "Real heads: which solution is nearest?",
    "Among classifiers trained by mirror descent with different exponents, the heads of those"
    " trained with $q$ have the smallest divergence from the $\\ell_q$-AttSVM solution of the"
    " tokens they select, as the theory of one layer suggests. (Not claimed in the paper, whose"
    " theorems are about one layer in which W itself is trained.)",
    _nearest,
)
_RISES = _Claim(
    "margins-rise",
    "Real heads: does the margin grow?",
    "While a classifier is trained by mirror descent with exponent $q$, the $\\ell_q$ margin of its"
    " heads grows as a share of the largest possible one. (Not claimed in the paper.)",
    _rises,
)


def table(found: Sequence[ModelMargins]) -> Table:
    """Return a row for each kind of model: final shares and divergences for each p."""
    ps = exponents(found)
    groups: dict[str, list[ModelMargins]] = {}
    for one in found:
        groups.setdefault(one.optimizer or one.model, []).append(one)
    rows = []
    for name, some in groups.items():
        ends = [one.last for one in some]
        one_hot = [fmean(head.one_hot for head in end.heads) for end in ends]
        cells: list[Cell] = [word(name), Cell(str(len(some)), len(some)), mean(one_hot)]
        for of in (_share, _divergence):
            cells += [_mean(of, ends, p, 4 if of is _share else 3) for p in ps]
        solved = [one.status == "optimal" for end in ends for h in end.heads for one in h.by_p]
        cells.append(Cell(f"{sum(solved)} of {len(solved)}", sum(solved)))
        rows.append(tuple(cells))
    columns = (
        "Model", "Models", "One-hot", *(f"Share p={p:g}" for p in ps), *(f"D p={p:g}" for p in ps),
        "Solved",
    )  # fmt: skip
    note = (
        "At the end of training, mean over heads, then over seeds ± their standard deviation."
        " Share: margin of W over its p-norm, relative to the largest possible. D: divergence of"
        " W's direction from the solution's. One-hot: mean of the largest attention weight."
        " Solved: problems with a certified solution; the others are left out of the means."
    )
    return Table("margins-table", "Heads and solutions", columns, tuple(rows), note)


def _mean(
    of: Callable[[CheckpointMargins, float], float | None],
    ends: Sequence[CheckpointMargins],
    p: float,
    digits: int,
) -> Cell:
    """Return the mean over the models that have a solution for p."""
    return mean([value for end in ends if (value := of(end, p)) is not None], digits)


def draw(found: Sequence[ModelMargins]) -> Figure:
    """Draw shares along training, and final divergences by exponent."""
    figure, (left, right) = panels(2, height=3.8)
    runs = _by_exponent(found)
    ps = exponents([run for some in runs.values() for run in some])
    for k, (q, some) in enumerate(runs.items()):
        colour = COLOURS[k % len(COLOURS)]
        for i, run in enumerate(some):
            epochs = [at.epoch or 0 for at in run.checkpoints]
            label = f"trained with q = {q:g}" if i == 0 else None
            shares = [_or_nan(_share(at, q)) for at in run.checkpoints]
            left.plot(epochs, shares, "o-", color=colour, label=label, linewidth=1, markersize=3)
            places = [j + 0.15 * (k - (len(runs) - 1) / 2) for j in range(len(ps))]
            ends = [_or_nan(_divergence(run.last, p)) for p in ps]
            right.plot(places, ends, "o", color=colour)
    left.set(xlabel="epoch", ylabel="share of the largest margin", yscale="log")
    left.set_xscale("symlog", linthresh=1)
    right.set(xlabel="p of the solution", ylabel="divergence at the end")
    right.set_xticks(range(len(ps)), [f"{p:g}" for p in ps])
    legend_below(figure, left, columns=3)
    return figure


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
