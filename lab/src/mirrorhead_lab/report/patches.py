"""The study of patches in the report: who is accurate with few changed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mirrorhead_lab.evaluation import patch_study as study
from mirrorhead_lab.evaluation.patch_study import METHODS, OURS, SENTENCES, SIZES, SMALL, TASKS
from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.findings.finding import Finding, Part
from mirrorhead_lab.findings.statistics import NOT_DECIDED, outcome, welch
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, mean, number, word
from mirrorhead_lab.plots import COLOURS, GREY, legend_below, panels
from mirrorhead_lab.verdicts import judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Weights of MiniLM in the matrices that are tuned.
WEIGHTS = 10_616_832
COMMAND = "python benchmarks/patches.py run"
Runs = Sequence[study.PatchRun]
ALL_SIZES = (None, *SIZES)
SIZE_COLUMNS = ("Method", "Runs", "all", *(f"{size:.2%}" for size in SIZES))
RULE = (
    "For each task the claim holds if the mean test accuracy of centred MirrorAdam is above that of"
    " every other method whose whole curve comes from one training run, with 0.1 % and with 0.03 %"
    " of the weights changed, and Welch's 95 % interval of each difference lies entirely above 0."
    " It does not hold if an interval lies entirely below 0, and is otherwise not decided."
    " TREC has no verdict: it was the task of development, and its test data were read before the"
    " last settings were added."
)


def part(runs: Runs) -> Part:
    """Judge, draw and tabulate the study."""
    tasks = [task for task in TASKS if any(r.final and r.task == task for r in runs)]
    caption = (
        "Test accuracy with only the largest changes kept: mean over seeds{}. The head is not"
        " counted. Grey dots: LoRA and BitFit, whose sizes are fixed; crosses: masks chosen"
        " beforehand, trained for each size. DARE falls below the picture."
    )
    figures = []
    if set(tasks) >= set(SENTENCES):
        drawing = partial(draw, runs, {"": SENTENCES}, 4.2)
        over_tasks = caption.format(" and four tasks")
        figures.append(PartFigure("patches-mean-figure", over_tasks, drawing))
    if tasks:
        drawing = partial(draw, runs, {TASKS[task]: [task] for task in tasks})
        figures.append(PartFigure("patches-figure", caption.format(""), drawing))
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
        tuple(judge_task(runs, task) for task in tasks if task != study.DEVELOPMENT),
        tuple(figures),
        (
            *(table for table in (_mean_table(runs), _untuned_table(runs)) if table.rows),
            *(accuracy_table(runs, task) for task in tasks),
            *(_tuning_table(runs, task) for task in tasks),
        ),
        "Beyond the paper",
    )


def judge_task(runs: Runs, task: str) -> Finding:
    """Judge whether ours is best at the small sizes on one task."""
    finding = Finding(
        name=f"patches-{task}",
        title=f"Patches on {TASKS[task]}: the most accurate at small sizes",
        claim=f"On {TASKS[task]}, MirrorAdam centred at the pretrained weights is more accurate"
        " than every other method with one training run if 0.1 % or 0.03 % of the weights may"
        " change.",
        command=f"{COMMAND} --tasks {task}",
        docs=("evidence/patches", "verdicts"),
        about="To make the runs:",
    )
    rows, failed, measured = [], {}, []
    for size in SMALL:
        names = (OURS, *study.equals(task))
        scores = {name: study.scores_on_test(runs, task, name, size) for name in names}
        if few := [name for name in names if len(scores[name]) < 2]:
            missing = f"{METHODS[few[0]].title} at {size:.2%}"
            return replace(finding, failure=f"runs are missing: {missing}")
        means = {name: fmean(scores[name]) for name in names}
        best = max(names[1:], key=means.__getitem__)
        measured.append(
            f"{size:.2%}: {means[OURS]:.1%}, the best other is {METHODS[best].title} with"
            f" {means[best]:.1%}"
        )
        for other in names[1:]:
            title = METHODS[other].title
            difference = welch(scores[OURS], scores[other])
            found = outcome(difference)
            if found != "as claimed":
                failed[f"{title} at {size:.2%}"] = found
            value, low, high = (100 * x for x in astuple(difference))
            interval = Cell(f"{low:+.1f} to {high:+.1f}", low)
            percents = (number(100 * means[name], 1) for name in (OURS, other))
            cells = (*percents, Cell(f"{value:+.1f}", value), interval, word(found))
            rows.append((word(f"{size:.2%}"), word(title), *cells))
    names = ("Size", "Other method", "Ours %", "Other %", "Difference", "95 % interval", "Outcome")
    table = Table(f"patches-{task}-comparisons", "Comparisons", names, tuple(rows))
    named = ", ".join(f"{what} ({found})" for what, found in failed.items())
    remark = f"Not as claimed: {named}." if failed else ""
    undecided = failed and "the other way" not in failed.values()
    if undecided:
        remark += f" {NOT_DECIDED}"
    verdict = judge("; ".join(measured) + ".", None if undecided else not failed, remark)
    return replace(finding, verdict=verdict, comparisons=table)


def draw(runs: Runs, groups: Mapping[str, Sequence[str]], height: float | None = None) -> Figure:
    """Accuracy against the share of changed weights, a panel for each group of tasks."""
    rows = -(-len(groups) // 2)
    figure, axes = panels(min(2, len(groups)), rows, height=height or 0.8 + 3 * rows)
    flat = list(getattr(axes, "flat", axes))
    for axis, (title, tasks) in zip(flat, groups.items(), strict=False):
        _draw_curves(axis, runs, tasks)
        axis.set(title=title)
    for axis in flat[len(groups) :]:
        axis.remove()
    legend_below(figure, flat[0], columns=3)
    return figure


def _draw_curves(axis: Any, runs: Runs, tasks: Sequence[str]) -> None:
    for k, (name, method) in enumerate(METHODS.items()):
        whole, *means = (_mean(runs, tasks, name, size) for size in ALL_SIZES)
        known = {100 * s: y for s, y in zip(SIZES, means, strict=True) if y is not None}
        colour = COLOURS[k % len(COLOURS)]
        if not method.sized and whole is not None:  # bytes over 4 bytes each
            size = study.final_runs(runs, tasks[0], name)[0].bytes["all"] / 4 / WEIGHTS
            axis.plot(100 * size, whole, "o", color=GREY, label=method.title)
        elif known:
            form = "x" if method.per_size else "-o"
            width = {} if method.per_size else {"linewidth": 2.6 if name == OURS else 1.3}
            points = list(known), list(known.values())
            axis.plot(*points, form, color=colour, label=method.title, **width)
    lowest = min((y for size in SIZES if (y := _mean(runs, tasks, "adamw", size))), default=2.0)
    axis.set(xscale="log", xlabel="weights changed, %", ylabel="test accuracy, %")
    axis.set(ylim=(lowest - 2, None))  # that of AdamW's largest changes; DARE falls far below it


def _mean(runs: Runs, tasks: Sequence[str], method: str, size: float | None) -> float | None:
    """Mean test accuracy in %, over seeds and then over tasks; None if one of them has no runs."""
    scores = [study.scores_on_test(runs, task, method, size) for task in tasks]
    return 100 * fmean(map(fmean, scores)) if all(scores) else None


def accuracy_table(runs: Runs, task: str) -> Table:
    """Test accuracy by size, file sizes, and the share of weights with the base's bits."""
    columns = (*SIZE_COLUMNS, "kB at 0.10%", "compressed", "same bits F32", "BF16")
    rows = []
    for name, method in METHODS.items():
        lines = study.final_runs(runs, task, name)
        if not lines:
            continue
        at = study.column(SMALL[0]) if method.sized else "all"
        stored = [run for run in lines if at in run.bytes]
        kilobytes = [run.bytes[at] / 1000 for run in stored]
        packed = [run.compressed[at] / 1000 for run in stored if at in run.compressed]
        scores = (study.scores_on_test(runs, task, name, size) for size in ALL_SIZES)
        rows.append(
            (
                word(method.title),
                number(method.runs_of_a_curve, 0),
                *(mean(some, 1, 100) for some in scores),
                *(number(fmean(some), 0) if some else NOTHING for some in (kilobytes, packed)),
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


def _mean_table(runs: Runs) -> Table:
    """Means over the sets of sentences, for the methods that were run on all of them."""
    rows = []
    for name, method in METHODS.items():
        values = [_mean(runs, SENTENCES, name, size) for size in ALL_SIZES]
        if any(value is not None for value in values):
            cells = (NOTHING if value is None else number(value, 1) for value in values)
            rows.append((word(method.title), number(method.runs_of_a_curve, 0), *cells))
    note = "Test accuracy in %: mean over seeds, then over the four sets of sentences."
    return Table("patches-mean", "Mean over four tasks", SIZE_COLUMNS, tuple(rows), note)


def _untuned_table(runs: Runs) -> Table:
    """Validation accuracy of each setting that was tried on all sets of sentences."""
    rows = []
    for method in (OURS, *study.equals("cr")):
        for setting, scores in study.tuning_scores(runs, method):
            cells = (number(100 * score, 1) for score in (*scores, fmean(scores)))
            rows.append((word(METHODS[method].title), word(_setting(setting)), *cells))
    columns = ("Method", "Setting", *(TASKS[task] for task in SENTENCES), "mean")
    note = (
        "Validation accuracy in % with seed 0, mean of 0.1 % and 0.03 %. A method that needs no"
        " tuning has a row that is good on every task."
    )
    return Table("patches-untuned", "One setting for all tasks", columns, tuple(rows), note)


def _setting(setting: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in sorted(setting.items()))


def _tuning_table(runs: Runs, task: str) -> Table:
    """What tuning tried, with validation accuracy at the small sizes."""
    columns = {
        "Method": lambda run: word(METHODS[run.method].title),
        "Setting": lambda run: word(_setting(run.setting)),
        "Validation %": lambda run: number(100 * run.tuning_score, 1),
        "Seconds": lambda run: number(run.seconds, 0),
    }
    tried = [run for run in runs if run.task == task and not run.final]
    note = (
        "Mean validation accuracy at 0.1 % and 0.03 %, or at the only size there is; one seed."
        " Seconds are wall-clock time, with other work on the machine and pauses."
    )
    return Table.of(f"patches-{task}-tuning", f"{TASKS[task]}: tuning", columns, tried, note)
