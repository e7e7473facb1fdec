"""Make the runs of a study that are missing, on any backend, and keep each as soon as it is done.

Which runs are missing depends on those that are there: final runs follow when tuning has chosen. So
they are made in rounds. The same call resumes a study that was stopped; runs that failed are named,
and the others kept.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from filelock import FileLock, Timeout

from mirrorhead._files import write_json
from mirrorhead_lab.datasets.sources import data_root
from mirrorhead_lab.runtime.errors import RunError, SweepError
from mirrorhead_lab.runtime.folders import check_writable
from mirrorhead_lab.runtime.jobs import Backend, Failure, Work, interrupts
from mirrorhead_lab.runtime.json_files import append_json_line, read_json, read_json_lines
from mirrorhead_lab.studies.study import Row, Rows, Study, Trial

_ONE_AT_A_TIME = threading.Lock()  # torch's random numbers belong to the whole process
#: Called after every run: its trial, and its row or why there is none.
Listener = Callable[[Trial, "Row[Any] | Failure"], None]


def read_rows(study: Study[Any], path: Path) -> Rows[Any]:
    """Read the runs of a study, none if the file is not there; what does not fit is refused."""
    found: dict[Trial, Row[Any]] = {}
    kind: Any = Row[study.measured]
    for number, row in enumerate(read_json_lines(path, kind), start=1):
        if study.shared and row.trial.method not in study.methods:
            continue
        try:
            study.check(row.trial, row.measured)
        except ValueError as error:
            raise RunError(f"{path} is damaged in line {number}: {error}") from error
        if row.trial in found:
            raise RunError(f"{path} has the run {row.trial} twice, again in line {number}")
        found[row.trial] = row
    return Rows(study, found, folder=path.parent)


def append_row(path: Path, row: Row[Any]) -> None:
    """Add a run to a file that `read_rows` reads."""
    append_json_line(path, msgspec.to_builtins(row, str_keys=True))


def make(
    study: Study[Any],
    results: Path,
    backend: Backend,
    *,
    data: Path | None = None,
    runs: Path = Path("runs"),
    listener: Listener = lambda trial, row: None,
) -> Rows[Any]:
    """Make all runs that are missing in the file of a study, and return all of its rows.

    If runs fail, the others of the same round are made and kept, and a SweepError names what
    failed; the same call tries again.

    Args:
        results: the folder of the file. On a cluster, jobs leave their runs there, too.
        backend: of `mirrorhead_lab.runtime.jobs`.
        data: the folder of all data sets; None: see `data_root`.
        runs: where runs keep what is expensive, runs/<study>/<hash>; on a cluster, shared.
    """
    path = results / study.file
    check_writable(results)
    data = data_root(
        data
    ).absolute()  # a worker may have been started with another $MIRRORHEAD_DATA
    missing = read_rows(study, path).missing()
    for task in dict.fromkeys(trial.task for trial in missing):
        _loaded(study.load, task, data)
    path.parent.mkdir(parents=True, exist_ok=True)  # of the lock
    make_one = functools.partial(compute, study, data, runs.resolve() / study.name)
    folder = path.resolve().with_suffix(".runs")  # of jobs that nobody waits for
    work = Work(
        make_one,
        functools.partial(_store, make_one, folder),
        functools.partial(_find, study, folder),
    )
    try:
        with FileLock(f"{path}.lock", timeout=0):
            while todo := (rows := read_rows(study, path)).missing():
                if failed := _round(study, path, folder, work, todo, backend, listener):
                    lines = "".join(f"\n  {trial}: {why.message}" for trial, why in failed)
                    raise SweepError(
                        f"{len(failed)} of {len(todo)} runs failed; the others are kept, and the"
                        f" same command tries again:{lines}"
                    )
                if todo[0] in read_rows(study, path).missing():
                    raise RunError(f"{path} does not hold the run {todo[0]}, which was made")
            return rows
    except Timeout as error:
        raise RunError(f"{path} is being written by another process") from error


def compute(study: Study[Any], data: Path | None, runs: Path, trial: Trial) -> Row[Any]:
    """Make one run, on one thread."""
    torch.set_num_threads(1)
    with _ONE_AT_A_TIME:
        loaded = _loaded(study.load, trial.task, data)
        began = time.perf_counter()
        measured = study.run(trial, loaded, runs / trial.training)
    study.check(trial, measured)
    return Row(trial, measured, round(time.perf_counter() - began, 1))


@functools.lru_cache(maxsize=2)
def _loaded(load: Callable[[str, Path | None], Any], task: str, data: Path | None) -> Any:
    """Return the data of a task, read once in a process that makes many runs."""
    return load(task, data)


def _round(
    study: Study[Any],
    path: Path,
    folder: Path,
    work: Work[Trial, Row[Any]],
    todo: list[Trial],
    backend: Backend,
    listener: Listener,
) -> list[tuple[Trial, Failure]]:
    """Make these runs and add them to the file; return those that failed."""
    failed: list[tuple[Trial, Failure]] = []

    def keep(trial: Trial, row: Row[Any] | Failure) -> None:
        if isinstance(row, Failure):
            failed.append((trial, row))
        else:
            append_row(path, row)
            _place(folder, trial).unlink(missing_ok=True)
        listener(trial, row)

    left = []
    for trial in todo:
        if (found := work.find(trial)) is not None:  # of a job that outlived an earlier call
            keep(trial, found)
        else:
            left.append(trial)
    with interrupts() as interrupted:
        for trial, row in backend(work, left) if left else ():
            if interrupted():
                raise KeyboardInterrupt
            keep(trial, row)
    return failed


def _place(folder: Path, trial: Trial) -> Path:
    return folder / f"{trial.training}{'-final' * trial.final}.json"


def _store(make_one: Callable[[Trial], Row[Any]], folder: Path, trial: Trial) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(_place(folder, trial), msgspec.to_builtins(make_one(trial), str_keys=True))


def _find(study: Study[Any], folder: Path, trial: Trial) -> Row[Any] | None:
    path = _place(folder, trial)
    kind: Any = Row[study.measured]
    return read_json(path, kind) if path.exists() else None
