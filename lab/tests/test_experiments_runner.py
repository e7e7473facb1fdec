"""Runs: in parallel, stopped and resumed, with pieces that fail."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from joblib.externals.loky import get_reusable_executor
from rich.console import Console

import toy_experiment
from mirrorhead_lab.experiments import load, storage
from mirrorhead_lab.experiments.experiment import Result
from mirrorhead_lab.experiments.runner import Run, Task, execute, plan
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.jobs import Backend, Outcome, Work, attempt, local

TOY = load("toy_experiment")
TESTS = Path(toy_experiment.__file__ or "").parent
REPRODUCE = [sys.executable, "-m", "mirrorhead_lab", "reproduce", "--only", "toy_experiment"]
REPRODUCE += ["--trials", "22", "--jobs", "2", "--results", "none"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For a process of its own that finds the toy, and logs in tmp_path/log."""
    (tmp_path / "log").mkdir()
    paths = os.pathsep.join([*sys.path, str(TESTS)])
    return {**os.environ, "PYTHONPATH": paths, "TOY_LOG": str(tmp_path / "log")}


def run_here(out: Path, trials: int = 10, backend: Backend | None = None) -> tuple[Run, str]:
    """A run in this process unless said, and what it printed."""
    run, text = plan(TOY, trials=trials), io.StringIO()
    execute([run], out, backend or local(1), Console(file=text, width=200))
    return run, text.getvalue()


def same(one: Result | None, two: Result | None) -> bool:
    assert one is not None and two is not None
    assert one.settings == two.settings and one.arrays.keys() == two.arrays.keys()
    return all(one[name].tobytes() == two[name].tobytes() for name in one.arrays)


def started(log: Path) -> list[int]:
    """The first seed of every piece that was begun."""
    return sorted(int(path.name.split("-")[0]) for path in log.iterdir())


def test_plans() -> None:
    assert plan(TOY).settings == TOY.quick
    assert plan(TOY, full=True).settings == TOY.full
    assert plan(TOY, full=True, trials=3).settings == replace(TOY.full, trials=3)
    fixed = replace(TOY, fixed_trials=True)
    assert plan(fixed, trials=3).settings == TOY.quick


def test_what_is_done_is_not_done_again(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_LOG", environment["TOY_LOG"])
    first, text = run_here(tmp_path)
    assert text.startswith("toy: 10 trials, 0.")
    assert started(tmp_path / "log") == [0, 4, 8]
    again, _ = run_here(tmp_path)
    assert started(tmp_path / "log") == [0, 4, 8]
    assert same(first.result, again.result)
    more, _ = run_here(tmp_path, trials=14)
    assert started(tmp_path / "log") == [0, 4, 8, 8, 12]  # the piece of 2 trials is one of 4 now
    np.testing.assert_array_equal(more.result["x"], TOY.compute(more.settings)["x"])  # pyright: ignore[reportOptionalSubscript]


def test_a_damaged_piece_is_computed_again(tmp_path: Path) -> None:
    first, _ = run_here(tmp_path)
    piece = next((tmp_path / "toy").glob("00004-*.npz"))
    piece.write_bytes(piece.read_bytes()[:-9])
    again, text = run_here(tmp_path)
    assert "computing again: " in text and "00004-" in text
    assert same(first.result, again.result)
    assert storage.stored(tmp_path, TOY) is not None


def test_a_piece_that_raises_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_FAIL", "6")
    run, text = run_here(tmp_path)
    assert run.result is None
    ((task, failure),) = run.failures
    assert list(task.settings.seeds) == [4, 5, 6, 7]
    assert failure.message == "ArithmeticError: seed 6 is a bad one"
    assert "in run" in failure.details
    assert f"failed: toy, trials 4 to 7: {failure.message}" in text
    assert [part.settings.first for part in run.parts] == [0, 8]
    monkeypatch.delenv("TOY_FAIL")
    again, _ = run_here(tmp_path)
    assert same(again.result, run_here(tmp_path / "other")[0].result)


def test_other_settings_stop_a_run_before_it_starts(tmp_path: Path) -> None:
    run_here(tmp_path)
    with pytest.raises(UserError):
        execute([plan(TOY, full=True)], tmp_path, local(1), Console(file=io.StringIO()))
    assert len(list((tmp_path / "toy").glob("*.npz"))) == 3


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    def interrupted(work: Work, tasks: Sequence[Task]) -> Iterator[Outcome]:
        result = attempt(work.compute, tasks[1])
        yield tasks[1], result
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(tmp_path, backend=interrupted)
    names = sorted(path.name[:5] for path in (tmp_path / "toy").iterdir())
    assert names == ["00004", "run.j"]
    assert same(run_here(tmp_path)[0].result, run_here(tmp_path / "other")[0].result)


@pytest.mark.slow
def test_cores_and_a_dying_worker(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes compute the same bits as one; a process that dies costs what it had."""
    monkeypatch.syspath_prepend(TESTS)
    # Workers are kept for the next call, and have the environment that they were started with.
    run_here(tmp_path / "before", trials=12, backend=local(2))
    get_reusable_executor().shutdown(wait=True)
    monkeypatch.setenv("TOY_DIE", "9")
    run, text = run_here(tmp_path, trials=12, backend=local(2))
    assert run.result is None
    assert "a worker process died" in text
    assert 8 in [task.settings.first for task, _ in run.failures]
    monkeypatch.delenv("TOY_DIE")
    again, _ = run_here(tmp_path, trials=12, backend=local(2))
    assert same(again.result, run_here(tmp_path / "other", trials=12)[0].result)


def test_a_swallowed_interrupt_stops_the_run_all_the_same(tmp_path: Path) -> None:
    """A library's clean-up may eat the KeyboardInterrupt; what is done by then is kept."""

    def deaf(work: Work, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for task in tasks:
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            yield task, attempt(work.compute, task)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_here(tmp_path, trials=12, backend=deaf)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_resumes_to_the_same_bits(
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
) -> None:
    command = [*REPRODUCE, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, env={**environment, "TOY_NAP": "2"}, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    folder, limit = tmp_path / "out" / "toy", time.monotonic() + 240
    while len(list(folder.glob("[!.]*.npz"))) < 2 and time.monotonic() < limit:  # not temporary
        assert process.poll() is None
        time.sleep(0.01)
    # As a terminal does: the workers get it as well.
    os.killpg(process.pid, how)
    _, error = process.communicate(timeout=120)
    done = len(list(folder.glob("[!.]*.npz")))  # beside what a kill leaves
    assert 1 <= done < 6
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert error.strip() == "mirrorhead: Interrupted. Run the same command again to resume."
        assert not list(folder.glob(".*"))
    before = len(started(tmp_path / "log"))
    monkeypatch.setenv("TOY_LOG", environment["TOY_LOG"])
    run_here(tmp_path / "out", trials=22)
    monkeypatch.delenv("TOY_LOG")
    assert len(started(tmp_path / "log")) - before == 6 - done
    found = storage.stored(tmp_path / "out", TOY)
    assert same(found, run_here(tmp_path / "other", trials=22)[0].result)


def alive(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(f"{name})")
    return found


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """kill -9 of the command alone: its workers, minutes from their results, end in seconds."""
    command = [*REPRODUCE, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, env={**environment, "TOY_NAP": "300"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    limit = time.monotonic() + 240
    while len(started(tmp_path / "log")) < 2 and time.monotonic() < limit:
        assert process.poll() is None
        time.sleep(0.05)
    assert len(alive(process.pid)) >= 3
    process.kill()
    process.wait()
    limit = time.monotonic() + 30
    while alive(process.pid) and time.monotonic() < limit:
        time.sleep(0.1)
    left = alive(process.pid)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
    assert not left
