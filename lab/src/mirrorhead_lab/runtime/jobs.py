"""Where tasks are computed: on the cores of this machine, on a dask cluster, or under SLURM.

A backend is a function (work, tasks) -> iterator over (task, result or failure), in the order in
which they end. An exception in one task does not stop the others. dask is called directly and not
through joblib, whose dask backend waits for ever when dask gives up a task (joblib 1.6: the
callback is not called).
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from mirrorhead_lab.runtime.errors import UserError, told

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Work(Generic[T, R]):
    """What is done with a task; three functions that can be sent to another process.

    Args:
        compute: the result of a task.
        store: the same where nobody waits for it: the result is put where `find` finds it.
        find: what `store` has left of a task, or None.
    """

    compute: Callable[[T], R]
    store: Callable[[T], object]
    find: Callable[[T], R | None]


@dataclass(frozen=True)
class Failure:
    """Why a task has no result, in one line and in full."""

    message: str
    details: str = ""


Outcome = tuple[Any, Any]  # a task, and its result or a Failure
Backend = Callable[[Work[Any, Any], Sequence[Any]], Iterator[Outcome]]


class BackendError(UserError):
    """The backend cannot be used here, and why."""


def attempt(compute: Callable[[T], R], task: T) -> R | Failure:
    """The result of one task; an exception becomes a Failure.

    >>> attempt(lambda x: 1 / x, 0).message
    'ZeroDivisionError: division by zero'
    """
    try:
        return compute(task)
    except Exception as error:
        return Failure(told(error), traceback.format_exc())


def local(jobs: int | None = None) -> Backend:
    """Processes on this machine through joblib, by default one per core; jobs = 1: this process.

    However this process ends, kill -9 included, its workers end within seconds.
    """

    def run(work: Work[Any, Any], tasks: Sequence[Any]) -> Iterator[Outcome]:
        from joblib import cpu_count, delayed
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        count = min(jobs or cpu_count(), len(tasks))
        parallel = worker_processes(count, return_as="generator_unordered", batch_size=1)
        left, job = dict(enumerate(tasks)), delayed(_numbered)
        with _children_ignore_interrupts():
            outcomes: Any = parallel(job(k, work.compute, task) for k, task in enumerate(tasks))
        try:
            for number, result in outcomes:
                yield left.pop(number), result
        except TerminatedWorkerError as error:
            reason = f"a worker process died, perhaps for lack of memory ({_line(error)})"
            yield from ((task, Failure(reason)) for task in left.values())
        finally:
            # Stopped in the middle: joblib ends its workers, and would warn of that.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes.close()

    return run


def dask(address: str) -> Backend:
    """Workers of the dask scheduler at that address; the tasks of a lost worker run again."""

    try:
        from distributed import Client, as_completed
    except ImportError as error:
        raise BackendError("--backend dask needs: pip install 'mirrorhead-lab[cluster]'") from error

    def run(work: Work[Any, Any], tasks: Sequence[Any]) -> Iterator[Outcome]:
        try:
            client = Client(address, timeout=10, set_as_default=False)
        except (OSError, ValueError) as error:
            raise BackendError(f"no dask scheduler answers at {address}: {_line(error)}") from error
        with client:
            submit = partial(client.submit, attempt, work.compute, pure=False)
            futures = {submit(task): task for task in tasks}
            for future in as_completed(list(futures), loop=client.loop):
                task = futures.pop(future)
                try:
                    yield task, future.result()
                except Exception as error:
                    yield task, Failure(f"given up by dask, {type(error).__name__}: {_line(error)}")

    return run


def slurm(out: Path, cluster: str = "slurm") -> Backend:
    """One job of a SLURM array for each task, through submitit; out is on a shared file system.

    Jobs store their results themselves, so they are kept even if this process ends before them.
    Partition, account and time limit are sbatch's own variables: SBATCH_PARTITION and so on.
    """

    try:
        import submitit
    except ImportError as error:
        message = "--backend slurm needs: pip install 'mirrorhead-lab[cluster]'"
        raise BackendError(message) from error
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise BackendError("--backend slurm needs sbatch, which is not on this machine")

    def run(work: Work[Any, Any], tasks: Sequence[Any]) -> Iterator[Outcome]:
        executor = submitit.AutoExecutor(folder=out.resolve() / "jobs", cluster=cluster)
        executor.update_parameters(name="mirrorhead", cpus_per_task=1)
        if cluster == "local":  # else it ends its jobs after 2 minutes
            executor.update_parameters(timeout_min=60)
        jobs = executor.map_array(_store, [work.store] * len(tasks), tasks)
        waiting = dict(zip(jobs, tasks, strict=True))
        while waiting:
            for job in [job for job in waiting if job.done()]:
                yield (task := waiting.pop(job)), _collect(work, task, job)
            time.sleep(0.1 if cluster == "local" else 5)

    return run


def worker_processes(count: int, **options: Any) -> Any:
    """Return joblib's `Parallel` with workers that end with this process, whatever ends it."""
    from joblib import Parallel

    # joblib replaces a worker whose memory has grown, and warns of it in a thread of its own. Where
    # warnings are errors, this would end the thread, and all would wait for it for ever.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
    return Parallel(n_jobs=count, initializer=_end_with_parent, initargs=(os.getpid(),), **options)


def _end_with_parent(parent: int) -> None:
    """Have this worker process end when its parent has ended, whatever ended it.

    A worker whose parent was killed would finish its task and then wait minutes for another. A
    thread looks instead of prctl(PR_SET_PDEATHSIG), which ends the worker when the *thread* that
    started it ends, and exists on Linux alone.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Remember a Ctrl-C, which raises as usual, in case a library swallows the exception."""
    if threading.current_thread() is not threading.main_thread():  # no signals come here
        yield lambda: False
        return
    seen = False
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to them as well.

    They inherit that it is ignored. A mask alone would not do: Python's own resource tracker
    lifts it. Meanwhile the signal is held back from this process, which gets it at the end.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _numbered(number: int, compute: Callable[[T], R], task: T) -> tuple[int, R | Failure]:
    return number, attempt(compute, task)


def _store(store: Callable[[T], object], task: T) -> None:
    store(task)  # and nothing to return: submitit would pickle it


def _collect(work: Work[T, R], task: T, job: Any) -> R | Failure:
    # The result is read from the store; submitit's pickled return value is left alone.
    for _ in range(10):  # a network file system may show a new file late
        found = attempt(work.find, task)
        if found is not None:
            return found
        time.sleep(0.2)
    details = job.stderr() or ""
    printed = details.strip().splitlines() or ["nothing printed"]
    return Failure(f"job {job.job_id}: {printed[-1].strip()}", details)


def _line(error: object) -> str:
    return str(error).strip().split("\n")[0]
