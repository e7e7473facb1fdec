"""Sweeps and studies of classifiers on slices: the rule, what is kept, clusters, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from data_slices import make_cifar10
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.evaluation.measures import EvaluationData, kept_measures, measure
from mirrorhead_lab.evaluation.results import Classified
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.runtime.jobs import dask, local, slurm
from mirrorhead_lab.studies import heads, imdb, imdb_to_the_end
from mirrorhead_lab.studies.classifiers import Classifier, classifier_study, load, rates, score
from mirrorhead_lab.studies.engine import make
from mirrorhead_lab.studies.study import Method, Rows, Study, Trial
from mirrorhead_lab.studies.sweep import sweep
from mirrorhead_lab.training import OptimizerSettings, SweepError, build_optimizer, load_run
from mirrorhead_lab.training.candidates import parse_candidate
from run_cases import make_slices
from test_experiments_cluster import PATHS, cluster, wait_for
from tiny_bert import toy_texts

LINE = ["--candidate", "sgd lr=0.1,0.01", "--candidate", "adamw weight_decay=0.1 lr=1e-3,1e-4"]
CANDIDATES = dict(parse_candidate(text) for text in LINE[1::2])


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_cifar10(tmp_path / "data", per_file=12)
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def small(candidates: Any = CANDIDATES, **options: Any) -> Study[Any]:
    usual: dict[str, Any] = {"seeds": (0, 1), "epochs": 1, "partial": True}
    return sweep("cifar10", candidates, **{**usual, **options})


def made(study: Study[Any], out: str = "out", backend: Any = None) -> Rows[Classified]:
    place = Path(out).resolve()
    return make(study, place, backend or local(1), runs=place)


def measured(rows: Rows[Classified]) -> dict[Trial, Classified]:
    """What was measured, without times."""
    return {row.trial: replaced(row.measured) for row in rows}


def replaced(run: Classified) -> Classified:
    return structs.replace(run, seconds_per_epoch=None)


@pytest.mark.slow
def test_validation_chooses_and_only_the_chosen_read_test(pictures: Path) -> None:
    lost = tuple(OptimizerSettings("sgd", lr=lr, momentum=0.9) for lr in (0.01, 1e30))
    study = small({**CANDIDATES, "lost": lost})
    rows = made(study)
    for trial, run in measured(rows).items():
        folder = Path("out") / study.name / trial.training
        assert (run.test is None) == (not trial.final)
        if trial.setting["lr"] == 1e30:
            assert run == Classified() and not trial.final
            continue
        result = json.loads((folder / "result.json").read_text())
        assert (run.best_epoch, run.validation) == (result["best_epoch"], result["best_accuracy"])
        if trial.final:
            test = json.loads((folder / "test.json").read_text())
            plain = measure(loaded := load_run(folder), EvaluationData("cifar10", partial=True))
            assert run.test == test["accuracy"] == plain["test"]["accuracy"]
            assert run.measures == kept_measures(folder, loaded.preset)
    for name, method in study.methods.items():
        tried = [rows.by_trial[trial].measured.validation for trial in study.tuning_trials(name)]
        best = max(range(2), key=lambda k: (tried[k] or 0, -k))  # of equals the smaller rate
        assert rows.chosen(name) == method.settings[best]
        assert method.settings[0]["lr"] < method.settings[1]["lr"]
    # The final run of tuning's seed is tuning's run: 3 x 2 for tuning, 3 x 1 others.
    folders = [path for path in (Path("out") / study.name).iterdir() if path.is_dir()]
    assert len(folders) == 9 and len(list(Path("out").glob("*/*/test.json"))) == 6


@pytest.mark.slow
def test_what_is_done_is_not_run_again(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(small())
    with monkeypatch.context() as patch:
        patch.setattr("mirrorhead_lab.training.classification.epoch_batches", None)
        assert made(small()).by_trial == first.by_trial
        # Another sweep in the same folder takes what is there, too.
        assert len(small({"sgd": CANDIDATES["sgd"]}).methods) == 1
        assert len(made(small({"sgd": CANDIDATES["sgd"]}))) == 4
        # Without the file, the folders of the runs are enough.
        (file,) = Path("out").glob("*.jsonl")
        file.unlink()
        assert measured(made(small())) == measured(first)
        with pytest.raises(SweepError, match="4 of 4 runs failed"):
            made(small(), "elsewhere")
    make_cifar10(pictures.parent / "other", per_file=13)
    other = small(data=pictures.parent / "other")
    assert other.name != small().name != small(epochs=2).name  # other runs, never passed off


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_are_done(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        if arguments[1].lr == 1e-3:
            raise MemoryError("no room")
        return build_optimizer(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("mirrorhead_lab.training.classification.build_optimizer", broken)
        with pytest.raises(SweepError) as caught:
            made(small())
    assert "adamw weight_decay=0.1, lr 0.001, seed 0: MemoryError: no room" in str(caught.value)
    assert "1 of 4 runs failed" in str(caught.value)
    assert measured(made(small())) == measured(made(small(), "whole"))


@pytest.mark.slow
def test_a_method_may_be_any_function_that_makes_an_optimizer(pictures: Path) -> None:
    def own(model: torch.nn.Module, lr: float, decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr, weight_decay=decay, fused=True)

    about = Classifier("laptop-vit", "cifar10", epochs=1, partial=True)
    methods = {
        "by name": rates("adamw", 1e-3, weight_decay=0.1),
        "own": Method(({"lr": 1e-3, "decay": 0.1},), own),
    }
    rows = made(classifier_study(about, methods, name="own", title="Own", seeds=(0,)))
    one, two = (rows.final(name)[0] for name in methods)
    assert replaced(one) == replaced(two)
    settings = {
        json.loads(p.read_text())["optimizer"]["name"] for p in Path().rglob("settings.json")
    }
    assert settings == {"adamw", "own"}


@pytest.mark.parametrize(
    ("milestones", "best"),
    [((0.9, 0.95), 1), ((), 0)],
)
def test_with_milestones_a_rate_must_come_as_far_as_the_others(
    milestones: tuple[float, ...], best: int
) -> None:
    about = Classifier("laptop-to-the-end" if milestones else "laptop", "imdb")
    runs = [(0.9, 0.94), (0.8, 0.96), (0.7, 0.965)]
    scores = [score(about, Classified(validation=v, train=t)) or 0 for v, t in runs]
    assert scores.index(max(scores)) == best
    assert score(about, Classified()) is None


@pytest.mark.parametrize(
    ("candidates", "options", "says"),
    [
        ({"a": (0.1,), "b": (0.1, 0.2)}, {}, "same number"),
        ({"a": (0.1, 0.1)}, {}, "learning rate twice"),
        ({"a": ()}, {}, "must have rates"),
        ({"a": (0.1,)}, {"seeds": (0, 0)}, "different numbers"),
        ({"a": (0.1,)}, {"seeds": (0, -1)}, "none negative"),
        ({"a": (0.1,)}, {"seeds": ()}, "different numbers"),
        ({"a": (0.1,)}, {"preset": "paper-3"}, "preset must be for images"),
        ({"a": (0.1,)}, {"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_unfair_sweeps_are_refused(
    pictures: Path, candidates: Any, options: dict[str, Any], says: str
) -> None:
    rules = {n: [OptimizerSettings("sgd", lr=lr) for lr in lrs] for n, lrs in candidates.items()}
    with pytest.raises(ValueError, match=says):
        small(rules, **options)
    mixed = [OptimizerSettings("sgd", lr=0.1), OptimizerSettings("sgd", lr=0.2, momentum=0.9)]
    with pytest.raises(ValueError, match="differ in lr alone"):
        small({"a": mixed})


# --- the command ----------------------------------------------------------------------------


def command(*more: str, jobs: int | None = 1) -> list[str]:
    line = ["sweep", "cifar10", *LINE, "--seeds", "0", "1", "--epochs", "1", "--partial", *more]
    return [*line, "--jobs", str(jobs)] if jobs else line


def test_a_table_and_a_file(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--plan")) == 0
    assert capsys.readouterr().out.startswith("8 runs are missing, about ")
    assert not Path("runs").exists()
    assert main(command()) == 0
    told = capsys.readouterr().out
    (file,) = Path("runs/cifar10").glob("*.jsonl")
    assert told.splitlines()[-1] == f"runs: {file}"
    rows = made(small(), "runs/cifar10")
    for name in rows.study.methods:
        test = [100 * (run.test or 0) for run in rows.final(name)]
        (row,) = [line for line in told.splitlines() if line.startswith(f"│ {name} ")]
        assert f"{sum(test) / 2:.2f} ± " in row and f" {(rows.chosen(name) or {})['lr']:g} " in row
    assert main(command()) == 0
    assert capsys.readouterr().out.splitlines()[-5:] == told.splitlines()[-5:]


@pytest.mark.slow
def test_any_data_set_can_be_swept(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of texts of one's own, with the candidates that are there by default."""
    make_slices(Path("texts"))
    toy_texts(Path("own.csv"))
    line = "sweep own.csv --seeds 0 1 --epochs 1 --partial --jobs 1 --data texts"
    assert main(line.split()) == 0
    assert "mirror-adam p=1.1 knee=1.0" in capsys.readouterr().out
    (file,) = Path("runs/own").glob("own-laptop-*.jsonl")
    assert len(file.read_text().splitlines()) == 3 * (4 + 2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("imdb", "there are no folders"),
        ("cifar10", "not complete"),
        ("mnist", "the data set must be one of imdb"),
        ("cifar10 --partial --data nowhere", "nowhere"),
        ("cifar10 --partial --preset large", "--preset must be one of laptop"),
        ("cifar10 --partial --preset paper-3", "--preset must be for images, as cifar10 is"),
        ("cifar10 --partial --epochs 0", "--epochs must be at least 1"),
        ("cifar10 --partial --seeds 1 1", "--seeds must be different"),
        ("cifar10 --partial --jobs 0", "--jobs must be at least 1"),
        ("cifar10 --partial --backend dask", "--backend dask needs --address"),
        ("cifar10 --partial --address tcp://x", "--address goes with --backend dask"),
        ("cifar10 --partial --backend slurm", "--backend slurm needs sbatch"),
        ("cifar10 --partial --candidate sgd", "--candidate 'sgd': lr is missing"),
        ("cifar10 --partial --candidate sgd|lr=1 --candidate sgd|lr=2", "'sgd' is given twice"),
        ("cifar10 --partial --candidate sgd|lr=1 --candidate adamw|lr=1,2", "same number of"),
    ],
)
def test_wrong_use_is_one_line(
    pictures: Path, line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *(word.replace("|", " ") for word in line.split())]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mirrorhead: ") and error.count("\n") == 1
    assert says in error
    assert not list(Path().rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must begin with one of mirror-descent"),
        ("adam lr=1", "must begin with one of mirror-descent"),
        ("sgd lr=1 p=2", "sgd takes lr=..., momentum=..., weight_decay=..., got 'p=2'"),
        ("sgd lr", "got 'lr'"),
        ("sgd lr=1 lr=2", "lr is given twice"),
        ("sgd lr=1,,2", "lr must be a number, got ''"),
        ("sgd lr=nan", "lr must be greater than 0"),
        ("sgd lr=1 momentum=x", "momentum must be a number, got 'x'"),
        ("mirror-descent lr=1", "mirror-descent needs p"),
        ("mirror-descent p=2 normalize=2 lr=1", 'normalize must be "tensor" or "global"'),
    ],
)
def test_candidates_are_read_strictly(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="candidate") as caught:
        parse_candidate(text)
    assert says in str(caught.value) and repr(text) in str(caught.value)


def test_a_candidate_has_its_options() -> None:
    name, rules = parse_candidate(
        "  mirror-descent   normalize=global lr=1e-2,3 p=1.5 momentum=0.9"
    )
    assert name == "mirror-descent p=1.5 momentum=0.9 normalize=global"
    assert [rule.lr for rule in rules] == [0.01, 3.0]
    assert {(r.p, r.momentum, r.normalize) for r in rules} == {(1.5, 0.9, "global")}


# --- processes, clusters, interruptions -----------------------------------------------------


@pytest.mark.slow
def test_every_backend_gives_what_one_process_gives(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    here = measured(made(small()))
    assert measured(made(small(), "two", local(2))) == here
    with cluster(tmp_path) as (address, _):
        assert measured(made(small(), "dask", dask(address))) == here
    # Each job starts two processes that import torch: one candidate is enough.
    one = {"sgd": CANDIDATES["sgd"][1:]}
    jobs, alone = slurm(Path("jobs"), "local"), small(one, seeds=(0,))
    found = measured(made(alone, "jobs", jobs))
    assert found == {trial: here[trial] for trial in found} and len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_resumes(pictures: Path, how: signal.Signals) -> None:
    line = command("--epochs", "5", "--out", "stopped", jobs=2)
    process = subprocess.Popen(
        [sys.executable, "-m", "mirrorhead_lab", *line], env={**os.environ, "PYTHONPATH": PATHS},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(list(Path("stopped").glob("*/*/checkpoints/step-*"))) > 3)
    with pytest.raises(RunError, match="being written by another process"):
        made(small(epochs=5), "stopped")
    os.killpg(process.pid, how)
    _, error = process.communicate(timeout=120)
    if how == signal.SIGINT:
        assert process.returncode == 130
        last = error.strip().splitlines()[-1]
        assert last == "mirrorhead: Interrupted. Run the same command again to resume."
        assert "Traceback" not in error
    one, two = (measured(made(small(epochs=5), out)) for out in ("stopped", "whole"))
    assert one == two


# --- the published studies, on slices -------------------------------------------------------


@pytest.mark.slow
def test_films_to_the_end_and_their_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `study imdb-to-the-end` and `study heads` do, with two rates and two epochs."""
    data = make_slices(tmp_path / "data")
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    about = Classifier("laptop-to-the-end", "imdb", epochs=2, partial=True)
    methods = {"MD p=2": rates("mirror-descent", 0.1, p=2.0)}
    study = classifier_study(about, methods, name="imdb-to-the-end", title="Films", seeds=(0, 1))
    rows = make(study, tmp_path, local(1), data=data, runs=tmp_path / "runs")
    for run in rows.final("MD p=2"):
        assert run.best_epoch == 2  # the last, not the best
        assert run.scores.milestones[0.0].epoch == 1
        assert {*run.scores.eraser} == {"val", "test"} and {*run.scores.cad} == {"dev", "test"}
    part = study.part(rows)
    assert len(part.tables) == 10 and all(figure.inline()[1] for figure in part.figures)

    monkeypatch.setattr(imdb_to_the_end, "ABOUT", about)
    monkeypatch.setattr(imdb_to_the_end, "METHODS", methods)
    for seed in (0, 2):  # one that is there, and one that is trained for this
        trial = Trial(method="MD p=2", setting={"lr": 0.1}, seed=seed, final=True)
        sets = load(about, "", data)
        found = heads.run(trial, (sets, data), tmp_path / "runs" / "heads" / trial.training)
        assert (found.p, found.seed, found.model) == (2.0, seed, trial.training)
        assert [at.epoch for at in found.checkpoints] == [0, 1, 2]
        assert (tmp_path / "runs" / "imdb-to-the-end" / trial.training / "test.json").exists()


def test_the_published_studies_need_what_they_measure() -> None:
    assert imdb.ABOUT.parts == ["weights", "pruned", "entropy", "eraser", "cad"]
    assert imdb_to_the_end.ABOUT.parts[-1] == "milestones"
    assert Classifier("laptop", "trec").parts == ["weights", "pruned", "entropy"]
    assert heads.METHODS.keys() - {heads.ENCODER} == imdb_to_the_end.METHODS.keys()
