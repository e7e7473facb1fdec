"""Real heads against the theory: the figure, the table and the verdicts of results/margins.

The runs are those of `mirrorhead sweep imdb-to-the-end`; `q` is the exponent that a run was
trained with, `p` that of a solution. The rules, `RULE`, were written before the runs had finished.
Divergences of different p have different scales, so a comparison never mixes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from operator import attrgetter
from statistics import fmean

from mirrorhead_lab.evaluation.head_margins import (
    CheckpointMargins,
    ModelMargins,
    Nearness,
    exponents,
    mean_over_heads,
)
from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.findings.finding import Finding, Part
from mirrorhead_lab.findings.statistics import (
    NOT_DECIDED,
    Outcome,
    outcome,
    paired,
    welch,
)
from mirrorhead_lab.findings.table import Cell, Table, mean, number, word
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, panels
from mirrorhead_lab.verdicts import judge

#: By the exponent that they were trained with.
Runs = dict[float, list[ModelMargins]]
#: What is said of each comparison, whether it is primary, and its outcome.
Compare = Callable[[Runs], list[tuple[str, bool, Outcome]]]
Quantity = Callable[[Nearness], float | None]
_share: Quantity = attrgetter("share")
_divergence: Quantity = attrgetter("divergence")

COMMAND = "mirrorhead margins runs/imdb-to-the-end --n 64 --tokens 128"
RULE = (
    "Each number of a run is the mean over its heads. Nearest: for every p, runs trained with q = p"
    " have a smaller divergence from the lp solution than runs with any other q, by Welch's 95 %"
    " interval over seeds. Grows: for every q, the share is higher at the end than before training,"
    " by the 95 % interval of the differences between two moments of the same runs; a remark says"
    " if it is not higher than after the first epoch. A claim does not hold if one of its intervals"
    " lies entirely on the other side, and is otherwise not decided."
)
CAPTION = (
    "Share of the largest margin that the heads of each run have, along training (left, for the"
    " exponent it was trained with), and divergence from the solution of each exponent at the end"
    " (right): a line or a dot for each seed, mean over heads."
)


def margins_part(found: Sequence[ModelMargins]) -> Part:
    """Judge, draw and tabulate what is in results/margins."""
    figure = PartFigure("margins-figure", CAPTION, partial(draw, found))
    return Part(
        "margins",
        "Real heads against the theory",
        f"Models: {len(found)}. For each head, the tokens are those it attends to most.",
        "none",
        RULE,
        COMMAND,
        tuple(findings(found)),
        (figure,) if _by_exponent(found) else (),
        (table(found),),
    )


def findings(found: Sequence[ModelMargins]) -> list[Finding]:
    """Judge the two claims, by the rules above."""
    nearest = (
        "Among classifiers trained by mirror descent with different exponents, the heads of those"
        " trained with $q$ have the smallest divergence from the $\\ell_q$-AttSVM solution of the"
        " tokens they select, as the theory of one layer suggests. (Not claimed in the paper, whose"
        " theorems are about one layer in which W itself is trained.)"
    )
    rises = (
        "While a classifier is trained by mirror descent with exponent $q$, the $\\ell_q$ margin of"
        " its heads grows as a share of the largest possible one. (Not claimed in the paper.)"
    )
    runs = _by_exponent(found)
    return [
        _judged(runs, _nearest, "nearest", "Real heads: which solution is nearest?", nearest),
        _judged(runs, _rises, "rise", "Real heads: does the margin grow?", rises),
    ]


def _judged(runs: Runs, compare: Compare, name: str, title: str, claim: str) -> Finding:
    finding = Finding(
        name=f"margins-{name}",
        title=title,
        claim=claim,
        command=COMMAND,
        docs=("evidence/heads", "what-we-found"),
        about="After `mirrorhead sweep imdb-to-the-end`:",
    )
    try:
        _check_comparable(runs)
        compared = compare(runs)
    except ValueError as error:
        return replace(finding, failure=f"cannot be judged: {error}")
    missed = [found for _, primary, found in compared if primary and found != "as claimed"]
    weak = [text for text, primary, found in compared if not primary and found != "as claimed"]
    measured = "; ".join(text for text, *_ in compared) + "." + _left_out(runs)
    if missed:
        refuted = "the other way" in missed
        verdict = judge(measured, False) if refuted else judge(measured, None, NOT_DECIDED)
    else:
        verdict = judge(measured, True, f"Not as claimed: {'; '.join(weak)}." if weak else "")
    return replace(finding, verdict=verdict)


def _by_exponent(found: Sequence[ModelMargins]) -> Runs:
    """Return the runs of plain mirror descent by their exponent."""
    ours = [one for one in found if (one.optimizer or "").startswith("mirror-descent")]
    qs = sorted({one.p for one in ours if one.p is not None})
    return {q: [one for one in ours if one.p == q] for q in qs}


def _left_out(runs: Runs) -> str:
    """Say how many heads are not in the means."""
    checkpoints = [at for some in runs.values() for run in some for at in run.checkpoints]
    solved = _solved(checkpoints)
    lost = solved.count(False)
    text = f" Left out: {lost} of {len(solved)} problems, which have no certified solution."
    return text if lost else ""


def _solved(checkpoints: Sequence[CheckpointMargins]) -> list[bool]:
    """Return whether each problem has a certified solution."""
    heads = [head for at in checkpoints for head in at.heads]
    return [one.status == "optimal" for head in heads for one in head.by_p]


def _check_comparable(runs: Runs) -> None:
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


def _values(
    of: Quantity, runs: Sequence[ModelMargins], p: float, epoch: int | None = None
) -> list[float]:
    """Return a mean over heads for each run, at the end or after an epoch."""
    values = []
    for run in runs:
        there = [at for at in run.checkpoints if epoch in (None, at.epoch)]
        if not there:
            raise ValueError(f"{run.model} was not measured after epoch {epoch}, but with --last")
        at = run.last if epoch is None else there[0]
        value = mean_over_heads(at, p, of)
        if value is None:
            raise ValueError(f"{run.model}, {at.name}: no head has a solution for p = {p:g}")
        values.append(value)
    return values


def _nearest(runs: Runs) -> list[tuple[str, bool, Outcome]]:
    compared = []
    for p, q in permutations(runs, 2):
        own, other = (_values(_divergence, runs[r], p) for r in (p, q))
        found = outcome(welch(other, own))
        text = (
            f"from the l{p:g} solution q = {p:g} is at {fmean(own):.3g} and q = {q:g} at"
            f" {fmean(other):.3g}, {found}"
        )
        compared.append((text, True, found))
    return compared


def _rises(runs: Runs) -> list[tuple[str, bool, Outcome]]:
    compared = []
    for epoch, when in enumerate(("before training", "after the first epoch")):
        for q, some in runs.items():
            start, end = _values(_share, some, q, epoch), _values(_share, some, q)
            found = outcome(paired(end, start))
            shares = f"{fmean(start):.3g} {when} and {fmean(end):.3g} at the end"
            text = f"q = {q:g}: share {shares}, {found}"
            compared.append((text, epoch == 0, found))
    return compared


def table(found: Sequence[ModelMargins]) -> Table:
    """Return a row for each kind of model: final shares and divergences for each p."""
    ps = exponents(found)
    groups: dict[str, list[CheckpointMargins]] = {}
    for one in found:
        groups.setdefault(one.optimizer or one.model, []).append(one.last)

    def over_models(ends: list[CheckpointMargins], p: float, of: Quantity, digits: int) -> Cell:
        """The mean over the models that have a solution for p."""
        values = [mean_over_heads(end, p, of) for end in ends]
        return mean([value for value in values if value is not None], digits)

    rows = []
    for name, ends in groups.items():
        solved = _solved(ends)
        rows.append(
            (
                word(name),
                number(len(ends), 0),
                mean([fmean(head.one_hot for head in end.heads) for end in ends]),
                *(over_models(ends, p, _share, 4) for p in ps),
                *(over_models(ends, p, _divergence, 3) for p in ps),
                Cell(f"{sum(solved)} of {len(solved)}", sum(solved)),
            )
        )
    shares, divergences = (tuple(f"{what} p={p:g}" for p in ps) for what in ("Share", "D"))
    columns = ("Model", "Measured", "One-hot", *shares, *divergences, "Solved")
    note = (
        "At the end of training, mean over heads, then over seeds ± their standard deviation; for a"
        " model as it is, over draws of the texts."
        " Share: margin of W over its p-norm, relative to the largest possible. D: divergence of"
        " W's direction from the solution's. One-hot: mean of the largest attention weight."
        " Solved: problems with a certified solution; the others are left out of the means."
    )
    return Table("margins-table", "Heads and solutions", columns, tuple(rows), note)


def draw(found: Sequence[ModelMargins]) -> Figure:
    """Draw shares along training, and final divergences by exponent."""
    figure, (left, right) = panels(2, height=3.8)
    runs = _by_exponent(found)
    ps = exponents([run for some in runs.values() for run in some])

    def value(at: CheckpointMargins, p: float, of: Quantity) -> float:
        drawn = mean_over_heads(at, p, of)
        return math.nan if drawn is None else drawn

    for k, (q, some) in enumerate(runs.items()):
        colour = COLOURS[k % len(COLOURS)]
        places = [j + 0.15 * (k - (len(runs) - 1) / 2) for j in range(len(ps))]
        for i, run in enumerate(some):
            epochs = [at.epoch or 0 for at in run.checkpoints]
            label = f"trained with q = {q:g}" if i == 0 else None
            shares = [value(at, q, _share) for at in run.checkpoints]
            left.plot(epochs, shares, "o-", color=colour, label=label, linewidth=1, markersize=3)
            right.plot(places, [value(run.last, p, _divergence) for p in ps], "o", color=colour)
    left.set(xlabel="epoch", ylabel="share of the largest margin", yscale="log")
    left.set_xscale("symlog", linthresh=1)
    left.set_xlim(left=-0.1)
    left.set_xticks([0, 1, 10], labels=["0", "1", "10"])
    right.set(xlabel="p of the solution", ylabel="divergence at the end")
    right.set_xticks(range(len(ps)), [f"{p:g}" for p in ps])
    legend_below(figure, left, columns=3)
    return figure
