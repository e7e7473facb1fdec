"""`run_study` and `mirrorhead study`: rounds, resuming, failures, other backends, the command."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.evaluation import language_results, studies
from mirrorhead_lab.evaluation.fine_tuning_results import RATES, SEEDS, Key, load_runs
from mirrorhead_lab.evaluation.studies import STUDIES, Study, run_study
from mirrorhead_lab.report.studies import PARTS
from mirrorhead_lab.runtime.errors import RunError, SweepError
from mirrorhead_lab.runtime.jobs import local, slurm
from results_cases import fine_tuning_run, language_run


def scored(key: Key, data: Path | None, fails: float = 0.0) -> Any:
    """A run without training: the middle rate is the best."""
    if key.lr == fails:
        raise ValueError(f"seed {key.seed} is not to be had")
    return fine_tuning_run(key, 0.9 if key.lr == RATES[1] else 0.8, 0.8 + 1e-3 * key.seed)


def study(**changes: Any) -> Study:
    fields = {name: getattr(STUDIES["fine-tuning"], name) for name in vars(STUDIES["fine-tuning"])}
    return Study(**{**fields, "compute": scored, "read": lambda data: None, **changes})


def test_final_runs_follow_when_tuning_has_chosen(tmp_path: Path) -> None:
    told: list[Key] = []
    runs = run_study(study(), tmp_path, local(1), listener=lambda key, run: told.append(key))
    assert len(runs) == study().total and list(runs) == told
    assert {key.lr for key in runs if key.final} == {RATES[1]}
    assert runs == load_runs(tmp_path / study().file)
    again: list[Key] = []
    assert run_study(study(), tmp_path, local(1), listener=lambda k, _: again.append(k)) == runs
    assert not again


def test_a_study_resumes_where_it_was_stopped(tmp_path: Path) -> None:
    """Ctrl-C after five runs: they are kept, and the same call makes the others."""
    done: list[Key] = []

    def stop(key: Key, run: Any) -> None:
        done.append(key)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(study(), tmp_path, local(1), listener=stop)
    assert list(load_runs(tmp_path / study().file)) == done[:5]
    runs = run_study(study(), tmp_path, local(2), listener=lambda key, run: done.append(key))
    assert len(runs) == len(done) == study().total


def test_runs_that_fail_are_named_and_the_others_kept(tmp_path: Path) -> None:
    failing = study(compute=functools.partial(scored, fails=RATES[0]))
    with pytest.raises(SweepError, match=r"3 of 9 runs failed.*\n  AdamW, 3e-05.*is not to be had"):
        run_study(failing, tmp_path, local(1))
    assert len(load_runs(tmp_path / study().file)) == 6
    assert len(run_study(study(), tmp_path, local(1))) == study().total


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    def again(key: Key, run: Any) -> None:
        run_study(study(), tmp_path, local(1))

    with pytest.raises(RunError, match=r"fine_tuning.jsonl is being written by another process"):
        run_study(study(), tmp_path, local(1), listener=again)


def first_two(runs: studies.Runs) -> Iterator[Key]:
    """The first two runs of the study, in a round each."""
    if len(runs) < 2:
        yield list(STUDIES["fine-tuning"].missing({}))[len(runs)]


@pytest.mark.slow
def test_jobs_of_a_cluster_leave_their_runs_for_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds as arrays of jobs; a run whose job outlived the command is not made again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    few = study(missing=first_two)
    assert len(run_study(few, tmp_path, slurm(tmp_path, cluster="local"))) == 2
    assert not list(tmp_path.glob("*.runs/*"))  # all are in the file
    other = tmp_path / "other"
    key = next(study().missing({}))
    left = fine_tuning_run(key, 0.123)
    studies._store(lambda key: left, other / "fine_tuning.runs", key)
    assert run_study(study(), other, local(1))[key] == left
    assert not list(other.glob("*.runs/*"))


def test_every_study_has_a_part_of_the_report() -> None:
    assert set(PARTS) == set(STUDIES)


def language_runs() -> Iterator[Any]:
    runs: dict[Any, Any] = {}
    while (key := next(language_results.missing(runs), None)) is not None:
        runs[key] = language_run(key, 2 + key[1] + 1e-3 * key[2])
        yield runs[key]


def test_the_command_prints_tables_and_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STUDIES, "fine-tuning", study())
    assert main(["study", "fine-tuning", "--results", str(tmp_path), "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "MirrorAdam p=1.1, 0.0003, 0, False: validation 0.8000" in printed
    assert "Results at the chosen rates" in printed and "not decided" in printed
    assert str(SEEDS[-1]) in printed
    found = list(language_runs())
    assert len(found) == STUDIES["language-model"].total
    for run in found:
        language_results.append_run(tmp_path / language_results.FILE, run)
    assert main(["study", "language-model", "--results", str(tmp_path)]) == 0  # nothing is missing
    assert "language-better" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--backend", "dask"], "--backend dask needs --address"),
        (["--address", "tcp://host:1"], "--address goes with --backend dask"),
    ],
)
def test_wrong_use_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["study", "fine-tuning", "--results", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", STUDIES)
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
