"""Tables and figures of studies of classifiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from mirrorhead_lab.evaluation.results import (
    KINDS,
    SHARES,
    SPLITS,
    Classified,
    EditScores,
    Histogram,
    RationaleScores,
)
from mirrorhead_lab.evaluation.sparsity import LARGE, WIDTH
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, between, mean, number, word
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, panels
from mirrorhead_lab.studies.classifiers import Classifier
from mirrorhead_lab.studies.study import Drawing, Rows
from mirrorhead_lab.studies.tables import (
    EDGE,
    PLUS_MINUS,
    Columns,
    draw_pruning,
    over_seeds,
    seeds_column,
)

HEADINGS = {
    "auprc": "AUPRC",
    "token_f1": "Token F1",
    "iou_f1": "IOU F1",
    "comprehensiveness": "Comprehensiveness",
    "sufficiency": "Sufficiency",
    "mass": "Share on edits",
}
SCORED = {"attention": "attention", "gradient": "gradient × input"}
#: Whose weights are drawn: more lines hide each other.
SHOWN = ("MD p=1.1", "MD p=2", "MirrorAdam p=1.1", "AdamW")


def tables(about: Classifier, rows: Rows[Classified]) -> Iterator[Table]:
    """Yield all tables of a study."""

    def table(name: str, title: str, columns: Columns, note: str) -> Table:
        every = name in ("accuracy", "tuning")
        names = [one for one in rows.study.methods if every or rows.final(one)]
        columns = {"Optimizer": word, **columns}
        return Table.of(f"{rows.study.name}-{name}", title, columns, names, note)

    final = partial(over_seeds, rows)
    percent = partial(final, digits=2, scale=100)
    yield table("accuracy", "Accuracy", *_accuracy(about, rows, percent))
    if about.to_the_end:
        found = (run for name in rows.study.methods for run in rows.final(name))
        levels = sorted({level for run in found for level in run.scores.milestones if level})
        yield table(
            "equal-training",
            "Test accuracy at equal training accuracy",
            {f"Train {100 * level:g} %": partial(_reached, rows, level) for level in levels},
            "Test accuracy in % where this share of the training reviews was classified correctly,"
            " with dropout on: interpolated between the first epoch that reached it and the one"
            f" before whose weights were kept. {PLUS_MINUS} In brackets: how many seeds reached it,"
            " if not all.",
        )
    most = max(len(method.settings) for method in rows.study.methods.values())
    train = " (with train accuracy where it decides)" if about.to_the_end else ""
    yield table(
        "tuning",
        "Tuning",
        {f"Rate {k + 1}": partial(_tried, rows, k) for k in range(most)},
        f"Validation accuracy in % of each learning rate, with one seed{train}; {EDGE}",
    )
    yield table(
        "pruned",
        "Accuracy after pruning",
        {
            "Whole": percent(lambda run: run.test),
            **{f"{100 * s:g} % pruned": percent(lambda r, s=s: r.pruned[s]) for s in SHARES},
        },
        "Test accuracy in % when the smallest weights of every matrix are set to 0, without"
        f" retraining. {PLUS_MINUS}",
    )
    yield table("weights", "Sparsity of attention", *_weights(about, rows))
    yield table(
        "entropy",
        "Entropy of attention",
        {
            "All heads": final(lambda run: run.scores.entropy.mean),
            "Sharpest head": final(lambda run: min(run.scores.entropy.by_head)),
            "Flattest head": final(lambda run: max(run.scores.entropy.by_head)),
        },
        "Normalized entropy of what [CLS] looks at in the last layer, on test data: 1 if it looks"
        f" at all tokens alike, 0 if at one. {PLUS_MINUS}",
    )
    for part in SPLITS:
        for split in SPLITS[part] if part in about.parts else ():
            yield from _selection(rows, part, split)


def _accuracy(
    about: Classifier, rows: Rows[Classified], percent: Callable[..., Any]
) -> tuple[Columns, str]:
    ended = about.to_the_end
    epoch = "Last epoch" if ended else "Best epoch"
    which = "The last epoch" if ended else "The epoch with the best validation accuracy"
    kept = (
        " Best kept is the best test accuracy of the epochs whose weights were kept, about nine a"
        " run; the paper's Table 1 has the best of all epochs."
    )

    def rate(name: str) -> Cell:
        lr = (rows.chosen(name) or {}).get("lr")
        return Cell(_plain(lr), lr) if lr and rows.final(name) else NOTHING

    def seconds(name: str) -> Cell:
        found = [run.seconds_per_epoch for run in rows.final(name)]
        known = [seconds for seconds in found if seconds is not None]
        return number(min(known), 1) if known else NOTHING

    columns: Columns = {
        "lr": rate,
        "Test %": percent(lambda run: run.test),
        "Lowest to highest": lambda name: between([r.test for r in rows.final(name)], 2, 100),  # pyright: ignore
        **({"Best kept test %": percent(lambda run: run.best_kept)} if ended else {}),
        "Validation %": percent(lambda run: run.validation),
        "Train %": percent(lambda run: run.train),
        epoch: lambda name: between([run.best_epoch or 0 for run in rows.final(name)], 0),
        "Seconds an epoch": seconds,
        "Seeds": seeds_column(rows),
    }
    note = (
        f"{PLUS_MINUS} {which}; train accuracy is of the pass that was trained on. Seconds are"
        " those of the fastest epoch of all seeds, on one thread: other work on the machine can"
        f" only add.{kept if ended else ''}"
    )
    return columns, note


def _reached(rows: Rows[Classified], level: float, name: str) -> Cell:
    found = [run.scores.test_accuracy_at(level) for run in rows.final(name)]
    values = [value for value in found if value is not None]
    cell = mean(values, 2, 100)
    some = f" ({len(values)} of {len(found)})" if 0 < len(values) < len(found) else ""
    return replace(cell, text=cell.text + some)


def _tried(rows: Rows[Classified], k: int, name: str) -> Cell:
    settings = rows.study.methods[name].settings
    row = rows.get(rows.study.tuning_trials(name)[k]) if k < len(settings) else None
    if row is None:
        return NOTHING
    lr, found = settings[k]["lr"], row.measured
    if found.validation is None:
        return Cell(f"{_plain(lr)}: diverged", NOTHING.key)
    star = " **" if k in (0, len(settings) - 1) else " *"
    star = star if rows.chosen(name) == settings[k] else ""
    reached = "" if found.train is None else f" (train {100 * found.train:.1f})"
    percent = 100 * found.validation
    return Cell(f"{_plain(lr)}: {percent:.2f}{reached}{star}", percent)


def _weights(about: Classifier, rows: Rows[Classified]) -> tuple[Columns, str]:
    size = np.format_float_positional(about.large, 3, trim="-")
    columns: Columns = {
        f"≥ {size} {kind[0].upper()}": over_seeds(rows, partial(about.count_large, kind), 0)
        for kind in KINDS
    }

    def index(of: str, kind: str, name: str) -> Cell:
        values = [getattr(run.scores.weights[kind], of) for run in rows.final(name)]
        return NOTHING if None in values else mean(values)

    for of in ("gini", "hoyer"):
        for kind in KINDS:
            columns[f"{of.capitalize()} {kind[0].upper()}"] = partial(index, of, kind)
    counted = f"how many are {LARGE} and above in size (Figure 8)"
    if about.large != LARGE:
        counted = (
            f"how many are {about.large:.3f} and above in size (Figure 8's {LARGE} in models"
            f" {WIDTH} wide, scaled to this width as initial weights are; interpolated in"
            " histograms of 60 bins)"
        )
    note = (
        f"Weights of the key, query and value maps: {counted}, Gini and Hoyer index (0"
        " if all are equal, 1 if one has everything; none where a run has all of them 0)."
        f" {PLUS_MINUS}"
    )
    return columns, note


def at_random(rows: Rows[Classified], part: str, split: str) -> RationaleScores | EditScores | None:
    """Return random scores; those that involve the model are means over all final runs."""
    found = [run for name in rows.study.methods for run in rows.final(name)]
    if not found:
        return None
    scores = [getattr(run.scores, part)[split]["random"] for run in found]
    names = [field.name for field in fields(scores[0])]
    values = {name: [getattr(score, name) for score in scores] for name in names}
    means = {n: v[0] if len({*v}) == 1 else fmean(v) for n, v in values.items()}
    return type(scores[0])(**means)


def _selection(rows: Rows[Classified], part: str, split: str) -> Iterator[Table]:
    """Yield a table of attention and its baselines, rows by scorer and then by optimizer."""
    chance = at_random(rows, part, split)
    if chance is None:
        return
    if isinstance(chance, RationaleScores):
        title = f"Words that people marked: ERASER {split}"
        about = (
            f"ERASER {split}, {chance.documents} documents, of whose words people marked"
            f" {chance.chance:.1%}."
        )
    else:
        title = f"Tokens that flip the label: counterfactual {split}"
        about = (
            f"Counterfactual pairs, {split}, {chance.pairs} of them, in which {chance.chance:.1%}"
            " of the tokens were edited to flip the label."
        )
    indices = [field.name for field in fields(chance) if field.name in HEADINGS]
    found = []
    for scorer, words in SCORED.items():
        for name in rows.study.methods:
            if some := _scores(rows, name, part, split, scorer):
                means = (mean([getattr(score, index) for score in some]) for index in indices)
                found.append((word(name), word(words), *means))
    found.append((word("–"), word("random"), *(number(getattr(chance, i)) for i in indices)))
    headings = ("Optimizer", "Scored", *(HEADINGS[index] for index in indices))
    name = f"{rows.study.name}-{part}-{split}"
    yield Table(name, title, headings, tuple(found), f"{about} {PLUS_MINUS}")


def _scores(rows: Rows[Classified], name: str, part: str, split: str, scorer: str) -> list[Any]:
    return [getattr(run.scores, part)[split][scorer] for run in rows.final(name)]


def _plain(lr: float) -> str:
    """Write a rate without powers of ten, so that four in a row are compared at a glance."""
    return np.format_float_positional(lr, trim="-")


def drawings(about: Classifier) -> tuple[Drawing, ...]:
    """Return the figures of a study."""
    texts = "eraser" in about.parts
    found = {
        accuracy: "Test accuracy of all final runs: a dot for each seed, a line at the mean.",
        pruning: "Test accuracy against the share of weights set to 0, without retraining: mean,"
        " and where the middle 80 % of the seeds are.",
        partial(weights, about): "Sizes of the weights of W_K, W_Q and W_V, with the first seed,"
        " and a dot at the largest (Figure 8); to the right of the dotted line they count as"
        " large.",
        equal_training: "Test accuracy along training, against training accuracy, interpolated"
        " between epochs: mean over the seeds that came so far, and where the middle 80 % of them"
        " are.",
        selection: "How well the tokens that people point at are found (AUPRC): a dot for each"
        " seed, full for attention, hollow for gradient × input; the dashed line is random.",
    }
    names = ("accuracy", "pruned", "weights", "equal-training", "selection")
    left_out = {"equal-training": not about.to_the_end, "selection": not texts}
    return tuple(
        Drawing(name, caption, draw, shown=lambda rows: any(map(rows.final, rows.study.methods)))
        for name, (draw, caption) in zip(names, found.items(), strict=True)
        if not left_out.get(name)
    )


def _finals(rows: Rows[Classified]) -> dict[str, list[Classified]]:
    return {name: found for name in rows.study.methods if (found := rows.final(name))}


def accuracy(rows: Rows[Classified]) -> Figure:
    """Draw every final run as a dot."""
    found = dict(reversed(_finals(rows).items()))
    figure, (axis,) = panels(1, height=1.1 + 0.36 * len(found))
    for k, runs in enumerate(found.values()):
        _dots(axis, 100 * np.array([run.test for run in runs]), k, COLOURS[0])
    _rows(axis, list(found))
    axis.set(xlabel="test accuracy, %")
    return figure


def equal_training(rows: Rows[Classified]) -> Figure:
    """Draw test accuracy against training accuracy, at the milestones."""
    figure, (axis,) = panels(1, height=4.2)
    for k, (name, runs) in enumerate(_finals(rows).items()):
        levels = sorted({level for run in runs for level in run.scores.milestones if level})
        found = [[run.scores.test_accuracy_at(level) for run in runs] for level in levels]
        values = [[100 * value for value in some if value is not None] for some in found]
        x = [100 * level for level in levels]
        low, high = ([np.quantile(some, q) for some in values] for q in (0.1, 0.9))
        colour = COLOURS[k % len(COLOURS)]
        axis.plot(x, [np.mean(some) for some in values], "o-", color=colour, label=name)
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="training accuracy, %", ylabel="test accuracy, %")
    legend_below(figure, axis, columns=4)
    return figure


def pruning(rows: Rows[Classified]) -> Figure:
    """Draw accuracy against the share of weights that are set to 0."""
    labels = {"xlabel": "weights set to 0, %", "ylabel": "test accuracy, %"}
    return draw_pruning(rows, SHARES, scale=100, height=4.2, even=True, **labels)


def weights(about: Classifier, rows: Rows[Classified]) -> Figure:
    """Draw histograms of the sizes of attention's weights."""
    figure, axes = panels(3, height=3.6, sharey=True)
    finals = _finals(rows)
    names = [name for name in finals if name in SHOWN] or list(finals)[:4]
    for axis, kind in zip(axes, KINDS, strict=True):
        for k, name in enumerate(names):
            edges, density = sizes(finals[name][0].scores.weights[kind].histogram)
            line = {"color": COLOURS[k % len(COLOURS)], "label": name}
            seen = np.where(density > 0, density, np.nan)  # 0 has no place on a log axis
            axis.stairs(seen, edges, baseline=None, linewidth=1.5, **line)
            axis.plot(edges[-1], density[-1], "o", color=line["color"], markersize=4, clip_on=False)
        axis.axvline(about.large, color="#5c6370", linestyle=":", linewidth=1)
        axis.set(yscale="log", xlabel="size of a weight", title=f"W_{kind[0].upper()}")
    axes[0].set_ylabel("share of weights\nper unit of size")
    legend_below(figure, axes[0], columns=4)
    return figure


def sizes(histogram: Histogram) -> tuple[np.ndarray, np.ndarray]:
    """Return the histogram of |w| from that of w, as a density: edges from 0, one value per bin.

    >>> histogram = Histogram((-2.0, -1.0, 0.0, 1.0, 2.0), (1, 2, 4, 1))
    >>> sizes(histogram)
    (array([0., 1., 2.]), array([0.75, 0.25]))
    """
    edges, counts = np.array(histogram.edges), np.array(histogram.counts, dtype=float)
    half = len(counts) // 2
    both = counts[half:] + counts[:half][::-1]
    edges = edges[half:]
    return edges, both / max(both.sum(), 1) / np.diff(edges)


def selection(rows: Rows[Classified]) -> Figure:
    """Draw AUPRC of attention and of gradient x input beside random, on the three sets."""
    sets = {
        "ERASER val": ("eraser", "val"),
        "ERASER test": ("eraser", "test"),
        "edits, test": ("cad", "test"),
    }
    names = list(_finals(rows))[::-1]
    figure, axes = panels(3, height=1.3 + 0.36 * len(names), sharey=True)
    for axis, (title, (part, split)) in zip(axes, sets.items(), strict=True):
        for k, name in enumerate(names):
            for scorer, colour in (("gradient", COLOURS[1]), ("attention", COLOURS[0])):
                found = np.array([one.auprc for one in _scores(rows, name, part, split, scorer)])
                _dots(axis, found, k, colour, hollow=scorer == "gradient")
        if chance := at_random(rows, part, split):
            axis.axvline(chance.auprc, color="#5c6370", linestyle="--", linewidth=1.2)
        axis.set(title=title, xlabel="AUPRC")
    _rows(axes[0], names)
    return figure


def _dots(axis: Any, values: np.ndarray, row: int, colour: str, *, hollow: bool = False) -> None:
    """Draw a dot for each value, and a line at their mean."""
    face = "none" if hollow else colour
    axis.plot(values, np.full(len(values), row), "o", color=colour, markerfacecolor=face, alpha=0.8)
    axis.plot([values.mean()] * 2, [row - 0.32, row + 0.32], color=colour, linewidth=2)


def _rows(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.6, len(names) - 0.4)
