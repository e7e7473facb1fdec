"""Sweeps: the rule, what is kept, and two at once in one folder."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_slices import make_cifar10
from mirrorhead.training import OptimizerSettings, sweep
from mirrorhead.training.presets import preset
from mirrorhead.training.sweeps import Tuned, _best, run_key, run_one


def rates(name: str, *lrs: float, **options: Any) -> list[OptimizerSettings]:
    return [OptimizerSettings(name, lr=lr, **options) for lr in lrs]  # pyright: ignore[reportArgumentType]


RIVALS = {
    "adamw": rates("adamw", 1e-4, 1e-3),
    "md 1.5": rates("mirror-descent", 1e-2, 1e30, p=1.5),
}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    make_cifar10(tmp_path / "data", per_file=12)
    return tmp_path / "data"


def small_sweep(pictures: Path, out: Path, **options: Any) -> list[Tuned]:
    settings = {"seeds": (0, 1), "epochs": 1, "data": pictures, "partial": True, **options}
    return sweep("laptop-vit", RIVALS, out, **settings)


def test_validation_chooses_and_only_the_chosen_read_test(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    adamw, descent = small_sweep(pictures, out)
    for one, rules in ((adamw, RIVALS["adamw"]), (descent, RIVALS["md 1.5"])):
        assert [record["lr"] for record in one.tried] == [rule.lr for rule in rules]
        assert not any("test_accuracy" in record for record in one.tried)
        assert [record["seed"] for record in one.final] == [0, 1]
        assert all("test_accuracy" in record for record in one.final)
        assert one.chosen in rules
    assert descent.chosen == RIVALS["md 1.5"][0]
    assert [record["diverged"] for record in descent.tried] == [False, True]
    # The final run with the first seed is the tuning run; it is not run twice.
    assert {r["run"] for r in adamw.final} & {r["run"] for r in adamw.tried}
    assert len([path for path in out.iterdir() if path.is_dir()]) == 6
    read = sorted(path.parent.name for path in out.glob("*/test.json"))
    assert read == sorted(record["run"] for one in (adamw, descent) for record in one.final)
    (record,) = out.glob("sweep-*.json")
    written = json.loads(record.read_text())
    assert "2 learning rates for each rival" in written["rule"]
    assert written["tuned"][0]["final"] == list(adamw.final)


def test_what_is_done_is_not_run_again(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small_sweep(pictures, tmp_path / "out")
    monkeypatch.setattr("mirrorhead.training.loop.epoch_batches", None)
    assert small_sweep(pictures, tmp_path / "out") == first
    with pytest.raises(TypeError):
        small_sweep(pictures, tmp_path / "elsewhere")


def test_two_sweeps_share_a_folder(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirrorhead.training.sweeps.WAIT", 0.05)
    chosen = preset("laptop-vit", OptimizerSettings("adamw", lr=1e-3))
    chosen = dataclasses.replace(chosen, training=dataclasses.replace(chosen.training, epochs=2))
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run_one, chosen, tmp_path, data=pictures, partial=True) for _ in range(2)
        ]
        one, two = (job.result() for job in jobs)
    assert one == two
    lines = (tmp_path / run_key(chosen) / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("epoch") == 2


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
    assert _best(rules, records) == rules[1]
    assert _best(rules, [{"diverged": True}] * 4) is None


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
    ("rivals", "seeds", "says"),
    [
        ({}, (0,), "at least 1 each"),
        ({"a": rates("sgd", 0.1), "b": rates("sgd", 0.1, 0.2)}, (0,), "same number"),
        ({"a": rates("sgd", 0.1, 0.1)}, (0,), "learning rate twice"),
        ({"a": [*rates("sgd", 0.1), *rates("sgd", 0.2, momentum=0.9)]}, (0,), "in lr alone"),
        ({"a": rates("sgd", 0.1)}, (0, 0), "different numbers"),
        ({"a": rates("sgd", 0.1)}, (), "at least one"),
    ],
)
def test_unfair_sweeps_are_refused(tmp_path: Path, rivals: Any, seeds: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sweep("laptop", rivals, tmp_path, seeds=seeds)
    assert not list(tmp_path.iterdir())
