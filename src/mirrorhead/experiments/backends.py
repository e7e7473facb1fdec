"""Where pieces are computed: on the cores of this machine, on a dask cluster, or under SLURM.

A backend is a function tasks -> iterator over (task, result or failure), in the order in which
they end. An exception in one piece stops no other. dask is driven directly and not through joblib,
whose dask backend waits for ever when a task is given up (joblib 1.6: the callback is not called).
"""

from __future__ import annotations

import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirrorhead.experiments import load as load_experiment
from mirrorhead.experiments import storage
from mirrorhead.experiments.base import Result, TrialSettings


@dataclass(frozen=True)
class Task:
    """A piece to compute: the experiment's name, its module, and the settings of the piece."""

    name: str
    module: str
    settings: TrialSettings

    def __str__(self) -> str:
        seeds = self.settings.seeds
        return f"{self.name}, trials {seeds[0]} to {seeds[-1]}"


@dataclass(frozen=True)
class Failure:
    """Why a piece was not computed, in one line and in full."""

    message: str
    details: str = ""


Outcome = tuple[Task, "Result[Any] | Failure"]
Backend = Callable[[Sequence[Task]], Iterator[Outcome]]


class BackendError(RuntimeError):
    """The backend cannot be used here, and why."""


def work(task: Task) -> Result[Any] | Failure:
    """Compute one piece; an exception becomes a Failure."""
    try:
        return _compute(task)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


def local(jobs: int | None = None) -> Backend:
    """Processes on this machine, one a core unless said, through joblib; jobs = 1: this one."""

    def run(tasks: Sequence[Task]) -> Iterator[Outcome]:
        from joblib import Parallel, cpu_count, delayed
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        options: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1}
        parallel = Parallel(n_jobs=min(jobs or cpu_count(), len(tasks)), **options)
        left = dict(enumerate(tasks))
        with _deaf_children():
            outcomes: Any = parallel(delayed(_numbered)(k, task) for k, task in enumerate(tasks))
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
    """Workers of the dask scheduler at that address; what a lost worker had is done again."""

    def run(tasks: Sequence[Task]) -> Iterator[Outcome]:
        try:
            from distributed import Client, as_completed
        except ImportError as error:
            raise BackendError("--backend dask needs: pip install mirrorhead[cluster]") from error
        try:
            client = Client(address, timeout=10, set_as_default=False)
        except (OSError, ValueError) as error:
            raise BackendError(f"no dask scheduler answers at {address}: {_line(error)}") from error
        with client:
            futures = {client.submit(work, task, pure=False): task for task in tasks}
            for future in as_completed(list(futures), loop=client.loop):
                task = futures.pop(future)
                try:
                    yield task, future.result()
                except Exception as error:
                    yield task, Failure(f"given up by dask, {type(error).__name__}: {_line(error)}")

    return run


def slurm(out: Path, cluster: str = "slurm") -> Backend:
    """One job of a SLURM array for each piece, through submitit; out is on a shared file system.

    Jobs store their pieces themselves, so they are kept even if this process ends before them.
    Partition, account and time limit are sbatch's own variables: SBATCH_PARTITION and so on.
    """

    def run(tasks: Sequence[Task]) -> Iterator[Outcome]:
        try:
            import submitit
        except ImportError as error:
            raise BackendError("--backend slurm needs: pip install mirrorhead[cluster]") from error
        if cluster == "slurm" and not shutil.which("sbatch"):
            raise BackendError("--backend slurm needs sbatch, which is not on this machine")
        executor = submitit.AutoExecutor(folder=out.resolve() / "jobs", cluster=cluster)
        executor.update_parameters(name="mirrorhead", cpus_per_task=1)
        jobs = executor.map_array(_compute_and_save, [out.resolve()] * len(tasks), tasks)
        waiting = dict(zip(jobs, tasks, strict=True))
        while waiting:
            for job in [job for job in waiting if job.done()]:
                yield (task := waiting.pop(job)), _collect(out, task, job)
            time.sleep(0.1 if cluster == "local" else 5)

    return run


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started here never see Ctrl-C, which a terminal sends to them as well.

    One that is still importing would print a traceback. The mask is inherited; this process
    gets what came meanwhile at the end.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _compute(task: Task) -> Result[Any]:
    import torch

    torch.set_num_threads(1)  # the cores are used by the pieces
    return load_experiment(task.module).compute(task.settings)


def _numbered(number: int, task: Task) -> tuple[int, Result[Any] | Failure]:
    return number, work(task)


def _compute_and_save(out: Path, task: Task) -> None:
    storage.save(out, load_experiment(task.module), _compute(task))


def _collect(out: Path, task: Task, job: Any) -> Result[Any] | Failure:
    # The piece is read from the store; submitit's pickled return value is left alone.
    experiment = load_experiment(task.module)
    for _ in range(10):  # a network file system may show a new file late
        try:
            found = storage.load(out, experiment, task.settings)
        except storage.PieceError as error:
            return Failure(str(error))
        if found is not None:
            return found
        time.sleep(0.2)
    details = job.stderr() or ""
    return Failure(f"job {job.job_id}: {_last(details)}", details)


def _line(error: object) -> str:
    return str(error).strip().split("\n")[0]


def _last(text: str) -> str:
    lines: Iterable[str] = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "nothing printed")
