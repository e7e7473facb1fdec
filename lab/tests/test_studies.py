"""The engine of studies: tuning, final runs, resuming, failures, other backends, the command."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import toy_study
from mirrorhead_lab import studies
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.runtime.errors import RunError, SweepError
from mirrorhead_lab.runtime.jobs import local, slurm
from mirrorhead_lab.studies import engine
from mirrorhead_lab.studies.engine import make, read_rows
from mirrorhead_lab.studies.study import Method, Rows, Study, Trial
from results_cases import filled, words

STUDY = toy_study.STUDY
#: Tuning of three settings on two tasks, and three final runs of each method on each.
TOTAL = 2 * 3 + 2 * 2 * 3


def stored(folder: Path, study: Study[Any] = STUDY) -> Rows[Any]:
    return read_rows(study, folder / study.file)


def test_final_runs_follow_when_tuning_has_chosen(tmp_path: Path) -> None:
    told: list[Trial] = []
    rows = make(STUDY, tmp_path, local(1), listener=lambda trial, row: told.append(trial))
    assert len(rows) == TOTAL and [row.trial for row in rows] == told
    assert [trial.final for trial in told] == sorted(trial.final for trial in told)
    for task in STUDY.tasks:
        tried = [rows.get(trial) for trial in STUDY.tuning_trials("shrunk", task)]
        best = min((row for row in tried if row), key=lambda row: row.measured.validation)
        assert rows.chosen("shrunk", task) == best.trial.setting
        assert {row.trial.setting["share"] for row in rows if row.trial.final and
                (row.trial.method, row.trial.task) == ("shrunk", task)} == {
            best.trial.setting["share"]}  # fmt: skip
    assert stored(tmp_path).by_trial == rows.by_trial
    assert words(rows) == {"toy-far": "holds"}
    again = make(STUDY, tmp_path, local(1), listener=lambda trial, row: told.append(trial))
    assert again.by_trial == rows.by_trial and len(told) == TOTAL


def test_of_equal_settings_the_first_is_chosen_and_none_that_diverged() -> None:
    rows = filled(STUDY, lambda trial: toy_study.Errors(1.0, 1.0 if trial.final else None))
    assert rows.chosen("shrunk", "near") == {"share": 0.1}
    score = lambda measured: None if measured.validation == 1 else -measured.validation  # noqa: E731
    study = dataclasses.replace(STUDY, score=score)
    level = {0.1: 1.0, 0.5: 3.0, 0.9: 2.0}
    some = filled(study, lambda trial: toy_study.Errors(level.get(trial.setting["share"], 5.0)))
    assert some.chosen("shrunk", "far") == {"share": 0.9}
    none = filled(study, lambda trial: toy_study.Errors(1.0))
    assert none.chosen("shrunk", "far") is None
    assert not any(row.trial.final for row in none if row.trial.method == "shrunk")


def test_tuning_reads_validation_alone_and_each_final_run_reads_test_data_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("TOY_LOG", str(log))
    rows = make(STUDY, tmp_path, local(1))
    finals = sum(row.trial.final for row in rows)
    assert log.read_text().count("test") == finals and log.read_text().count("validation") == TOTAL
    assert all((row.measured.test is None) == (not row.trial.final) for row in rows)


def test_test_scores_of_a_tuning_run_are_refused(tmp_path: Path) -> None:
    study = dataclasses.replace(STUDY, run=lambda trial, data, folder: toy_study.Errors(1.0, 1.0))
    with pytest.raises(SweepError, match="a run that is not final must not have test scores"):
        make(study, tmp_path, local(1))
    assert all(row.trial.final for row in stored(tmp_path, study))


@pytest.mark.slow
def test_a_study_resumes_where_it_was_stopped(tmp_path: Path) -> None:
    """Ctrl-C after five runs: they are kept, and the same call makes the others."""
    done: list[Trial] = []

    def stop(trial: Trial, row: Any) -> None:
        done.append(trial)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(STUDY, tmp_path, local(1), listener=stop)
    assert [row.trial for row in stored(tmp_path)] == done[:5]
    rows = make(STUDY, tmp_path, local(2), listener=lambda trial, row: done.append(trial))
    assert len(rows) == len(done) == TOTAL


@pytest.mark.slow
def test_a_kill_loses_no_finished_run(tmp_path: Path) -> None:
    here = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "TOY_NAP": "0.05", "PYTHONPATH": here}
    command = [sys.executable, "-m", "mirrorhead_lab", "study", "toy_study", "--jobs", "1"]
    command += ["--results", str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    file = tmp_path / STUDY.file
    while not file.exists() or file.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = [row.trial for row in stored(tmp_path)]
    file.write_bytes(file.read_bytes() + b'{"trial": {"met')  # a line cut short
    made: list[Trial] = []
    rows = make(STUDY, tmp_path, local(1), listener=lambda trial, row: made.append(trial))
    assert len(rows) == TOTAL and len(kept) >= 4 and not {*kept} & {*made}


def test_runs_that_fail_are_named_and_the_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_FAIL", "0.5")
    with pytest.raises(SweepError) as error:
        make(STUDY, tmp_path, local(1))
    assert "2 of 12 runs failed" in str(error.value)  # tuning, and the method without any
    assert "near, shrunk, share 0.5, seed 0: ArithmeticError" in str(error.value)
    assert len(stored(tmp_path)) == 10
    monkeypatch.delenv("TOY_FAIL")
    assert len(make(STUDY, tmp_path, local(1))) == TOTAL


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    def again(trial: Trial, row: Any) -> None:
        make(STUDY, tmp_path, local(1))

    with pytest.raises(RunError, match=r"toy.jsonl is being written by another process"):
        make(STUDY, tmp_path, local(1), listener=again)


@pytest.mark.slow
def test_jobs_of_a_cluster_leave_their_runs_for_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds as arrays of jobs; a run whose job outlived the command is not made again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    few = dataclasses.replace(
        STUDY, tasks=("near",), seeds=(1,),
        methods={"shrunk": Method(({"share": 0.1}, {"share": 0.5}))},
    )  # fmt: skip
    rows = make(few, tmp_path, slurm(tmp_path, cluster="local"))
    assert len(rows) == 3  # two rounds
    assert not list(tmp_path.glob("*.runs/*"))  # all are in the file
    (first, *_), other = STUDY.tuning_trials("shrunk", "near"), tmp_path / "other"
    monkeypatch.setattr(toy_study, "run", lambda *_: toy_study.Errors(0.123))
    left = dataclasses.replace(STUDY, run=toy_study.run)
    make_one = lambda trial: engine.compute(left, None, tmp_path, trial)  # noqa: E731
    engine._store(make_one, other / "toy.runs", first)
    found = make(STUDY, other, local(1)).get(first)
    assert found and found.measured.validation == 0.123
    assert not list(other.glob("*.runs/*"))


def test_what_is_missing_and_its_cost_are_known_before_tuning_has_ended(tmp_path: Path) -> None:
    rows = Rows(dataclasses.replace(STUDY, seconds=60.0))
    assert len(rows.left()) == TOTAL and len(rows.missing()) == TOTAL - 2 * 3
    assert rows.cost() == 60 * TOTAL
    whole = filled(STUDY, lambda trial: toy_study.Errors(1.0, 1.0 if trial.final else None))
    some = Rows(STUDY, dict(list(whole.by_trial.items())[:-2]))  # each took a second
    assert len(some.left()) == some.cost() == 2


@pytest.mark.slow
def test_the_command_runs_a_study_from_outside_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "toy_study", "--results", str(tmp_path), "--jobs", "1"]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{TOTAL} runs are missing, about {TOTAL} min 0 s of one core" in printed
    assert "far, shrunk, share 0.9, seed 0: validation" in printed
    assert "What tuning saw" in printed and "toy-far" in printed and "holds" in printed
    assert main(words) == 0  # nothing is missing
    assert "missing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["toy_study", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["toy_study", "--backend", "dask"], "--backend dask needs --address"),
        (["toy_study", "--address", "tcp://host:1"], "--address goes with --backend dask"),
        (["imdbb"], "there is no study 'imdbb'; there are "),
        (["json"], "json has no STUDY = Study"),
    ],
)
def test_wrong_use_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["study", *words, "--results", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"seeds": (), "tuning_seed": None}, "needs a tuning_seed"),
        ({"methods": {"one": Method(())}}, "settings of 'one' must be distinct, at least one"),
        ({"methods": {"one": Method(({},), tasks=("there",))}}, "must be of .*got 'there'"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(STUDY, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0][:40], *lines[1:]], r"damaged in line 1"),
        (lambda lines: [lines[0], lines[0]], "twice, again in line 2"),
        (lambda lines: [lines[0].replace("shrunk", "shrank")], "line 1: method must be one of"),
        (lambda lines: [lines[0].replace("near", "nowhere")], "line 1: task must be one of"),
        (lambda lines: [lines[0].replace('"validation"', '"test": 1, "validation"')],
         "line 1: a run that is not final"),
        (lambda lines: ["3"], "damaged in line 1"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / STUDY.file
    make(STUDY, tmp_path, local(1))
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(RunError, match=message) as error:
        stored(tmp_path)
    assert str(path) in str(error.value)
    assert main(["study", "toy_study", "--results", str(tmp_path)]) == 2  # and nothing is lost


RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in studies.NAMES if (RESULTS / f"{n}.jsonl").exists()])
def test_a_study_of_the_package_reads_its_results_and_has_a_part(name: str) -> None:
    study = studies.load(name)
    rows = read_rows(study, RESULTS / study.file)
    assert study.name == name and len(rows) and not rows.missing()
    part = study.part(rows)
    assert bool(part.findings) == (name in studies.REPORTED)
    assert part.tables and all(finding.verdict for finding in part.findings)
    assert re.fullmatch(r"[a-z0-9-]+", part.name)
    begun = Rows(study, dict(list(rows.by_trial.items())[:2]))
    for shown in (study.part(begun), study.part(Rows(study))):
        assert {finding.word for finding in shown.findings} <= {"not finished"}
        assert all(figure.svg_file() for figure in shown.figures)


@pytest.mark.parametrize("name", studies.NAMES)
def test_data_that_are_missing_are_named_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    results, data = tmp_path / "results", tmp_path / "data"
    data.mkdir()
    words = ["--results", str(results), "--data", str(data), "--jobs", "1"]
    assert main(["study", name, *words]) == 2
    said = capsys.readouterr().err
    assert str(data) in said and "runs failed" not in said
    assert not results.exists()
