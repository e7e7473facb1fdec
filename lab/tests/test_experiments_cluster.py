"""Trials beyond one process tree: a real dask scheduler with two workers, and submitit's jobs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed import Client
from rich.console import Console

import toy_experiment
from mirrorhead_lab.experiments import load, storage
from mirrorhead_lab.experiments.experiment import Result
from mirrorhead_lab.experiments.runner import execute, plan
from mirrorhead_lab.runtime.jobs import BackendError, dask, local, slurm

TOY = load("toy_experiment")
TESTS = Path(toy_experiment.__file__ or "").parent
PATHS = os.pathsep.join([*sys.path, str(TESTS)])


def wait_for(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 240
    while not what():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


@contextmanager
def processes(*commands: list[str], **environment: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """These commands, started, and ended with the block."""
    quiet = subprocess.DEVNULL
    whole = {**os.environ, "PYTHONPATH": PATHS, **environment}
    running = [
        subprocess.Popen(command, env=whole, stdout=quiet, stderr=quiet) for command in commands
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def cluster(tmp_path: Path, **environment: str) -> Iterator[tuple[str, list[int]]]:
    """The address of a dask scheduler, and the process ids of its two workers."""
    contact = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "dask"]
    scheduler = [*command, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    worker = [*command, "worker", "--scheduler-file", str(contact), "--host", "127.0.0.1"]
    worker += ["--nthreads", "1", "--no-nanny", "--no-dashboard"]
    worker += ["--local-directory", str(tmp_path / "dask")]
    with processes(
        [*scheduler, "--scheduler-file", str(contact)], worker, worker, **environment
    ) as (_, one, two):
        wait_for(contact.exists)
        yield json.loads(contact.read_text())["address"], [one.pid, two.pid]


def undisturbed(out: Path, trials: int) -> Result:
    run = plan(TOY, trials=trials)
    execute([run], out, local(1), Console(file=io.StringIO()))
    assert run.result is not None
    return run.result


@pytest.mark.slow
def test_dask_with_a_worker_killed_in_the_middle(tmp_path: Path) -> None:
    """Every trial is there once, with the bits of a run at home."""
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()

    def starts() -> dict[int, list[int]]:
        """First seed of a piece -> the processes that began it."""
        found = defaultdict(list)
        for path in sorted(log.iterdir(), key=lambda path: int(path.name.split("-")[2])):
            first, process, _ = map(int, path.name.split("-"))
            found[first].append(process)
        return found

    with cluster(tmp_path, TOY_NAP="1.5", TOY_LOG=str(log)) as (address, workers):
        command = [sys.executable, "-m", "mirrorhead_lab", "reproduce", "--only", "toy_experiment"]
        command += ["--backend", "dask", "--address", address]
        with processes([*command, "--trials", "22", "--out", str(out), "--results", "none"]) as (
            main,
        ):
            wait_for(lambda: {p for who in starts().values() for p in who} == set(workers))
            begun = starts()
            # The one that began last is sure to be at it still.
            last = max(log.iterdir(), key=lambda path: int(path.name.split("-")[2]))
            piece, victim = map(int, last.name.split("-")[:2])
            os.kill(victim, 9)
            (survivor,) = set(workers) - {victim}
            assert main.wait(timeout=240) == 0
    assert starts()[piece] == [victim, survivor]
    assert len(begun) < 6 and sorted(starts()) == list(range(0, 22, 4))
    found, whole = storage.stored(out, TOY), undisturbed(tmp_path / "home", 22)
    assert found is not None and found.settings == whole.settings
    assert all(found[name].tobytes() == whole[name].tobytes() for name in whole.arrays)
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_dask_gives_up_a_task_that_kills_its_worker(tmp_path: Path) -> None:
    """The run ends and says so; the worker that is left does its own.

    dask also gives up what else was assigned to the worker, so there is one task for each.
    """
    limit = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with cluster(tmp_path, TOY_DIE="5", **limit) as (address, _):
        with Client(address) as client:
            client.wait_for_workers(2)
        run, text = plan(TOY, trials=8), io.StringIO()
        execute([run], tmp_path / "out", dask(address), Console(file=text, width=200))
    ((task, failure),) = run.failures
    assert task.settings.first == 4 and "given up by dask, KilledWorker" in failure.message
    assert [part.settings.first for part in run.parts] == [0]


@pytest.mark.slow
def test_dask_that_does_not_answer(tmp_path: Path) -> None:
    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        with pytest.raises(BackendError, match=f"no dask scheduler answers at {address}"):
            execute([plan(TOY)], tmp_path, dask(address), Console(file=io.StringIO()))


def test_slurm_needs_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendError, match="needs sbatch"):
        execute([plan(TOY)], tmp_path, slurm(tmp_path), Console(file=io.StringIO()))


@pytest.mark.slow
def test_jobs_of_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit's local executor starts real jobs, as it does under SLURM. One fails."""
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("TOY_FAIL", "5")
    out = tmp_path / "out"
    run, text = plan(TOY, trials=6), io.StringIO()
    execute([run], out, slurm(out, "local"), Console(file=text, width=200))
    assert run.result is None and [part.settings.first for part in run.parts] == [0]
    ((task, failure),) = run.failures
    assert task.settings.first == 4
    assert failure.message.endswith("ArithmeticError: seed 5 is a bad one")
    assert "toy_experiment.py" in failure.details
