"""Patches: who is accurate with few changed weights?

all-MiniLM-L6-v2; 2,000 training texts of at most 32 tokens, two epochs (IMDb: 1,500 of 128). The
settings of each method are compared on validation data, by the mean accuracy at 0.1 % and 0.03 %.
Five seeds of the chosen one are scored on test data. IMDb is a confirmation without tuning: the
setting that was best on average over the other tasks, three seeds. Trained models are kept, because
several runs rest on the same training: the final run of seed 0 is a tuning run, DARE starts from
AdamW's model, and so do LT-SFT's masks.

TREC was the task of development: on its validation data, ours was screened in about 30 runs,
proximal l1 in 23, the soft threshold in 11 and sinh in 5 (docs/evidence/patches-screening.md). The
settings were fixed before the other tasks' test data were read, but for two of the five of proximal
l1, which were added after that of SST-2.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mirrorhead.patches.file_format import encode
from mirrorhead_lab.datasets import Splits, Texts, find, load_imdb
from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.findings.statistics import NOT_DECIDED, outcome, welch
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, mean, number, word
from mirrorhead_lab.models.pretrained import PretrainedClassifier, accuracy, default_encoder
from mirrorhead_lab.plots import COLOURS, GREY, legend_below, panels
from mirrorhead_lab.runtime.errors import Diverged
from mirrorhead_lab.studies.study import Drawing, Method, Row, Rows, Setting, Study, Trial
from mirrorhead_lab.studies.tables import in_words
from mirrorhead_lab.training.sparse_tuning import Bench, dare, identical, kept_or_trained, train
from mirrorhead_lab.training.tuning import TuneSettings, patch_of
from mirrorhead_lab.verdicts import judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = {"trec": "TREC", "sst2": "SST-2", "subj": "Subj", "cr": "CR", "imdb": "IMDb"}
#: Each method is tuned and run on these; IMDb confirms the best three.
SENTENCES = ("trec", "sst2", "subj", "cr")
CONFIRMED = ("mirror", "proximal", "soft")
#: Settings were screened here, and its test data were read before the last ones were added.
DEVELOPMENT = "trec"
#: Shares of the weights that a patch changes.
SIZES = (0.1, 0.01, 0.003, 0.001, 0.0003, 0.0001)
#: Where the claim is decided.
SMALL = (0.001, 0.0003)
ALL_SIZES = (None, *SIZES)
SIZE_COLUMNS = ("Method", "Runs", "all", *(f"{size:.2%}" for size in SIZES))
OURS = "mirror"
SEEDS = range(5)
CONFIRMING_SEEDS = range(3)
#: Weights of MiniLM in the matrices that are tuned.
WEIGHTS = 10_616_832


@dataclass(frozen=True)
class How:
    """How a method gives patches.

    trains: the name of its training, where it shares that of another method.
    per_size: a mask is chosen beforehand, so each size needs training of its own.
    runs: training runs behind one run.
    sized: False if the method itself fixes the size (LoRA, BitFit).
    """

    trains: str
    per_size: bool = False
    runs: int = 1
    sized: bool = True

    @property
    def runs_of_a_curve(self) -> int:
        """Training runs behind accuracy at the two small sizes."""
        return self.runs * (len(SMALL) if self.per_size else 1)


def _method(title: str, trains: str, *settings: Setting, tasks: Any = SENTENCES, **how: Any):
    if how.get("per_size"):
        settings = tuple({**one, "size": SMALL[0]} for one in settings)
    return Method(settings, How(trains, **how), tasks, title)


def _lr(*rates: float, **fixed: float) -> tuple[Setting, ...]:
    return tuple({"lr": rate, **fixed} for rate in rates)


METHODS = {
    OURS: _method(
        "MirrorAdam, centred", "mirror", *({"p": p, "reach": 1.5} for p in (1.05, 1.02, 1.03))
    ),
    # The settings of a first comparison.
    "mirror-first": _method(
        "MirrorAdam, first settings",
        "mirror",
        *({"p": p, "reach": reach} for p, reach in ((1.05, 0.5), (1.05, 1.5), (1.1, 0.5))),
        tasks=("trec",),
    ),
    "adamw": _method("AdamW, largest changes", "adamw", *_lr(5e-5, 1e-4, 2e-4)),
    "dare": _method("AdamW, DARE", "adamw", *_lr(5e-5, 1e-4, 2e-4)),
    "proximal": _method(
        "AdamW, proximal l1",
        "proximal",
        *(
            {"lr": lr, "l1": l1}
            for lr, l1 in ((0.03, 0.9), (0.05, 0.95), (0.05, 0.98), (0.1, 0.9), (0.1, 0.95))
        ),
    ),
    "soft": _method(
        "soft threshold (AdaBreg)",
        "soft",
        *(
            {"lr": lr, "threshold": threshold}
            for lr, threshold in ((5e-3, 0.2), (5e-3, 0.25), (0.015, 0.8))
        ),
    ),
    "sinh": _method(
        "hyperbolic entropy",
        "sinh",
        *({"lr": lr, "scale": s} for lr, s in ((2e-5, 1.4e-4), (2e-6, 1.1e-5), (2e-7, 1e-6))),
        tasks=("trec",),
    ),
    **{
        f"lora-{rank}": _method(
            f"LoRA, rank {rank}", "lora", *_lr(5e-4, 1e-3, 3e-3, rank=rank), sized=False
        )
        for rank in (1, 4, 16)
    },
    "bitfit": _method("BitFit", "bitfit", *_lr(1e-3, 3e-3, 1e-2), sized=False),
    "random-mask": _method("random mask", "random-mask", *_lr(1e-3, 3e-3, 1e-2), per_size=True),
    "gradient-mask": _method(
        "mask of the largest gradients", "gradient-mask", *_lr(1e-3, 3e-3, 1e-2), per_size=True
    ),
    "lt-sft": _method("LT-SFT", "lt-sft", *_lr(3e-4, 1e-3, 3e-3), per_size=True, runs=2),
}


class Scores(Struct, frozen=True, omit_defaults=True):
    """Accuracies and bytes of patches by size: "all", "0.1", ... (see `column`).

    identical: share of the weights with the base's bits, in float32 and in bf16.
    """

    identical: dict[str, float]
    validation: dict[str, float] = {}
    test: dict[str, float] = {}
    bytes: dict[str, int] = {}
    compressed: dict[str, int] = {}


PatchRows = Rows[Scores]


def column(size: float | None) -> str:
    """Return the name of a size in a run.

    >>> column(0.001), column(None)
    ('0.001', 'all')
    """
    return "all" if size is None else f"{size:g}"


def load(task: str, folder: Path | None) -> tuple[Path, Splits[Texts]]:
    """Return the encoder's folder and the texts; IMDb with a validation set drawn from train."""
    encoder = default_encoder()
    if task != "imdb":
        return encoder, find(task).read(folder)
    parts = {split: load_imdb(split, folder) for split in ("train", "test")}
    texts = {s: Texts(part.texts, part.labels).sample(None) for s, part in parts.items()}

    def cut(split: str, start: int, end: int) -> Texts:
        return Texts(texts[split].texts[start:end], texts[split].labels[start:end])

    sets = cut("train", 0, 1500), cut("train", 1500, 2500), cut("test", 0, 1000)
    return encoder, Splits("imdb", ("negative", "positive"), *sets)


def run(
    trial: Trial, data: tuple[Path, Splits[Texts]], folder: Path, texts: int | None = None
) -> Scores:
    """Train, and score patches of every size.

    A tuning run is scored on validation data at the sizes that decide, a final one on test data at
    all sizes. A run that diverges has nothing right.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
    long, how = trial.task == "imdb", METHODS[trial.method].how
    settings = TuneSettings(
        texts=texts or (1500 if long else 2000), max_length=128 if long else 32, seed=trial.seed
    )
    bench = Bench(*data, settings)
    sizes: list[float | None] = [None]
    if how.sized:
        own = trial.setting.get("size")
        sizes = [own] if own else [None, *(SIZES if trial.final else SMALL)]
    scored, bytes_, compressed = dict[str, float](), dict[str, int](), dict[str, int]()
    try:
        model = tuned_model(trial, bench, folder.parent)
    except Diverged:
        nothing, same = dict.fromkeys(map(column, sizes), 0.0), {"F32": 0.0, "BF16": 0.0}
        return Scores(same, test=nothing) if trial.final else Scores(same, validation=nothing)
    tokens = bench.sets.test if trial.final else bench.sets.validation
    total = sum(w.numel() for w in model.train_matrices().values())
    tuned = model.tuned_state()
    for size in sizes:
        name, state, count = column(size), tuned, None
        if size is not None and trial.method == "dare":
            state = dare(model.base, tuned, size, trial.seed)
        elif size is not None:
            count = max(1, round(size * total))
        patch = patch_of(model, state, count)
        patched = {n: t.clone() if n in patch.tensors else t for n, t in model.base.items()}
        patch.apply(patched)
        model.load_tuned(patched)
        scored[name] = accuracy(model, tokens)
        stored = encode(patch.without("head.*").tensors, patch.weights, {}, originals=False)
        bytes_[name], compressed[name] = len(stored), len(zlib.compress(stored, 9))
    if how.trains == "lora":
        rank, matrices = int(trial.setting["rank"]), model.train_matrices().values()
        bytes_, compressed = {"all": sum(4 * rank * sum(w.shape) for w in matrices)}, {}
    about: Any = {"bytes": bytes_, "compressed": compressed}
    about["test" if trial.final else "validation"] = scored
    return Scores(identical(model.base, tuned), **about)


def tuned_model(trial: Trial, bench: Bench, models: Path) -> PretrainedClassifier:
    """Return the model of a run, as it was kept in a folder of models, or trained now and kept."""
    if METHODS[trial.method].how.trains == "adamw":
        trial = Trial(method="adamw", setting=trial.setting, seed=trial.seed, task=trial.task)

    def adamw(lr: float) -> PretrainedClassifier:
        about: Any = {"method": "adamw", "seed": trial.seed, "task": trial.task}
        return tuned_model(Trial(setting={"lr": lr}, **about), bench, models)

    how = METHODS[trial.method].how
    return kept_or_trained(
        bench,
        models / trial.training / "model.safetensors",
        lambda: train(bench, how.trains, trial.setting, adamw),
    )


def score(measured: Scores) -> float:
    """Return mean validation accuracy at the small sizes, or at the only size that there is."""
    found = measured.validation
    small = [found[column(size)] for size in SMALL if column(size) in found]
    return fmean(small or found.values() or [0.0])


def more(rows: PatchRows) -> Iterator[Trial]:
    """Yield final runs of masks of the other size, and the confirmation on IMDb."""
    for task in SENTENCES:
        for name, method in METHODS.items():
            if method.how.per_size and (chosen := rows.chosen(name, task)):
                for seed in SEEDS:
                    other = {**chosen, "size": SMALL[1]}
                    yield Trial(method=name, setting=other, seed=seed, final=True, task=task)
    for seed in CONFIRMING_SEEDS:
        for name in CONFIRMED:
            if setting := best_setting(rows, name):
                yield Trial(method=name, setting=setting, seed=seed, final=True, task="imdb")


def tuning_scores(rows: PatchRows, method: str) -> list[tuple[Setting, list[float]]]:
    """Return each setting that was tried on all sets of sentences, with its score on each."""
    tried = [row for row in rows if row.trial.method == method and not row.trial.final]
    found: list[tuple[Setting, list[float]]] = []
    for row in tried:
        setting = row.trial.setting
        same = {r.trial.task: score(r.measured) for r in tried if r.trial.setting == setting}
        scores = [same[task] for task in SENTENCES if task in same]
        if len(scores) == len(SENTENCES) and (setting, scores) not in found:
            found.append((setting, scores))
    return found


def best_setting(rows: PatchRows, method: str) -> Setting | None:
    """Return the setting with the best mean validation score, once all were tried everywhere."""
    found, settings = tuning_scores(rows, method), METHODS[method].settings
    if len(found) < len(settings):
        return settings[0] if rows.supposed else None
    return max(found, key=lambda one: fmean(one[1]))[0]


def final_rows(rows: PatchRows, task: str, method: str) -> list[Row[Scores]]:
    """Return the final runs with the chosen setting, those of masks for both sizes.

    A file may have others, of a setting that was the best before more of them were compared.
    """
    setting = best_setting(rows, method) if task == "imdb" else rows.chosen(method, task)
    if setting is None:
        return []
    masks = METHODS[method].how.per_size
    settings = [{**setting, "size": size} for size in SMALL] if masks else [setting]
    return [row for one in settings for row in rows.at(method, one, SEEDS, task)]


def scores_on_test(rows: PatchRows, task: str, method: str, size: float | None) -> list[float]:
    """Return the test accuracy of each seed at a size."""
    found = [row.measured.test for row in final_rows(rows, task, method)]
    return [test[column(size)] for test in found if column(size) in test]


def equals(task: str) -> list[str]:
    """Return the methods whose whole curve on a task comes from one training run, as ours does."""
    return [
        name
        for name, method in METHODS.items()
        if method.how.sized and not method.how.per_size
        and (task in (method.tasks or ()) or (task == "imdb" and name in CONFIRMED))
        and name not in (OURS, "mirror-first")
    ]  # fmt: skip


def shown_tasks(rows: PatchRows) -> list[str]:
    """Return the tasks that have final runs."""
    return [task for task in TASKS if any(r.trial.final and r.trial.task == task for r in rows)]


def judge_task(rows: PatchRows, task: str) -> Finding:
    """Judge whether ours is best at the small sizes on one task."""
    finding = Finding(
        name=f"patches-{task}",
        title=f"Patches on {TASKS[task]}: the most accurate at small sizes",
        claim=f"On {TASKS[task]}, MirrorAdam centred at the pretrained weights is more accurate"
        " than every other method with one training run if 0.1 % or 0.03 % of the weights may"
        " change.",
        command=STUDY.command,
        docs=STUDY.docs,
        about="To make the runs:",
    )
    cells, failed, measured = [], {}, []
    for size in SMALL:
        names = (OURS, *equals(task))
        scores = {name: scores_on_test(rows, task, name, size) for name in names}
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
            said = Cell(f"{value:+.1f}", value), interval, word(found)
            cells.append((word(f"{size:.2%}"), word(title), *percents, *said))
    names = ("Size", "Other method", "Ours %", "Other %", "Difference", "95 % interval", "Outcome")
    table = Table(f"patches-{task}-comparisons", "Comparisons", names, tuple(cells))
    named = ", ".join(f"{what} ({found})" for what, found in failed.items())
    remark = f"Not as claimed: {named}." if failed else ""
    undecided = failed and "the other way" not in failed.values()
    if undecided:
        remark += f" {NOT_DECIDED}"
    verdict = judge("; ".join(measured) + ".", None if undecided else not failed, remark)
    return replace(finding, verdict=verdict, comparisons=table)


def draw(
    rows: PatchRows, groups: Mapping[str, Sequence[str]], height: float | None = None
) -> Figure:
    """Draw accuracy against the share of changed weights, a panel for each group of tasks."""
    lines = -(-len(groups) // 2)
    figure, axes = panels(min(2, len(groups)), lines, height=height or 0.8 + 3 * lines)
    flat = list(getattr(axes, "flat", axes))
    for axis, (title, tasks) in zip(flat, groups.items(), strict=False):
        _draw_curves(axis, rows, tasks)
        axis.set(title=title)
    for axis in flat[len(groups) :]:
        axis.remove()
    legend_below(figure, flat[0], columns=3)
    return figure


def _draw_curves(axis: Any, rows: PatchRows, tasks: Sequence[str]) -> None:
    for k, (name, method) in enumerate(METHODS.items()):
        whole, *means = (_mean(rows, tasks, name, size) for size in ALL_SIZES)
        known = {100 * s: y for s, y in zip(SIZES, means, strict=True) if y is not None}
        colour = COLOURS[k % len(COLOURS)]
        if not method.how.sized and whole is not None:  # bytes over 4 bytes each
            size = final_rows(rows, tasks[0], name)[0].measured.bytes["all"] / 4 / WEIGHTS
            axis.plot(100 * size, whole, "o", color=GREY, label=method.title)
        elif known:
            form = "x" if method.how.per_size else "-o"
            width = {} if method.how.per_size else {"linewidth": 2.6 if name == OURS else 1.3}
            points = list(known), list(known.values())
            axis.plot(*points, form, color=colour, label=method.title, **width)
    lowest = min((y for size in SIZES if (y := _mean(rows, tasks, "adamw", size))), default=2.0)
    axis.set(xscale="log", xlabel="weights changed, %", ylabel="test accuracy, %")
    axis.set(ylim=(lowest - 2, None))  # that of AdamW's largest changes; DARE falls far below it


def _mean(rows: PatchRows, tasks: Sequence[str], method: str, size: float | None) -> float | None:
    """Return mean test accuracy in %, over seeds, then tasks; None if one of them has no runs."""
    scores = [scores_on_test(rows, task, method, size) for task in tasks]
    return 100 * fmean(map(fmean, scores)) if all(scores) else None


def accuracy_table(rows: PatchRows, task: str) -> Table:
    """Return test accuracy by size, file sizes, and the share of weights with the base's bits."""
    columns = (*SIZE_COLUMNS, "kB at 0.10%", "compressed", "same bits F32", "BF16")
    cells = []
    for name, method in METHODS.items():
        found = [row.measured for row in final_rows(rows, task, name)]
        if not found:
            continue
        at = column(SMALL[0]) if method.how.sized else "all"
        stored = [run for run in found if at in run.bytes]
        kilobytes = [run.bytes[at] / 1000 for run in stored]
        packed = [run.compressed[at] / 1000 for run in stored if at in run.compressed]
        scores = (scores_on_test(rows, task, name, size) for size in ALL_SIZES)
        cells.append(
            (
                word(method.title),
                number(method.how.runs_of_a_curve, 0),
                *(mean(some, 1, 100) for some in scores),
                *(number(fmean(some), 0) if some else NOTHING for some in (kilobytes, packed)),
                *(number(fmean(r.identical[kind] for r in found), 3) for kind in ("F32", "BF16")),
            )
        )
    note = (
        "Test accuracy in %, mean over seeds ± their standard deviation, by the share of weights"
        " changed. Runs: training runs behind accuracy at 0.1 % and 0.03 %. Bytes are those of the"
        " patch without the head; of LoRA and BitFit, their only size. Same bits: share of the"
        " weights in tuned tensors that equal the base's before any are dropped."
    )
    title = f"{TASKS[task]}: accuracy"
    return Table(f"patches-{task}-accuracy", title, columns, tuple(cells), note)


def mean_table(rows: PatchRows) -> Table:
    """Return means over the sets of sentences, for the methods that were run on all of them."""
    cells = []
    for name, method in METHODS.items():
        values = [_mean(rows, SENTENCES, name, size) for size in ALL_SIZES]
        if any(value is not None for value in values):
            means = (NOTHING if value is None else number(value, 1) for value in values)
            cells.append((word(method.title), number(method.how.runs_of_a_curve, 0), *means))
    note = "Test accuracy in %: mean over seeds, then over the four sets of sentences."
    return Table("patches-mean", "Mean over four tasks", SIZE_COLUMNS, tuple(cells), note)


def untuned_table(rows: PatchRows) -> Table:
    """Return validation accuracy of each setting that was tried on all sets of sentences."""
    cells = []
    for method in (OURS, *equals("cr")):
        for setting, scores in tuning_scores(rows, method):
            means = (number(100 * score, 1) for score in (*scores, fmean(scores)))
            cells.append((word(METHODS[method].title), word(in_words(setting)), *means))
    columns = ("Method", "Setting", *(TASKS[task] for task in SENTENCES), "mean")
    note = (
        "Validation accuracy in % with seed 0, mean of 0.1 % and 0.03 %. A method that needs no"
        " tuning has a row that is good on every task."
    )
    return Table("patches-untuned", "One setting for all tasks", columns, tuple(cells), note)


def tuning_table(rows: PatchRows, task: str) -> Table:
    """Return what tuning tried, with validation accuracy at the small sizes."""

    def setting(row: Row[Scores]) -> Cell:
        return word(in_words({k: v for k, v in row.trial.setting.items() if k != "size"}))

    columns = {
        "Method": lambda row: word(METHODS[row.trial.method].title),
        "Setting": setting,
        "Validation %": lambda row: number(100 * score(row.measured), 1),
        "Seconds": lambda row: number(row.seconds, 0),
    }
    tried = [row for row in rows if row.trial.task == task and not row.trial.final]
    note = (
        "Mean validation accuracy at 0.1 % and 0.03 %, or at the only size there is; one seed."
        " Seconds are wall-clock time, with other work on the machine and pauses."
    )
    return Table.of(f"patches-{task}-tuning", f"{TASKS[task]}: tuning", columns, tried, note)


def about(rows: PatchRows) -> str:
    return (
        "All-MiniLM-L6-v2 (6 layers, 10.6 million weights in matrices) is fine-tuned for two epochs"
        " of 2,000 texts with at most 32 tokens (IMDb: 1,500 reviews, 128 tokens). Then only the"
        f" largest changes are kept. {len(rows)} runs."
    )


def findings(rows: PatchRows) -> Iterator[Finding]:
    return (judge_task(rows, task) for task in shown_tasks(rows) if task != DEVELOPMENT)


def tables(rows: PatchRows) -> Iterator[Table]:
    yield mean_table(rows)
    yield untuned_table(rows)
    for table in (accuracy_table, tuning_table):
        for task in shown_tasks(rows):
            yield table(rows, task)


CAPTION = (
    "Test accuracy with only the largest changes kept: mean over seeds{}. The head is not"
    " counted. Grey dots: LoRA and BitFit, whose sizes are fixed; crosses: masks chosen"
    " beforehand, trained for each size. DARE falls below the picture."
)
STUDY = Study(
    name="patches",
    title="Patches: fine-tune and change few weights",
    methods=METHODS,
    tasks=tuple(TASKS),
    seeds=tuple(SEEDS),
    measured=Scores,
    load=load,
    run=run,
    score=score,
    more=more,
    seconds=150,
    about=about,
    tuning=(
        "three settings of each method (proximal l1: five), by mean validation accuracy at 0.1 %"
        " and 0.03 %"
    ),
    verdict_rule=(
        "For each task the claim holds if the mean test accuracy of centred MirrorAdam is above"
        " that of every other method whose whole curve comes from one training run, with 0.1 % and"
        " with 0.03 % of the weights changed, and Welch's 95 % interval of each difference lies"
        " entirely above 0. It does not hold if an interval lies entirely below 0, and is otherwise"
        " not decided. TREC has no verdict: it was the task of development, and its test data were"
        " read before the last settings were added."
    ),
    findings=findings,
    figures=(
        Drawing(
            "mean",
            CAPTION.format(" and four tasks"),
            partial(draw, groups={"": SENTENCES}, height=4.2),
            shown=lambda rows: {*shown_tasks(rows)} >= {*SENTENCES},
        ),
        Drawing(
            "",
            CAPTION.format(""),
            lambda rows: draw(rows, {TASKS[task]: [task] for task in shown_tasks(rows)}),
            shown=lambda rows: bool(shown_tasks(rows)),
        ),
    ),
    tables=tables,
    docs=("evidence/patches", "verdicts"),
)
