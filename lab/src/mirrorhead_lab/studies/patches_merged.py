"""Three tasks from one base, their changes merged, each scored with its own head.

The settings are those that the study of patches chose. Nothing is tuned and nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from mirrorhead.patches import Patch
from mirrorhead_lab.datasets import Splits, Texts
from mirrorhead_lab.findings.table import Cell, Table, number, word
from mirrorhead_lab.models.pretrained import PretrainedClassifier, accuracy
from mirrorhead_lab.studies import patches
from mirrorhead_lab.studies.study import Method, Rows, Setting, Study, Trial
from mirrorhead_lab.training.sparse_tuning import Bench, train
from mirrorhead_lab.training.tuning import TuneSettings, patch_of

TASKS = ("trec", "sst2", "subj")
HOW: tuple[Literal["sum", "mean", "ties"], ...] = ("sum", "mean", "ties")
#: The chosen setting on each task, and the share of the changes that is kept: of AdamW's a fifth,
#: as TIES merging does.
CHOSEN: dict[str, tuple[dict[str, Setting], float]] = {
    "mirror": (
        {
            "trec": {"p": 1.02, "reach": 1.5},
            "sst2": {"p": 1.05, "reach": 1.5},
            "subj": {"p": 1.02, "reach": 1.5},
        },
        0.001,
    ),
    "adamw": ({task: {"lr": 5e-5} for task in TASKS}, 0.2),
}


class Scores(Struct, frozen=True):
    """Test accuracy of each task, by how the changes were merged."""

    test: dict[str, dict[str, float]]


Data = dict[str, tuple[Path, Splits[Texts]]]


def load(task: str, folder: Path | None) -> Data:
    return {name: patches.load(name, folder) for name in TASKS}


def run(trial: Trial, data: Data, folder: Path, texts: int = 2000) -> Scores:
    """Tune each task from the base, merge what changed, and score."""
    settings, share = CHOSEN[trial.method]
    parts: list[tuple[Bench, PretrainedClassifier, Patch]] = []
    for task in TASKS:
        bench = Bench(*data[task], TuneSettings(texts=texts, max_length=32, seed=trial.seed))
        model = train(bench, trial.method, settings[task])
        total = sum(w.numel() for w in model.train_matrices().values())
        parts.append((bench, model, patch_of(model, model.tuned_state(), round(share * total))))
    return Scores({how: dict(_scores(parts, how)) for how in HOW})


def _scores(
    parts: list[tuple[Bench, PretrainedClassifier, Patch]], how: Literal["sum", "mean", "ties"]
) -> Iterator[tuple[str, float]]:
    merged = Patch.merge([patch.without("head.*") for *_, patch in parts], how)
    for task, (bench, model, _) in zip(TASKS, parts, strict=True):
        state = {name: tensor.clone() for name, tensor in model.base.items()}
        merged.apply(state)
        head = {f"head.{name}": t.clone() for name, t in model.head.state_dict().items()}
        model.load_tuned(state | head)
        yield task, accuracy(model, bench.sets.test)


def table(rows: Rows[Scores]) -> Table:
    def cells(method: str, how: str, found: Scores) -> tuple[Cell, ...]:
        scores = (number(100 * found.test[how][task], 1) for task in TASKS)
        return word(method), word(how), *scores

    every = [cells(row.trial.method, how, row.measured) for row in rows for how in HOW]
    columns = ("Changes", "Merged by", *(patches.TASKS[task] for task in TASKS))
    return Table("patches-merged", "Merging", columns, tuple(every), "Test accuracy in %.")


STUDY = Study(
    name="patches-merged",
    title="Patches of three tasks, merged",
    methods={name: Method(({"kept": share},)) for name, (_, share) in CHOSEN.items()},
    seeds=(0,),
    measured=Scores,
    load=load,
    run=run,
    score=lambda measured: 0.0,
    seconds=600,
    tuning="the settings are those that the study of patches chose",
    tables=lambda rows: (table(rows),),
)
