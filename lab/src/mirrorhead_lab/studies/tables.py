"""Tables and figures that several studies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mirrorhead_lab.findings.table import NOTHING, Cell, Table, mean, number, word
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, mean_band, panels
from mirrorhead_lab.studies.study import Rows, Setting

PLUS_MINUS = "Mean over seeds ± their standard deviation."
EDGE = (
    "* is the chosen one, ** if it is the smallest or largest, so that a rate beyond might be"
    " better."
)
#: Headings and cells of a table with a row for each method.
Columns = dict[str, Callable[[str], Cell]]


def in_words(setting: Setting) -> str:
    """Write a setting.

    >>> in_words({"lr": 1e-3, "rank": 4.0})
    'lr 0.001, rank 4'
    """
    return ", ".join(f"{key} {value:g}" for key, value in sorted(setting.items()))


def over_seeds(
    rows: Rows[Any], of: Callable[[Any], float], digits: int = 3, scale: float = 1.0
) -> Callable[[str], Cell]:
    """Return a column: the mean of a quantity over the final runs of a method."""
    return lambda name: mean([of(run) for run in rows.final(name)], digits, scale)


def seeds_column(rows: Rows[Any]) -> Callable[[str], Cell]:
    """Return the column of how many final runs a method has; means leave out what diverged."""

    def seeds(name: str) -> Cell:
        found = rows.at(name, rows.chosen(name), rows.study.seeds)
        gone = sum(map(rows.diverged, found))
        return Cell(f"{len(found) - gone}" + f" ({gone} diverged)" * bool(gone), len(found) - gone)

    return seeds


def tuning_table(rows: Rows[Any]) -> Table:
    """Return the validation score of each setting; the chosen one has a star."""
    found = []
    for task in rows.study.tasks:
        for name in rows.study.methods:
            for trial in rows.study.tuning_trials(name, task):
                if (row := rows.get(trial)) is not None:
                    score = rows.study.score(row.measured)
                    star = " *" if rows.chosen(name, task) == trial.setting else ""
                    said = Cell("diverged", NOTHING.key) if score is None else number(score)
                    cells = word(name), word(task), word(in_words(trial.setting) + star), said
                    found.append(cells)
    columns = ("Method", "Task", "Setting", "Validation score")
    note = "One run of each setting; * is the chosen one."
    return Table(f"{rows.study.id}-tuning", "What tuning saw", columns, tuple(found), note)


def draw_pruning(
    rows: Rows[Any],
    shares: Sequence[float],
    *,
    scale: float,
    height: float,
    even: bool = False,
    **labels: Any,
) -> Figure:
    """Draw the test score against the share of weights that are set to 0, a line for each method.

    Final runs have `test`, and `pruned` by share. even: put shares at equal distances, as 90 and
    95 % are what one wants to distinguish. labels: of the axes.
    """
    figure, (axis,) = panels(1, height=height)
    places = range(len(shares) + 1) if even else (0.0, *shares)
    for k, name in enumerate(rows.study.methods):
        if found := rows.final(name):
            kept = [[run.test, *(run.pruned[share] for share in shares)] for run in found]
            line = {"label": name, "color": COLOURS[k % len(COLOURS)], "marker": "o"}
            style = ("-", "--")[k // len(COLOURS) % 2]
            mean_band(axis, places, scale * np.array(kept), linestyle=style, **line)
    axis.set(**labels)
    if even:
        axis.set_xticks(places, [f"{100 * share:g}" for share in (0.0, *shares)])
    if axis.lines:
        legend_below(figure, axis, columns=3)
    return figure
