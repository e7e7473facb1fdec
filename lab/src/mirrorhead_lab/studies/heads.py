"""Real heads against the theory: which max-margin solutions do they come near to?

The models are the final runs of `imdb_to_the_end`, which are trained here if they are not there
yet, and a pretrained encoder as it is. `q` is the exponent that a run was trained with, `p` that of
a solution. The rules, `RULE`, were written before the runs had finished. Divergences of different p
have different scales, so a comparison never mixes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from mirrorhead_lab.evaluation.head_margins import (
    CheckpointMargins,
    ModelMargins,
    Nearness,
    exponents,
    mean_over_heads,
)
from mirrorhead_lab.evaluation.model_margins import MarginSettings, measure_model
from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.findings.statistics import NOT_DECIDED, Outcome, outcome, paired, welch
from mirrorhead_lab.findings.table import Cell, Table, mean, number, word
from mirrorhead_lab.models.pretrained import default_encoder
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, panels
from mirrorhead_lab.studies import classifiers, imdb_to_the_end
from mirrorhead_lab.studies.study import Drawing, Method, Rows, Study, Trial
from mirrorhead_lab.verdicts import judge

ENCODER = "all-MiniLM-L6-v2"
#: Draws of the texts for the encoder.
DRAWS = (0, 1, 2)
#: What `imdb_to_the_end` trained, at the rates that it chose; `how` is the exponent.
METHODS = {
    ENCODER: Method(({},), tasks=()),  # measured by `more`, with seeds of its own
    "AdamW": Method(({"lr": 3e-5},), title="adamw weight_decay=0.01"),
    "MD p=1.1": Method(({"lr": 0.3},), 1.1, title="mirror-descent p=1.1"),
    "MD p=2": Method(({"lr": 0.1},), 2.0, title="mirror-descent p=2.0"),
    "MD p=3": Method(({"lr": 0.03},), 3.0, title="mirror-descent p=3.0"),
}
EXPONENTS = {name: method.how for name, method in METHODS.items() if method.how}

#: Final runs by the exponent that they were trained with.
Runs = dict[float, list[ModelMargins]]
#: What is said of each comparison, whether it is primary, and its outcome.
Compared = list[tuple[str, bool, Outcome]]
Quantity = Callable[[Nearness], float | None]
_share: Quantity = attrgetter("share")
_divergence: Quantity = attrgetter("divergence")


def load(task: str, folder: Path | None) -> tuple[classifiers.Data, Path | None]:
    return imdb_to_the_end.STUDY.load(task, folder), folder


def run(trial: Trial, data: tuple[classifiers.Data, Path | None], folder: Path) -> ModelMargins:
    """Measure a model; one of the classifiers is trained if its folder is not there."""
    sets, root = data
    if trial.method == ENCODER:
        return measure_model(default_encoder(), MarginSettings(seed=trial.seed, data=root))
    trained = folder.parent.parent / imdb_to_the_end.STUDY.name / trial.training
    classifiers.train(imdb_to_the_end.ABOUT, imdb_to_the_end.METHODS, trial, sets, trained)
    about = imdb_to_the_end.ABOUT
    settings = MarginSettings(n=64, tokens=128, data=root, partial=about.partial)
    return measure_model(trained, settings)


def by_exponent(rows: Rows[ModelMargins]) -> Runs:
    """Return the runs of mirror descent by their exponent."""
    return {q: found for name, q in EXPONENTS.items() if (found := rows.final(name))}


def findings(rows: Rows[ModelMargins]) -> Iterator[Finding]:
    """Judge the two claims, by the rules."""
    runs = by_exponent(rows)
    for name, (title, claim, compare) in CLAIMS.items():
        finding = Finding(
            name=f"margins-{name}",
            title=title,
            claim=claim,
            command=rows.study.command,
            docs=rows.study.docs,
            about="To make the runs:",
        )
        try:
            for side in EXPONENTS:
                rows.study.side(rows, side)  # which names the seeds that are missing
            compared = compare(runs)
        except ValueError as error:
            yield replace(finding, failure=f"cannot be judged: {error}")
            continue
        missed = [found for _, primary, found in compared if primary and found != "as claimed"]
        weak = [text for text, primary, found in compared if not primary and found != "as claimed"]
        measured = "; ".join(text for text, *_ in compared) + "." + _left_out(runs)
        if missed:
            refuted = "the other way" in missed
            verdict = judge(measured, False) if refuted else judge(measured, None, NOT_DECIDED)
        else:
            verdict = judge(measured, True, f"Not as claimed: {'; '.join(weak)}." if weak else "")
        yield replace(finding, verdict=verdict)


def _left_out(runs: Runs) -> str:
    """Say how many heads are not in the means."""
    solved = _solved([at for some in runs.values() for run in some for at in run.checkpoints])
    lost = solved.count(False)
    text = f" Left out: {lost} of {len(solved)} problems, which have no certified solution."
    return text if lost else ""


def _solved(checkpoints: Sequence[CheckpointMargins]) -> list[bool]:
    """Return whether each problem has a certified solution."""
    heads = [head for at in checkpoints for head in at.heads]
    return [one.status == "optimal" for head in heads for one in head.by_p]


def _values(
    of: Quantity, runs: Sequence[ModelMargins], p: float, epoch: int | None = None
) -> list[float]:
    """Return a mean over heads for each run, at the end or after an epoch."""
    values = []
    for run in runs:
        at = run.last if epoch is None else next(at for at in run.checkpoints if at.epoch == epoch)
        value = mean_over_heads(at, p, of)
        if value is None:
            raise ValueError(f"{run.model}, {at.name}: no head has a solution for p = {p:g}")
        values.append(value)
    return values


def nearest(runs: Runs) -> Compared:
    compared: Compared = []
    for p, q in permutations(runs, 2):
        own, other = (_values(_divergence, runs[r], p) for r in (p, q))
        found = outcome(welch(other, own))
        text = (
            f"from the l{p:g} solution q = {p:g} is at {fmean(own):.3g} and q = {q:g} at"
            f" {fmean(other):.3g}, {found}"
        )
        compared.append((text, True, found))
    return compared


def rises(runs: Runs) -> Compared:
    compared: Compared = []
    for epoch, when in enumerate(("before training", "after the first epoch")):
        for q, some in runs.items():
            start, end = _values(_share, some, q, epoch), _values(_share, some, q)
            found = outcome(paired(end, start))
            shares = f"{fmean(start):.3g} {when} and {fmean(end):.3g} at the end"
            compared.append((f"q = {q:g}: share {shares}, {found}", epoch == 0, found))
    return compared


CLAIMS: dict[str, tuple[str, str, Callable[[Runs], Compared]]] = {
    "nearest": (
        "Real heads: which solution is nearest?",
        (
            "Among classifiers trained by mirror descent with different exponents, the heads of"
            " those trained with $q$ have the smallest divergence from the $\\ell_q$-AttSVM"
            " solution of the tokens they select, as the theory of one layer suggests. (Not claimed"
            " in the paper, whose theorems are about one layer in which W itself is trained.)"
        ),
        nearest,
    ),
    "rise": (
        "Real heads: does the margin grow?",
        (
            "While a classifier is trained by mirror descent with exponent $q$, the $\\ell_q$"
            " margin of its heads grows as a share of the largest possible one. (Not claimed in the"
            " paper.)"
        ),
        rises,
    ),
}


def models(rows: Rows[ModelMargins], name: str) -> list[ModelMargins]:
    """Return what was measured of a method's models; of the encoder, with each draw of texts."""
    setting = METHODS[name].settings[0]
    return [row.measured for row in rows.at(name, setting, {*rows.study.seeds, *DRAWS})]


def table(rows: Rows[ModelMargins]) -> Table:
    """Return a row for each kind of model: final shares and divergences for each p."""
    ends = {name: [run.last for run in found] for name in METHODS if (found := models(rows, name))}
    ps = exponents([row.measured for row in rows])

    def over_models(of: Quantity, p: float, digits: int, name: str) -> Cell:
        """Return the mean over the models that have a solution for p."""
        values = [mean_over_heads(end, p, of) for end in ends[name]]
        return mean([value for value in values if value is not None], digits)

    def one_hot(name: str) -> Cell:
        return mean([fmean(head.one_hot for head in end.heads) for end in ends[name]])

    def solved(name: str) -> Cell:
        found = _solved(ends[name])
        return Cell(f"{sum(found)} of {len(found)}", sum(found))

    columns: dict[str, Callable[[str], Cell]] = {
        "Model": lambda name: word(METHODS[name].title or name),
        "Measured": lambda name: number(len(ends[name]), 0),
        "One-hot": one_hot,
        **{f"Share p={p:g}": partial(over_models, _share, p, 4) for p in ps},
        **{f"D p={p:g}": partial(over_models, _divergence, p, 3) for p in ps},
        "Solved": solved,
    }
    note = (
        "At the end of training, mean over heads, then over seeds ± their standard deviation; for a"
        " model as it is, over draws of the texts."
        " Share: margin of W over its p-norm, relative to the largest possible. D: divergence of"
        " W's direction from the solution's. One-hot: mean of the largest attention weight."
        " Solved: problems with a certified solution; the others are left out of the means."
    )
    return Table.of("margins-table", "Heads and solutions", columns, ends, note)


def draw(rows: Rows[ModelMargins]) -> Figure:
    """Draw shares along training, and final divergences by exponent."""
    figure, (left, right) = panels(2, height=3.8)
    runs = by_exponent(rows)
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


def more(rows: Rows[ModelMargins]) -> Iterator[Trial]:
    """Yield the encoder with each draw of the texts."""
    for seed in DRAWS:
        yield Trial(method=ENCODER, setting={}, seed=seed, final=True)


STUDY = Study(
    name="heads",
    prefix="margins",
    title="Real heads against the theory",
    methods=METHODS,
    seeds=imdb_to_the_end.STUDY.seeds,
    measured=ModelMargins,
    load=load,
    run=run,
    score=lambda measured: 0.0,
    more=more,
    seconds=60,
    about=lambda rows: (
        f"Models: {len(rows)}. For each head, the tokens are those it attends to most."
    ),
    tuning="none",
    verdict_rule=(
        "Each number of a run is the mean over its heads. Nearest: for every p, runs trained with q"
        " = p have a smaller divergence from the lp solution than runs with any other q, by Welch's"
        " 95 % interval over seeds. Grows: for every q, the share is higher at the end than before"
        " training, by the 95 % interval of the differences between two moments of the same runs; a"
        " remark says if it is not higher than after the first epoch. A claim does not hold if one"
        " of its intervals lies entirely on the other side, and is otherwise not decided."
    ),
    findings=findings,
    figures=(
        Drawing(
            "",
            "Share of the largest margin that the heads of each run have, along training (left, for"
            " the exponent it was trained with), and divergence from the solution of each exponent"
            " at the end (right): a line or a dot for each seed, mean over heads.",
            draw,
            lambda rows: bool(by_exponent(rows)),
        ),
    ),
    tables=lambda rows: (table(rows),),
    docs=("evidence/heads", "what-we-found"),
    group="Real data",
)
