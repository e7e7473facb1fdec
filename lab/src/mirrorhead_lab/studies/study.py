"""A study: methods, tuned alike on validation data and compared over seeds on test data.

For each task and method, tuning makes one run of every setting with the tuning seed, and the best
validation score chooses, of equals the first setting. The chosen one is run with every seed, and
only these final runs read the test set. A study of your own is a module with an object STUDY:

    STUDY = Study(name=..., title=..., methods=..., seeds=..., measured=..., load=..., run=...,
                  score=..., claims=...)

    mirrorhead study my.module
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct

from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.findings.finding import Finding, Part
from mirrorhead_lab.findings.table import Table
from mirrorhead_lab.plots import Figure
from mirrorhead_lab.runtime.fingerprints import digest
from mirrorhead_lab.studies import claims as judging
from mirrorhead_lab.studies.claims import Claim

M = TypeVar("M")
N = TypeVar("N")
Setting = dict[str, float]


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        settings: what tuning compares; a single one needs no tuning.
        how: what the study's `run` has to know besides the setting.
        tasks: those that it is run on; None: all.
        title: its name in tables, if it is not the name in the study.
    """

    settings: tuple[Setting, ...]
    how: Any = None
    tasks: tuple[str, ...] | None = None
    title: str = ""


class Trial(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A run to make; the run reads test data exactly if it is final."""

    method: str
    setting: Setting
    seed: Annotated[int, Meta(ge=0)]
    final: bool = False
    task: str = ""

    def __hash__(self) -> int:
        return hash((self.task, self.method, self.seed, self.final))

    def __str__(self) -> str:
        numbers = ", ".join(f"{key} {value:g}" for key, value in self.setting.items())
        words = [self.task, self.method, numbers, f"seed {self.seed}", "final" * self.final]
        return ", ".join(word for word in words if word)

    @property
    def training(self) -> str:
        """A hash that a tuning run and a final run have in common if their training is the same."""
        setting = {key: float(value) for key, value in self.setting.items()}
        return digest([self.task, self.method, setting, self.seed])


class Row(Struct, Generic[M], frozen=True, forbid_unknown_fields=True):
    """A run that was made: a line of the study's file; 0 seconds are unknown ones."""

    trial: Trial
    measured: M
    seconds: Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class Drawing:
    """A figure of a study; its name follows that of the study in ids, and may be empty."""

    name: str
    caption: str
    draw: Callable[[Rows[Any]], Figure]
    shown: Callable[[Rows[Any]], bool] = lambda rows: True


def own_runs(rows: Rows[Any], side: str) -> list[Row[Any]]:
    """Return the final runs of "method" or "method on task"; a ValueError says what is missing."""
    method, _, task = side.partition(" on ")
    if method not in rows.study.methods:
        raise ValueError(f"{rows.study.name} has no method {method}")
    setting = rows.chosen(method, task)
    if setting is None:
        raise ValueError(f"the tuning of {side} is not finished, or all its settings diverged")
    return rows.complete(method, setting, rows.study.seeds, task)


def plain_table(rows: Rows[Any]) -> list[Table]:
    """Return the table of tuning: what most studies need besides tables of their own."""
    from mirrorhead_lab.studies.tables import tuning_table

    return [tuning_table(rows)]


@dataclass(frozen=True, kw_only=True)
class Study(Generic[M]):
    """What is trained, what is measured, what is claimed.

    Args:
        name: in the command, and of the file of its runs, results/<name>.jsonl.
        title: the heading of its part of the report.
        methods: by the names that claims use.
        tasks: what each method is tuned and run on; one task needs no name.
        seeds: of the final runs; none if nothing is read from test data.
        tuning_seed: the first seed if None.
        measured: the class of what a run measures. If it has a field `test`, that must be None or
            empty in a run that is not final.
        load: reads the data of a task from the folder of all data sets; an error says what is
            missing. It is called once a process and before any run.
        run: trains, and measures on validation data; on test data only if the trial is final. Its
            arguments are the trial, the data and a folder, which is the same for a tuning run and a
            final run of the same training: what is expensive can be kept there.
        score: of validation, larger is better; None if the run diverged.
        more: trials beyond tuning and final runs, given the rows that are there.
        seconds: what a run takes, for estimates before there are rows.
        about: what was trained on what; a text, or how it follows from the rows.
        tuning: how settings were chosen, without a full stop; by default it follows from the rest.
        verdict_rule: how claims are judged.
        claims: are judged one by one, see `mirrorhead_lab.studies.claims`.
        findings: instead of claims, for a study that judges in another way.
        side: the runs that the side of a comparison names.
        guess: the measured value that counts for a run that diverged; None: it is left out, and
            named.
        figures, tables: of its part of the report.
        docs: page and section of the docs.
        shared: whether its file may have runs of other methods, which are left out.
        prefix: of the ids of its figures and tables; the name if empty.
        group: of its findings in the report.
    """

    name: str
    title: str
    methods: Mapping[str, Method]
    tasks: tuple[str, ...] = ("",)
    seeds: tuple[int, ...]
    tuning_seed: int | None = None
    measured: type[M]
    load: Callable[[str, Path | None], Any]
    run: Callable[[Trial, Any, Path], M]
    score: Callable[[M], float | None]
    more: Callable[[Rows[M]], Iterable[Trial]] = lambda rows: ()
    seconds: float = 60.0
    about: str | Callable[[Rows[M]], str] = ""
    tuning: str = ""
    verdict_rule: str = judging.PLAIN_RULE
    claims: Sequence[Claim] = ()
    findings: Callable[[Rows[M]], Iterable[Finding]] | None = None
    side: Callable[[Rows[M], str], list[Row[M]]] = own_runs
    guess: float | None = None
    figures: Sequence[Drawing] = ()
    tables: Callable[[Rows[M]], Iterable[Table]] = plain_table
    docs: tuple[str, str] = ("", "")
    shared: bool = False
    prefix: str = ""
    group: str = "Beyond the paper"

    def __post_init__(self) -> None:
        for name, method in self.methods.items():
            settings = list(method.settings)
            if not settings or any(one in settings[:k] for k, one in enumerate(settings)):
                raise ValueError(f"settings of {name!r} must be distinct, at least one")
            if unknown := {*(method.tasks or ())} - {*self.tasks}:
                raise ValueError(f"tasks of {name!r} must be of {self.tasks}, got {min(unknown)!r}")
        if len({*self.seeds}) != len(self.seeds) or min(self.seeds, default=0) < 0:
            raise ValueError(f"seeds must be different numbers, none negative, got {self.seeds}")
        if not self.seeds and self.tuning_seed is None:
            raise ValueError("a study without seeds needs a tuning_seed")

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl"

    @property
    def id(self) -> str:
        return self.prefix or self.name

    @property
    def command(self) -> str:
        return f"mirrorhead study {self.name}"

    def tuning_trials(self, method: str, task: str = "") -> list[Trial]:
        """Return the runs that choose the setting of a method on a task."""
        seed = self.seeds[0] if self.tuning_seed is None else self.tuning_seed
        settings = self.methods[method].settings
        return [Trial(method=method, setting=s, seed=seed, task=task) for s in settings]

    def tasks_of(self, method: str) -> tuple[str, ...]:
        """Return the tasks that a method is tuned and run on."""
        own = self.methods[method].tasks
        return self.tasks if own is None else own

    def check(self, trial: Trial, measured: M) -> None:
        """Refuse rows of other methods, and test scores of a run that is not final."""
        if trial.method not in self.methods:
            known = ", ".join(self.methods)
            raise ValueError(f"method must be one of {known}, got {trial.method!r}")
        if trial.task not in self.tasks:
            raise ValueError(f"task must be one of {', '.join(self.tasks)}, got {trial.task!r}")
        if not trial.final and getattr(measured, "test", None) not in (None, {}, ()):
            raise ValueError("a run that is not final must not have test scores")

    def part(self, rows: Rows[M]) -> Part:
        """Judge, draw and tabulate the study."""
        judged = self.findings(rows) if self.findings else (
            judging.judge_rows(rows, claim) for claim in self.claims
        )  # fmt: skip
        figures = (
            PartFigure(
                f"{self.id}-{one.name}-figure".replace("--", "-"),
                one.caption,
                partial(one.draw, rows),
            )
            for one in self.figures
            if one.shown(rows)
        )
        return Part(
            self.id,
            self.title,
            self.about if isinstance(self.about, str) else self.about(rows),
            self.tuning or self._tuning_in_words(),
            self.verdict_rule,
            self.command,
            tuple(judged),
            tuple(figures),
            tuple(table for table in self.tables(rows) if table.rows),
            self.group,
        )

    def _tuning_in_words(self) -> str:
        counts = sorted({len(method.settings) for method in self.methods.values()})
        return (
            f"{' or '.join(map(str, counts))} settings for each method, each run once; the best"
            " validation score chooses, of equals the first; the chosen one is run with"
            f" {len(self.seeds)} seeds, and only these read the test set"
        )


@dataclass(frozen=True, eq=False)
class Rows(Generic[M]):
    """The runs of a study that are there, by trial.

    supposed: take the first setting where tuning has not chosen yet, to see which runs will follow.
    folder: of the file that they are from, where other studies have theirs.
    """

    study: Study[M]
    by_trial: Mapping[Trial, Row[M]] = field(default_factory=dict)
    supposed: bool = False
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.by_trial)

    def __iter__(self) -> Iterator[Row[M]]:
        return iter(self.by_trial.values())

    def __contains__(self, trial: Trial) -> bool:
        return trial in self.by_trial

    def get(self, trial: Trial) -> Row[M] | None:
        return self.by_trial.get(trial)

    def of_study(self, study: Study[N]) -> Rows[N]:
        """Return the runs of another study that are there, for claims that rest on both."""
        from mirrorhead_lab.studies.engine import read_rows

        return Rows(study) if self.folder is None else read_rows(study, self.folder / study.file)

    def diverged(self, row: Row[M]) -> bool:
        return self.study.score(row.measured) is None

    def trainings(self) -> int:
        """Return how many runs trained: a final run may rest on the training of a tuning run."""
        return len({row.trial.training for row in self})

    def chosen(self, method: str, task: str = "") -> Setting | None:
        """Return the setting that tuning chose; None if it is not finished or all diverged."""
        settings = self.study.methods[method].settings
        if len(settings) == 1:
            return settings[0]
        tried = [self.get(trial) for trial in self.study.tuning_trials(method, task)]
        if None in tried:
            return settings[0] if self.supposed else None
        scored = [(self.study.score(row.measured), row.trial.setting) for row in tried if row]
        alive = [(score, setting) for score, setting in scored if score is not None]
        return max(alive, key=lambda one: one[0])[1] if alive else None

    def at(
        self, method: str, setting: Setting | None, seeds: Iterable[int], task: str = ""
    ) -> list[Row[M]]:
        """Return the final runs with a setting that are there."""
        if setting is None:
            return []
        about = {"method": method, "setting": setting, "task": task, "final": True}
        found = (self.get(Trial(seed=seed, **about)) for seed in seeds)
        return [row for row in found if row is not None]

    def final(self, method: str, task: str = "") -> list[M]:
        """Return what final runs at the chosen setting measured, but for those that diverged."""
        found = self.at(method, self.chosen(method, task), self.study.seeds, task)
        return [row.measured for row in found if not self.diverged(row)]

    def complete(
        self, method: str, setting: Setting, seeds: Sequence[int], task: str = ""
    ) -> list[Row[M]]:
        """Return the final runs with a setting; a ValueError names the seeds that are missing."""
        found = self.at(method, setting, seeds, task)
        if left := sorted({*seeds} - {row.trial.seed for row in found}):
            raise ValueError(f"{method} has no final run of seeds {', '.join(map(str, left))}")
        return found

    def wanted(self) -> list[Trial]:
        """Return all trials that can be named now: tuning, final runs of what it chose, more."""
        study = self.study
        pairs = [
            (t, name) for t in study.tasks for name in study.methods if t in study.tasks_of(name)
        ]
        found = [
            trial
            for task, name in pairs
            if len(study.methods[name].settings) > 1 or not study.seeds
            for trial in study.tuning_trials(name, task)
        ]
        chosen = [(task, name, self.chosen(name, task)) for task, name in pairs]
        found += [
            Trial(method=name, setting=setting, seed=seed, final=True, task=task)
            for seed in study.seeds
            for task, name, setting in chosen
            if setting is not None
        ]
        return list(dict.fromkeys([*found, *study.more(self)]))

    def missing(self) -> list[Trial]:
        """Return the runs that are not there and can be made now."""
        return [trial for trial in self.wanted() if trial not in self]

    def left(self) -> list[Trial]:
        """Return the runs that are missing, with those that will follow when tuning has chosen."""
        return dataclasses.replace(self, supposed=True).missing()

    def cost(self) -> float:
        """Estimate the seconds of one core that the missing runs need.

        A run takes the mean of those of its method on its task, or else of all on its task.
        """
        known: dict[tuple[str, ...], list[float]] = {}
        for row in self:
            for key in ((row.trial.task, row.trial.method), (row.trial.task,)):
                known.setdefault(key, []).extend([row.seconds] if row.seconds else [])

        def seconds(trial: Trial) -> float:
            found = known.get((trial.task, trial.method)) or known.get((trial.task,))
            return fmean(found) if found else self.study.seconds

        return sum(map(seconds, self.left()))
