"""Studies whose runs are lines of one file: make the runs that are missing, on any backend.

A study names its runs by keys. Which are missing depends on those that are there: final runs follow
when tuning has chosen a rate. So runs are made in rounds, and each is stored as soon as it is
finished; the same call resumes a study that was stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from filelock import FileLock, Timeout

from mirrorhead._files import write_json
from mirrorhead_lab.evaluation import fine_tuning_results, language_results
from mirrorhead_lab.models.pretrained import default_encoder
from mirrorhead_lab.runtime.errors import RunError, SweepError
from mirrorhead_lab.runtime.fingerprints import digest
from mirrorhead_lab.runtime.folders import check_writable
from mirrorhead_lab.runtime.jobs import Backend, Failure, Work, interrupts
from mirrorhead_lab.runtime.json_files import read_json
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings

Key = Any  # a tuple that names a run
Runs = Mapping[Any, Any]


@dataclass(frozen=True)
class Study:
    """How the runs of a study are named, made and kept.

    Args:
        file: of the runs, in the folder of results.
        total: number of runs, if no method diverges at all rates.
        kind: of a run; it has a `key`.
        load, append: read the file, and add a run to it.
        missing: the keys of the runs that can be made now, the most valuable first.
        compute: make a run; its arguments are the key and the folder of all data sets.
        read: read those data; an error says what is missing, before any run is begun.
    """

    file: str
    total: int
    kind: type[Any]
    load: Callable[[Path], dict[Any, Any]]
    append: Callable[[Path, Any], None]
    missing: Callable[[Runs], Iterator[Key]]
    compute: Callable[[Key, Path | None], Any]
    read: Callable[[Path | None], object]


def _language_run(key: Key, data: Path | None) -> language_results.LanguageRun:
    return language_results.compute(_corpus(data), LanguageSettings(), *key)


@functools.lru_cache(maxsize=1)
def _corpus(data: Path | None) -> Corpus:
    return Corpus.of_imdb(LanguageSettings(), data)


def _fine_tuning_run(key: Key, data: Path | None) -> fine_tuning_results.FineTuningRun:
    return fine_tuning_results.compute(key, fine_tuning_results.reviews(data))


def _fine_tuning_data(data: Path | None) -> object:
    return default_encoder(), fine_tuning_results.reviews(data)


STUDIES = {
    "language-model": Study(
        language_results.FILE,
        language_results.TOTAL,
        language_results.LanguageRun,
        language_results.load_runs,
        language_results.append_run,
        language_results.missing,
        _language_run,
        _corpus,
    ),
    "fine-tuning": Study(
        fine_tuning_results.FILE,
        fine_tuning_results.TOTAL,
        fine_tuning_results.FineTuningRun,
        fine_tuning_results.load_runs,
        fine_tuning_results.append_run,
        fine_tuning_results.missing,
        _fine_tuning_run,
        _fine_tuning_data,
    ),
}

#: Called after every run: its key, and the run or why there is none.
Listener = Callable[[Key, Any], None]


def run_study(
    study: Study,
    results: Path,
    backend: Backend,
    *,
    data: Path | None = None,
    listener: Listener = lambda key, run: None,
) -> dict[Any, Any]:
    """Make all runs that are missing in the file of a study, and return all of its runs.

    If runs fail, the others of the same round are made and kept, and a SweepError names what
    failed; the same call tries again.

    Args:
        results: the folder of the file. On a cluster, jobs leave their runs there, too.
        backend: of `mirrorhead_lab.runtime.jobs`.
        data: the folder of all data sets.
    """
    path = results / study.file
    check_writable(results)
    if next(study.missing(study.load(path)), None) is not None:
        study.read(data)
    path.parent.mkdir(parents=True, exist_ok=True)  # of the lock
    try:
        with FileLock(f"{path}.lock", timeout=0):
            while todo := list(study.missing(study.load(path))):
                if failed := _round(study, path, todo, backend, data, listener):
                    lines = "".join(f"\n  {name_of(key)}: {why.message}" for key, why in failed)
                    raise SweepError(
                        f"{len(failed)} of {len(todo)} runs failed; the others are kept, and the"
                        f" same command tries again:{lines}"
                    )
            return study.load(path)
    except Timeout as error:
        raise RunError(f"{path} is being written by another process") from error


def name_of(key: Key) -> str:
    """Return the name of a run, for people."""
    return ", ".join(map(str, key))


def _round(
    study: Study,
    path: Path,
    todo: list[Key],
    backend: Backend,
    data: Path | None,
    listener: Listener,
) -> list[tuple[Key, Failure]]:
    """Make these runs and add them to the file; return those that failed."""
    folder = path.with_suffix(".runs")  # of jobs that nobody waits for
    task, find = functools.partial(_task, study, data), functools.partial(_find, study, folder)
    work = Work(task, functools.partial(_store, task, folder), find)
    failed = []

    def keep(key: Key, run: Any) -> None:
        if isinstance(run, Failure):
            failed.append((key, run))
        else:
            study.append(path, run)
            _place(folder, key).unlink(missing_ok=True)
        listener(key, run)

    left = []
    for key in todo:
        if (found := find(key)) is not None:  # of a job that outlived an earlier call
            keep(key, found)
        else:
            left.append(key)
    with interrupts() as interrupted:
        for key, run in backend(work, left) if left else ():
            if interrupted():
                raise KeyboardInterrupt
            keep(key, run)
    return failed


def _task(study: Study, data: Path | None, key: Key) -> Any:
    torch.set_num_threads(1)
    return study.compute(key, data)


def _place(folder: Path, key: Key) -> Path:
    return folder / f"{digest(list(key))}.json"


def _store(task: Callable[[Key], Any], folder: Path, key: Key) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(_place(folder, key), msgspec.to_builtins(task(key), str_keys=True))


def _find(study: Study, folder: Path, key: Key) -> Any:
    path = _place(folder, key)
    return read_json(path, study.kind) if path.exists() else None
