"""`mirrorhead evaluate` and `mirrorhead collect`, on slices that the tests make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mirrorhead_lab.cli.main import main
from run_cases import make_slices, make_text_run, make_vit_run


@pytest.fixture
def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return make_slices(tmp_path / "data")


def test_everything_that_fits_is_measured_and_shown(slices: Path, capsys: Any) -> None:
    make_text_run(Path("run"))
    assert main(["evaluate", "run", "--partial"]) == 0
    told = capsys.readouterr().out
    found = json.loads(Path("run/measures.json").read_text())["measures"]
    assert {*found} == {"test", "weights", "pruned", "entropy", "eraser", "cad"}
    assert f"{found['test']['accuracy']:.2%}" in told
    assert f"{found['weights']['query']['gini']:.4f}" in told
    for part, splits in (("eraser", ("val", "test")), ("cad", ("dev", "test"))):
        for split in splits:
            for name in ("attention", "gradient", "random"):
                assert f"{found[part][split][name]['auprc']:.4f}" in told
    for words in ("gradient x input", "random", "token f1", "test, 2 pairs", "val, 1 documents"):
        assert words in told
    assert told.splitlines()[-1] == "measures: run/measures.json"
    # The same from what is kept, in the same order.
    assert main(["evaluate", "run", "--partial"]) == 0
    assert capsys.readouterr().out.split() == told.split()


def test_parts_are_chosen(slices: Path, capsys: Any) -> None:
    make_vit_run(Path("vit"))
    assert main(["evaluate", "vit", "--on", "weights", "--on", "test", "--partial"]) == 0
    told = capsys.readouterr().out
    assert "Gini" in told and "accuracy" in told and "Entropy" not in told
    assert {*json.loads(Path("vit/measures.json").read_text())["measures"]} == {"weights", "test"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("evaluate nothing", "nothing has no preset.json"),
        ("evaluate vit --on cad", "for a run on cifar10, got cad"),
        ("evaluate text --on cad --data nowhere", "cad, bert: there are no folders cad-imdb, "),
        ("evaluate text", "The folder is not complete"),
        ("collect nothing --out x.json", "has no sweep-"),
        ("collect text --out x.json --jobs 0", "--jobs must be at least 1, got 0"),
    ],
)
def test_wrong_use_is_told(slices: Path, capsys: Any, line: str, says: str) -> None:
    make_text_run(Path("text"))
    make_vit_run(Path("vit"))
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert says in told and told.startswith("mirrorhead: ") and told.count("\n") == 1
    assert not list(Path().glob("*/measures.json")) and not Path("x.json").exists()


def test_a_sweep_is_collected(slices: Path, capsys: Any) -> None:
    make_vit_run(Path("runs/a"))
    scores = dict.fromkeys(("train_accuracy", "validation_accuracy", "test_accuracy"), 0.1)
    final = [{"run": "a", "seed": 0, "diverged": False, "best_epoch": 1, **scores}]
    tuned = [{"name": "SGD", "chosen": {"name": "sgd", "lr": 0.1}, "tried": [], "final": final}]
    asked = {"preset": "laptop-vit", "epochs": 1, "seeds": [0], "rivals": {}}
    record = {"asked": asked, "rule": "none", "tuned": tuned}
    Path("runs/sweep-1.json").write_text(json.dumps(record))
    Path("results").mkdir()
    assert main(["collect", "runs", "--out", "results/cifar10.json", "--partial"]) == 0
    assert capsys.readouterr().out == "results of 1 runs: results/cifar10.json\n"
    found = json.loads(Path("results/cifar10.json").read_text())
    assert found["rivals"][0]["runs"][0]["measures"]["weights"]["key"]["large"] > 0
