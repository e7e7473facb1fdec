"""Sweeps: the rule, what is kept, and two at once in one folder."""

from __future__ import annotations

import dataclasses
import errno
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_slices import make_cifar10
from mirrorhead_lab.training import OptimizerSettings, SweepError, sweep
from mirrorhead_lab.training.presets import preset
from mirrorhead_lab.training.run_folder import locked_run
from mirrorhead_lab.training.settings import TrainSettings, build_optimizer
from mirrorhead_lab.training.sweeps import Trial, Tuned, _best, run_key, run_trial


def rates(name: str, *lrs: float, **options: Any) -> list[OptimizerSettings]:
    return [OptimizerSettings(name, lr=lr, **options) for lr in lrs]  # pyright: ignore[reportArgumentType]


CANDIDATES = {
    "adamw": rates("adamw", 1e-4, 1e-3),
    "sgd": rates("sgd", 1e-2, 1e30, momentum=0.9),
}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    make_cifar10(tmp_path / "data", per_file=12)
    return tmp_path / "data"


def small_sweep(pictures: Path, out: Path, **options: Any) -> list[Tuned]:
    settings = {"seeds": (0, 1), "epochs": 1, "data": pictures, "partial": True, **options}
    return sweep("laptop-vit", CANDIDATES, out, **settings)


@pytest.mark.slow
def test_validation_chooses_and_only_the_chosen_read_test(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    adamw, momentum = small_sweep(pictures, out)
    for one, rules in ((adamw, CANDIDATES["adamw"]), (momentum, CANDIDATES["sgd"])):
        assert [record["lr"] for record in one.tried] == [rule.lr for rule in rules]
        assert not any("test_accuracy" in record for record in one.tried)
        assert [record["seed"] for record in one.final] == [0, 1]
        assert all("test_accuracy" in record for record in one.final)
        assert one.chosen in rules
    assert momentum.chosen == CANDIDATES["sgd"][0]
    assert [record["diverged"] for record in momentum.tried] == [False, True]
    # The final run with the first seed is the tuning run; it is not run twice.
    assert {r["run"] for r in adamw.final} & {r["run"] for r in adamw.tried}
    assert len([path for path in out.iterdir() if path.is_dir()]) == 6
    read = sorted(path.parent.name for path in out.glob("*/test.json"))
    assert read == sorted(record["run"] for one in (adamw, momentum) for record in one.final)
    (record,) = out.glob("sweep-*.json")
    written = json.loads(record.read_text())
    assert "2 learning rates for each candidate" in written["rule"]
    assert written["tuned"][0]["final"] == list(adamw.final)


@pytest.mark.parametrize(
    ("accuracies", "chosen"),
    [
        ((0.5, 0.7, 0.6), 1),  # the best
        ((0.7, 0.6, 0.7), 0),  # of equals, the smaller rate
        ((None, 0.1, None), 1),  # what diverged is out
        ((None, None, None), None),
    ],
)
def test_the_best_on_validation_is_chosen(
    accuracies: tuple[float | None, ...], chosen: int | None
) -> None:
    rules = [OptimizerSettings("sgd", lr=lr) for lr in (0.1, 0.2, 0.3)]
    records = [{"diverged": a is None, "validation_accuracy": a} for a in accuracies]
    assert _best(rules, records, TrainSettings()) == (None if chosen is None else rules[chosen])
    turned = _best(rules[::-1], records[::-1], TrainSettings())  # whatever their order
    assert turned == (None if chosen is None else rules[chosen])


@pytest.mark.slow
def test_what_is_done_is_not_run_again(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small_sweep(pictures, tmp_path / "out")
    monkeypatch.setattr("mirrorhead_lab.training.classification.epoch_batches", None)
    assert small_sweep(pictures, tmp_path / "out") == first
    with pytest.raises(SweepError, match="4 runs failed"):
        small_sweep(pictures, tmp_path / "elsewhere")


def small_trial(pictures: Path, root: Path, epochs: int = 1) -> Trial:
    chosen = preset("laptop-vit", OptimizerSettings("adamw", lr=1e-3))
    training = dataclasses.replace(chosen.training, epochs=epochs)
    chosen = dataclasses.replace(chosen, training=training)
    return Trial("adamw", chosen, root, pictures, partial=True, test=True)


def test_who_comes_second_waits_and_takes_the_result(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = small_trial(pictures, tmp_path / "out", epochs=2)
    with ThreadPoolExecutor(2) as pool:
        with locked_run(trial.folder):
            jobs = [pool.submit(run_trial, trial) for _ in range(2)]
            with pytest.raises(TimeoutError):
                jobs[0].result(timeout=0.5)
            assert [path.name for path in trial.folder.iterdir()] == ["mirrorhead.lock"]
        one, two = (job.result() for job in jobs)
    assert one == two
    lines = (trial.folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("epoch") == 2


def test_a_file_system_without_locks_is_an_error_and_no_endless_wait(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="cannot lock files") as caught:
        run_trial(small_trial(pictures, tmp_path))
    assert not isinstance(caught.value, BlockingIOError)


def test_runs_on_other_data_are_not_taken(pictures: Path, tmp_path: Path) -> None:
    """The same settings and folder, but another slice: no old result is passed off as new."""
    candidates = {"sgd": rates("sgd", 0.01)}
    options: dict[str, Any] = {"seeds": (0,), "epochs": 1, "partial": True}
    sweep("laptop-vit", candidates, tmp_path / "out", data=pictures, **options)
    make_cifar10(tmp_path / "other", per_file=13)
    with pytest.raises(SweepError, match="other settings: examples"):
        sweep("laptop-vit", candidates, tmp_path / "out", data=tmp_path / "other", **options)


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_are_done(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = {"adamw": rates("adamw", 1e-4, 1e-3), "sgd": rates("sgd", 0.01, 0.1)}
    options: dict[str, Any] = {"seeds": (0, 1), "epochs": 1, "partial": True, "data": pictures}
    out, told = tmp_path / "out", []

    def broken(*arguments: Any) -> Any:
        if arguments[1] == candidates["adamw"][1]:
            raise MemoryError("no room")
        return build_optimizer(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("mirrorhead_lab.training.classification.build_optimizer", broken)
        with pytest.raises(SweepError) as caught:
            sweep("laptop-vit", candidates, out, listener=lambda *a: told.append(a), **options)
    assert "1 run failed" in str(caught.value)
    assert "adamw, lr 0.001, seed 0: MemoryError: no room" in str(caught.value)
    (details,) = out.glob("sweep-*.failures.txt")
    assert "in broken" in details.read_text()
    assert not list(out.glob("sweep-*.json"))
    assert len(list(out.glob("*/result.json"))) == 1 + 2 + 1  # all others, sgd's second seed too
    assert len(told) == 4 + 2 and not any(stored for *_, stored in told)
    told.clear()
    result = sweep("laptop-vit", candidates, out, listener=lambda *a: told.append(a), **options)
    assert result == sweep("laptop-vit", candidates, tmp_path / "whole", **options)
    assert [stored for *_, stored in told].count(False) == 3  # lr 1e-3, and adamw's two seeds
    assert not details.exists() and len(list(out.glob("sweep-*.json"))) == 1


@pytest.mark.slow
def test_processes_give_what_one_gives(pictures: Path, tmp_path: Path) -> None:
    assert small_sweep(pictures, tmp_path / "a", jobs=2) == small_sweep(pictures, tmp_path / "b")


def test_of_equals_the_smaller_rate_is_chosen() -> None:
    rules = rates("sgd", 0.3, 0.1, 0.2, 0.4)
    accuracies = [0.8, 0.8, 0.7, 0.9]
    records = [
        {"validation_accuracy": a, "diverged": rule.lr == 0.4}
        for a, rule in zip(accuracies, rules, strict=True)
    ]
    assert _best(rules, records, TrainSettings()) == rules[1]
    assert _best(rules, [{"diverged": True}] * 4, TrainSettings()) is None


def test_with_milestones_a_rate_must_come_as_far_as_the_others() -> None:
    rules = rates("sgd", 0.1, 0.2, 0.3)
    records = [
        {"validation_accuracy": validation, "train_accuracy": train, "diverged": False}
        for validation, train in ((0.9, 0.94), (0.8, 0.96), (0.7, 0.97))
    ]
    assert _best(rules, records, TrainSettings()) == rules[0]
    assert _best(rules, records, TrainSettings(milestones=(0.9, 0.95))) == rules[1]


def test_keys_tell_settings_apart() -> None:
    base = preset("laptop", p=1.1)
    changed = [
        dataclasses.replace(base, training=dataclasses.replace(base.training, **change))
        for change in ({"seed": 1}, {"epochs": 6}, {"clip": None})
    ]
    changed += [preset("laptop", p=2.0), preset("paper-3", p=1.1)]
    assert len({run_key(one) for one in [base, *changed]}) == 6
    same = dataclasses.replace(base, training=dataclasses.replace(base.training, keep=7))
    assert run_key(same) == run_key(base)


@pytest.mark.parametrize(
    ("candidates", "seeds", "says"),
    [
        ({}, (0,), "at least 1 each"),
        ({"a": rates("sgd", 0.1), "b": rates("sgd", 0.1, 0.2)}, (0,), "same number"),
        ({"a": rates("sgd", 0.1, 0.1)}, (0,), "learning rate twice"),
        ({"a": [*rates("sgd", 0.1), *rates("sgd", 0.2, momentum=0.9)]}, (0,), "in lr alone"),
        ({"a": rates("sgd", 0.1)}, (0, 0), "different numbers"),
        ({"a": rates("sgd", 0.1)}, (0, -1), "none negative"),
        ({"a": rates("sgd", 0.1)}, (), "at least one"),
    ],
)
def test_unfair_sweeps_are_refused(tmp_path: Path, candidates: Any, seeds: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sweep("laptop", candidates, tmp_path, seeds=seeds)
    assert not list(tmp_path.iterdir())
