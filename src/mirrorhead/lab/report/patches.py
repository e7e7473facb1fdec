"""The study of patches in the report: who is accurate with few changed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mirrorhead.lab.evaluation.patch_study import (
    DEVELOPMENT,
    METHODS,
    OURS,
    SENTENCES,
    SIZES,
    SMALL,
    TASKS,
    PatchRun,
    column,
    equals,
    final_runs,
    scores_on_test,
    tuning_scores,
)
from mirrorhead.lab.plots import COLOURS, GREY, legend_below, panels
from mirrorhead.lab.report.figures import PartFigure
from mirrorhead.lab.report.findings import Finding, Part
from mirrorhead.lab.report.real_data.statistics import outcome, welch
from mirrorhead.lab.report.table import NOTHING, Cell, Table, mean, number, word
from mirrorhead.lab.verdicts import judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Weights of MiniLM in the matrices that are tuned.
WEIGHTS = 10_616_832
COMMAND = "python benchmarks/patches.py run"
RULE = (
    "For each task the claim holds if the mean test accuracy of centred MirrorAdam is above that of"
    " every other method whose whole curve comes from one training run, with 0.1 % and with 0.03 %"
    " of the weights changed, and Welch's 95 % interval of each difference lies entirely above 0."
    " TREC has no verdict: it was the task of development, and its test data were read before the"
    " last settings were added."
)


def part(runs: Sequence[PatchRun]) -> Part:
    """Judge, draw and tabulate the study."""
    tasks = [task for task in TASKS if any(r.final and r.task == task for r in runs)]
    figures = []
    caption = (
        "Test accuracy with only the largest changes kept: mean over seeds{}. The head is not"
        " counted. Grey dots: LoRA and BitFit, whose sizes are fixed; crosses: masks chosen"
        " beforehand, trained for each size. DARE falls below the picture."
    )
    if set(tasks) >= set(SENTENCES):
        mean_ = caption.format(" and four tasks")
        figures.append(PartFigure("patches-mean-figure", mean_, partial(draw_mean, runs)))
    if tasks:
        each = caption.format("")
        figures.append(PartFigure("patches-figure", each, partial(draw, runs, tasks)))
    return Part(
        "patches",
        "Patches: fine-tune and change few weights",
        "All-MiniLM-L6-v2 (6 layers, 10.6 million weights in matrices) is fine-tuned for two epochs"
        " of 2,000 texts with at most 32 tokens (IMDb: 1,500 reviews, 128 tokens). Then only the"
        f" largest changes are kept. {len(runs)} runs.",
        "three settings of each method (proximal l1: five), by mean validation accuracy at 0.1 %"
        " and 0.03 %",
        RULE,
        COMMAND,
        tuple(judge_task(runs, task) for task in tasks if task != DEVELOPMENT),
        tuple(figures),
        (
            *_tables_over_tasks(runs),
            *(accuracy_table(runs, task) for task in tasks),
            *_tuning_tables(runs, tasks),
        ),
    )


def judge_task(runs: Sequence[PatchRun], task: str) -> Finding:
    """Judge whether ours is best at the small sizes on one task."""
    title = f"Patches on {TASKS[task]}: the most accurate at small sizes"
    claim = (
        f"On {TASKS[task]}, MirrorAdam centred at the pretrained weights is more accurate than"
        " every other method with one training run if 0.1 % or 0.03 % of the weights may change."
    )
    finding = Finding(
        name=f"patches-{task}", title=title, claim=claim, command=f"{COMMAND} --tasks {task}",
        docs=("patches", "results"), about="To make the runs:",
    )  # fmt: skip
    compared = [(size, other) for size in SMALL for other in equals(task)]
    rows, failed = [], {}
    for size, other in compared:
        ours, theirs = (scores_on_test(runs, task, name, size) for name in (OURS, other))
        if min(len(ours), len(theirs)) < 2:
            missing = METHODS[OURS if len(ours) < 2 else other].title
            return replace(finding, failure=f"runs are missing: {missing} at {size:.2%}")
        difference = welch(ours, theirs)
        found = outcome(difference)
        if found != "as claimed":
            failed[f"{METHODS[other].title} at {size:.2%}"] = found
        value, low, high = (100 * x for x in (difference.value, difference.low, difference.high))
        rows.append(
            (
                word(f"{size:.2%}"), word(METHODS[other].title),
                number(100 * fmean(ours), 1), number(100 * fmean(theirs), 1),
                Cell(f"{value:+.1f}", value), Cell(f"{low:+.1f} to {high:+.1f}", low), word(found),
            )
        )  # fmt: skip
    columns = (
        "Size",
        "Other method",
        "Ours %",
        "Other %",
        "Difference",
        "95 % interval",
        "Outcome",
    )
    table = Table(f"patches-{task}-comparisons", "Comparisons", columns, tuple(rows))
    measured = "; ".join(_measured(runs, task, size) for size in SMALL) + "."
    remark = (
        f"Not as claimed: {', '.join(f'{k} ({v})' for k, v in failed.items())}." if failed else ""
    )
    if failed and "the other way" not in failed.values():
        remark += " These runs do not refute it: the seeds do not distinguish the methods."
    return replace(finding, verdict=judge(measured, not failed, remark), comparisons=table)


def _measured(runs: Sequence[PatchRun], task: str, size: float) -> str:
    """Our mean at a size, and the best of the others."""
    means = {name: fmean(scores_on_test(runs, task, name, size)) for name in (OURS, *equals(task))}
    ours = means.pop(OURS)
    best = max(means, key=lambda name: means[name])
    return f"{size:.2%}: {ours:.1%}, the best other is {METHODS[best].title} with {means[best]:.1%}"


def draw(runs: Sequence[PatchRun], tasks: Sequence[str]) -> Figure:
    """Accuracy against the share of changed weights, a panel for each task."""
    rows = -(-len(tasks) // 2)
    figure, axes = panels(min(2, len(tasks)), rows, height=0.8 + 3 * rows)
    flat = list(getattr(axes, "flat", axes))
    for axis, task in zip(flat, tasks, strict=False):
        _draw_curves(axis, runs, [task])
        axis.set(title=TASKS[task])
    for axis in flat[len(tasks) :]:
        axis.remove()
    legend_below(figure, flat[0], columns=3)
    return figure


def draw_mean(runs: Sequence[PatchRun]) -> Figure:
    """The same, the mean over the sets of sentences."""
    figure, axes = panels(1, height=4.2)
    _draw_curves(axes[0], runs, SENTENCES)
    legend_below(figure, axes[0], columns=3)
    return figure


def _draw_curves(axis: Any, runs: Sequence[PatchRun], tasks: Sequence[str]) -> None:
    for k, (name, method) in enumerate(METHODS.items()):
        means = {size: _mean(runs, tasks, name, size) for size in (None, *SIZES)}
        style = {"color": COLOURS[k % len(COLOURS)], "label": method.title}
        known = {100 * size: y for size, y in means.items() if size is not None and y is not None}
        if not method.sized and means[None] is not None:
            style["color"] = GREY
            axis.plot(100 * _share(runs, tasks[0], name), means[None], "o", **style)
        elif method.per_size and known:
            axis.plot(list(known), list(known.values()), "x", **style)
        elif known:
            width = 2.6 if name == OURS else 1.3
            axis.plot(list(known), list(known.values()), "-o", linewidth=width, **style)
    lowest = min((y for size in SIZES if (y := _mean(runs, tasks, "adamw", size))), default=2.0)
    axis.set(xscale="log", xlabel="weights changed, %", ylabel="test accuracy, %")
    axis.set(ylim=(lowest - 2, None))  # that of AdamW's largest changes; DARE falls far below it


def _mean(
    runs: Sequence[PatchRun], tasks: Sequence[str], method: str, size: float | None
) -> float | None:
    """Mean test accuracy in %, over seeds and then over tasks; None if one of them has no runs."""
    scores = [scores_on_test(runs, task, method, size) for task in tasks]
    return 100 * fmean(map(fmean, scores)) if all(scores) else None


def _share(runs: Sequence[PatchRun], task: str, method: str) -> float:
    """The size of LoRA or BitFit as a share of the weights: bytes over 4 bytes each."""
    one = final_runs(runs, task, method)[0]
    return one.bytes["all"] / 4 / WEIGHTS


def accuracy_table(runs: Sequence[PatchRun], task: str) -> Table:
    """Test accuracy by size, file sizes, and the share of weights with the base's bits."""
    names = ("all", *(f"{size:.2%}" for size in SIZES))
    columns = ("Method", "Runs", *names, "kB at 0.10%", "compressed", "same bits F32", "BF16")
    rows = []
    for name, method in METHODS.items():
        lines = final_runs(runs, task, name)
        if not lines:
            continue
        at = column(SMALL[0]) if method.sized else "all"
        stored = [r for r in lines if at in r.bytes]
        packed = [r.compressed[at] / 1000 for r in stored if at in r.compressed]
        rows.append(
            (
                word(method.title),
                number(method.runs_of_a_curve, 0),
                *(mean(scores_on_test(runs, task, name, size), 1, 100) for size in (None, *SIZES)),
                number(fmean(r.bytes[at] / 1000 for r in stored), 0) if stored else NOTHING,
                number(fmean(packed), 0) if packed else NOTHING,
                *(number(fmean(r.identical[kind] for r in lines), 3) for kind in ("F32", "BF16")),
            )
        )
    note = (
        "Test accuracy in %, mean over seeds ± their standard deviation, by the share of weights"
        " changed. Runs: training runs behind accuracy at 0.1 % and 0.03 %. Bytes are those of the"
        " patch without the head; of LoRA and BitFit, their only size. Same bits: share of the"
        " weights in tuned tensors that equal the base's before any are dropped."
    )
    return Table(f"patches-{task}-accuracy", f"{TASKS[task]}: accuracy", columns, tuple(rows), note)


def _tables_over_tasks(runs: Sequence[PatchRun]) -> list[Table]:
    """Means over the sets of sentences, for the methods that were run on all of them."""
    found = []
    rows = []
    for name, method in METHODS.items():
        cells = []
        for size in (None, *SIZES):
            value = _mean(runs, SENTENCES, name, size)
            cells.append(NOTHING if value is None else number(value, 1))
        if any(cell is not NOTHING for cell in cells):
            rows.append((word(method.title), number(method.runs_of_a_curve, 0), *cells))
    if rows:
        names = ("all", *(f"{size:.2%}" for size in SIZES))
        note = "Test accuracy in %: mean over seeds, then over the four sets of sentences."
        columns = ("Method", "Runs", *names)
        found.append(Table("patches-mean", "Mean over four tasks", columns, tuple(rows), note))
    rows = [row for name in (OURS, *equals("cr")) for row in _untuned_rows(runs, name)]
    if rows:
        columns = ("Method", "Setting", *(TASKS[task] for task in SENTENCES), "mean")
        note = (
            "Validation accuracy in % with seed 0, mean of 0.1 % and 0.03 %. A method that needs no"
            " tuning has a row that is good on every task."
        )
        title = "One setting for all tasks"
        found.append(Table("patches-untuned", title, columns, tuple(rows), note))
    return found


def _untuned_rows(runs: Sequence[PatchRun], method: str) -> list[tuple[Cell, ...]]:
    """Validation accuracy of each setting that was tried on all sets of sentences."""
    return [
        (
            word(METHODS[method].title),
            word(_setting(setting)),
            *(number(100 * score, 1) for score in (*scores, fmean(scores))),
        )
        for setting, scores in tuning_scores(runs, method)
    ]


def _setting(setting: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in sorted(setting.items()))


def _tuning_tables(runs: Sequence[PatchRun], tasks: Sequence[str]) -> list[Table]:
    """What tuning tried, with validation accuracy at the small sizes."""
    found = []
    for task in tasks:
        lines = [r for r in runs if r.task == task and not r.final]
        rows = tuple(
            (
                word(METHODS[r.method].title),
                word(_setting(r.setting)),
                number(100 * r.tuning_score, 1),
                number(r.seconds, 0),
            )
            for r in lines
        )
        columns = ("Method", "Setting", "Validation %", "Seconds")
        note = (
            "Mean validation accuracy at 0.1 % and 0.03 %, or at the only size there is; one seed."
            " Seconds are wall-clock time, with other work on the machine and pauses."
        )
        found.append(Table(f"patches-{task}-tuning", f"{TASKS[task]}: tuning", columns, rows, note))
    return found
