"""Real heads against the theory: the figure, the table and the verdicts of results/margins.

The runs are those of `mirrorhead sweep imdb-to-the-end`; `q` is the exponent that a run was
trained with, `p` that of a solution. Each number of a run is the mean over its heads. A comparison
is between means over seeds, by Welch's 95 % interval. The rules were written before the runs had
finished:

    nearest   For every p among the trained exponents, runs with q = p have a smaller divergence
              from the lp solution, at the end, than runs with any other q. Divergences of
              different p have different scales, so a comparison never mixes them.
    rises     For every q, the share of the largest lq margin is higher at the end than before
              training (primary), and than after the first epoch (secondary).
"""

from __future__ import annotations

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
from mirrorhead.lab.report.findings import Finding
from mirrorhead.lab.report.part import Part, PartFigure
from mirrorhead.lab.report.real_data.statistics import outcome, welch
from mirrorhead.lab.report.table import Cell, Table, mean, word
from mirrorhead.lab.verdicts import judge

COMMAND = "mirrorhead margins RUN --json"
RULE = (
    "Each number of a run is the mean over its heads; comparisons are between means over seeds, by"
    " Welch's 95 % interval. Nearest: for every p, runs trained with q = p have a smaller"
    " divergence from the lp solution than runs with any other q. Grows: for every q, the share is"
    " higher at the end than before training; a remark says if it is not higher than after the"
    " first epoch."
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
    if len(runs) < 2 or min(len(some) for some in runs.values()) < 2:
        seeds = ", ".join(f"{len(some)} with q = {q:g}" for q, some in runs.items()) or "none"
        failure = f"cannot be judged: it needs 2 runs with each of two exponents, there are {seeds}"
        return Finding(**about, failure=failure)
    compared = claim.compare(runs)
    missed = [text for text, primary, held in compared if not held and primary]
    weak = [text for text, primary, held in compared if not held and not primary]
    measured = "; ".join(text for text, *_ in compared) + "."
    remark = "" if missed or not weak else f"Not as claimed: {'; '.join(weak)}."
    return Finding(**about, verdict=judge(measured, not missed, remark))


def _by_exponent(found: Sequence[ModelMargins]) -> dict[float, list[ModelMargins]]:
    """Return the runs of plain mirror descent by their exponent."""
    ours = [one for one in found if (one.optimizer or "").startswith("mirror-descent")]
    qs = sorted({one.p for one in ours if one.p is not None})
    return {q: [one for one in ours if one.p == q] for q in qs}


def _share(at: CheckpointMargins, p: float) -> float:
    return mean_over_heads(at, p, lambda one: one.share)


def _divergence(at: CheckpointMargins, p: float) -> float:
    return mean_over_heads(at, p, lambda one: one.divergence)


def _nearest(runs: dict[float, list[ModelMargins]]) -> list[tuple[str, bool, bool]]:
    compared = []
    for p in runs:
        own = [_divergence(run.last, p) for run in runs[p]]
        for q in runs:
            if q != p:
                other = [_divergence(run.last, p) for run in runs[q]]
                apart = welch(other, own)
                text = (
                    f"from the l{p:g} solution q = {p:g} is at {fmean(own):.3g} and q = {q:g} at"
                    f" {fmean(other):.3g}, {outcome(apart)}"
                )
                compared.append((text, True, outcome(apart) == "as claimed"))
    return compared


def _rises(runs: dict[float, list[ModelMargins]]) -> list[tuple[str, bool, bool]]:
    compared = []
    for place, when in ((0, "before training"), (1, "after the first epoch")):
        for q, some in runs.items():
            start = [_share(run.checkpoints[place], q) for run in some]
            end = [_share(run.last, q) for run in some]
            found = outcome(welch(end, start))
            text = (
                f"q = {q:g}: share {fmean(start):.3g} {when} and {fmean(end):.3g} at the end,"
                f" {found}"
            )
            compared.append((text, place == 0, found == "as claimed"))
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
    ps = list(exponents(found))
    groups: dict[str, list[ModelMargins]] = {}
    for one in found:
        groups.setdefault(one.optimizer or one.model, []).append(one)
    rows = []
    for name, some in groups.items():
        ends = [one.last for one in some]
        one_hot = [fmean(head.one_hot for head in end.heads) for end in ends]
        cells: list[Cell] = [word(name), Cell(str(len(some)), len(some)), mean(one_hot)]
        for of in (_share, _divergence):
            cells += [mean([of(end, p) for end in ends], 4 if of is _share else 3) for p in ps]
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


def draw(found: Sequence[ModelMargins]) -> Figure:
    """Draw shares along training, and final divergences by exponent."""
    figure, (left, right) = panels(2, height=3.8)
    runs = _by_exponent(found)
    ps = list(exponents(found))
    for k, (q, some) in enumerate(runs.items()):
        colour = COLOURS[k % len(COLOURS)]
        for i, run in enumerate(some):
            epochs = [at.epoch or 0 for at in run.checkpoints]
            label = f"trained with q = {q:g}" if i == 0 else None
            shares = [_share(at, q) for at in run.checkpoints]
            left.plot(epochs, shares, "o-", color=colour, label=label, linewidth=1, markersize=3)
            places = [j + 0.15 * (k - (len(runs) - 1) / 2) for j in range(len(ps))]
            right.plot(places, [_divergence(run.last, p) for p in ps], "o", color=colour)
    left.set(xlabel="epoch", ylabel="share of the largest margin", yscale="log")
    left.set_xscale("symlog", linthresh=1)
    right.set(xlabel="p of the solution", ylabel="divergence at the end")
    right.set_xticks(range(len(ps)), [f"{p:g}" for p in ps])
    legend_below(figure, left, columns=3)
    return figure
